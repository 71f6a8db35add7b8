"""The numbers of a run, computed by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from retouch.config import ConfigError, RunConfig, derive, load_run
from retouch.config.derived import snapshots, stochastic_steps, window_starts
from retouch.data.sampler import rank_slots

from .conftest import TINY

RunWith = Callable[..., RunConfig]

SHAPE = (
    "rollout={group_size: 8, global_groups_per_batch: 8, batches_per_epoch: 2, num_steps: 10}",
    "optimizer={batch_size_per_device: 4, gradient_accumulation: 2}",
    "algorithm={name: grpo, sft_steps: 100, inner_epochs: 2}",
    "training={max_steps: 1000, gradient_checkpointing: false}",
)


def test_the_tiny_run_on_one_process() -> None:
    assert derive(load_run(TINY)).as_dict() == {
        "world_size": 1,
        "warmup_steps": 20,
        "global_images_per_rollout_batch": 96,  # 12 groups of 8
        "global_groups_per_epoch": 12,
        "global_images_per_epoch": 96,
        "images_per_epoch_per_device": 96,
        "padded_images_per_epoch": 0,
        "global_rows_per_step": 96,  # 48 x 2
        "optimizer_steps_per_epoch": 1,
        "epochs": 60,  # 80 - 20
        "stochastic_steps": 2,
        "trained_steps": 2,
        # of 4 steps 0 or 1 before the window, once for 8 images: 4 - .5 x 7/8; 2 of the reference; 2 x 3
        "forwards_per_image": 3.5625 + 2 + 6,
        "vision_tokens": 0,
        "decoder_backwards_per_image": 0,
        "state_bytes_per_weight": 16 + 4,  # weight, gradient, two moments; the reference of the KL
    }


@pytest.mark.parametrize(
    ("world_size", "per_device", "padded", "rows", "steps", "epochs"),
    [
        (1, 128, 0, 8, 32, 29),  # 128 / 8 = 16 steps, twice; 900 / 32 = 28.1
        (2, 64, 0, 16, 16, 57),  # 900 / 16 = 56.25
        (3, 44, 4, 24, 12, 75),  # each batch of 64 is padded to 3 x 22; 44 / 8 = 5.5
        (5, 26, 2, 40, 8, 113),  # 5 x 13 for each batch of 64; 26 / 8 = 3.25
        (200, 2, 272, 1600, 2, 450),  # more processes than images: 1 a batch
    ],
)
def test_images_are_dealt_to_processes(
    world_size: int, per_device: int, padded: int, rows: int, steps: int, epochs: int, run_with: RunWith
) -> None:
    derived = derive(run_with(*SHAPE), world_size)
    assert (derived.global_images_per_epoch, derived.global_groups_per_epoch) == (128, 16)
    assert derived.global_images_per_rollout_batch == 64
    assert derived.images_per_epoch_per_device == per_device
    assert derived.padded_images_per_epoch == padded
    assert derived.global_rows_per_step == rows
    assert derived.optimizer_steps_per_epoch == steps
    assert derived.epochs == epochs


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 7, 64, 65])
def test_they_are_the_numbers_of_the_sampler(world_size: int, run_with: RunWith) -> None:
    run = run_with(*SHAPE)
    derived = derive(run, world_size)
    batches = [list(range(8)), list(range(8, 16))]
    for rank in range(world_size):
        slots = [slot for batch in batches for slot in rank_slots(batch, 8, rank, world_size)]
        assert len(slots) == derived.images_per_epoch_per_device
    every = [s for batch in batches for rank in range(world_size) for s in rank_slots(batch, 8, rank, world_size)]
    assert sum(slot.padding for slot in every) == derived.padded_images_per_epoch


def test_sft_has_no_rollouts(run_with: RunWith) -> None:
    derived = derive(run_with("algorithm={name: sft}", "training.max_steps=70", *SHAPE[1:2]), 3)
    assert derived.warmup_steps == 70
    assert derived.global_rows_per_step == 24
    assert derived.forwards_per_image == 4  # forward, backward of 2, once more for gradient checkpointing
    zero = {"global_images_per_epoch", "optimizer_steps_per_epoch", "epochs", "stochastic_steps", "trained_steps"}
    assert {name for name, value in derived.as_dict().items() if value == 0} >= zero


def test_ppo_counts_single_images(run_with: RunWith) -> None:
    derived = derive(run_with(*SHAPE, "algorithm={name: ppo}", "rollout.group_size=1"), 2)
    assert derived.global_images_per_epoch == 16
    assert derived.images_per_epoch_per_device == 8
    assert (derived.optimizer_steps_per_epoch, derived.epochs) == (1, 1000)


@pytest.mark.parametrize(
    ("overrides", "stochastic", "trained", "forwards"),
    [
        ((), 10, 10, 10 + 2 * 10 * 3),
        (("rollout.window={size: 3}",), 3, 3, 10 + 2 * 3 * 3),
        (("algorithm.timestep_fraction=0.55",), 10, 6, 10 + 2 * 6 * 3),
        (("algorithm.timestep_fraction=0.01",), 10, 1, 10 + 2 * 1 * 3),
        (("rollout.step_rule=cps",), 9, 9, 10 + 2 * 9 * 3),
        (("rollout.step_rule=cps", "rollout.window={size: 3}"), 3, 3, 10 + 2 * 3 * 3),
        (("rollout.step_rule=cps", "algorithm.timestep_fraction=0.5"), 9, 5, 10 + 2 * 5 * 3),
        (("rollout.num_steps=25", "algorithm.timestep_fraction=0.28"), 25, 7, 25 + 2 * 7 * 3),  # 7.000000000000001
        (("training.gradient_checkpointing=true",), 10, 10, 10 + 2 * 10 * 4),
        # the reference runs once an epoch, however many inner epochs train on it
        (("algorithm.kl_weight=0.04",), 10, 10, 10 + 10 + 2 * 10 * 3),
        (("algorithm.kl_weight=0.04", "rollout.window={size: 2}"), 2, 2, 10 + 2 + 2 * 2 * 3),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_forwards_of_an_image(
    overrides: tuple[str, ...], stochastic: int, trained: int, forwards: int, run_with: RunWith
) -> None:
    derived = derive(run_with(*SHAPE, *overrides))
    assert (derived.stochastic_steps, derived.trained_steps) == (stochastic, trained)
    assert derived.forwards_per_image == forwards


SD = "model={family: sd_inpaint, path: tiny}"
PAIRS = ("data={format: manifest, path: pairs.json, resolution: 64}", "rewards={}")


@pytest.mark.parametrize(
    ("world_size", "per_device", "steps", "epochs"),
    [(1, 128, 4, 225), (2, 64, 2, 450), (3, 44, 2, 450), (16, 8, 2, 450), (20, 8, 2, 450)],
)
def test_dpo_counts_pairs(world_size: int, per_device: int, steps: int, epochs: int, run_with: RunWith) -> None:
    """16 groups are 16 pairs at most: in steps of 8 a process they take 2 on one, 1 on more; twice over."""
    derived = derive(run_with(*SHAPE, "algorithm={name: dpo, sft_steps: 100, inner_epochs: 2}"), world_size)
    assert (derived.global_images_per_epoch, derived.global_groups_per_epoch) == (128, 16)
    assert derived.images_per_epoch_per_device == per_device
    assert derived.global_rows_per_step == 8 * world_size
    assert (derived.optimizer_steps_per_epoch, derived.epochs) == (steps, epochs)
    assert (derived.stochastic_steps, derived.trained_steps) == (0, 0)


def test_nft_counts_images(run_with: RunWith) -> None:
    derived = derive(run_with(*SHAPE, "algorithm={name: nft, sft_steps: 100, inner_epochs: 2}"), 2)
    assert (derived.images_per_epoch_per_device, derived.optimizer_steps_per_epoch) == (64, 16)
    assert (derived.epochs, derived.stochastic_steps, derived.trained_steps) == (57, 0, 0)


def test_given_pairs_have_no_rollouts(run_with: RunWith) -> None:
    algorithm = "algorithm={name: dpo, pairs: offline, sft_steps: 7, timesteps_per_pair: 3}"
    derived = derive(run_with(*SHAPE[1:2], SHAPE[3], algorithm, *PAIRS), 3)
    assert (derived.warmup_steps, derived.global_rows_per_step) == (7, 24)
    assert derived.forwards_per_image == 3 * (1 + 3)
    zero = {"global_images_per_epoch", "optimizer_steps_per_epoch", "epochs", "stochastic_steps", "trained_steps"}
    assert {name for name, value in derived.as_dict().items() if value == 0} >= zero


@pytest.mark.parametrize(
    ("algorithm", "forwards"),
    [
        # the 2 of 8 images that make the pair: each copy under the reference, then forward and backward; twice over
        ("{name: dpo, inner_epochs: 2, timesteps_per_pair: 3}", 10 + 2 / 8 * 2 * 3 * (1 + 3)),
        ("{name: dpo}", 10 + 2 / 8 * (1 + 3)),
        # each copy under the old policy and the reference, then forward and backward
        ("{name: nft}", 10 + 2 * (2 + 3)),
        ("{name: nft, kl_weight: 0}", 10 + 2 * (1 + 3)),
        ("{name: nft, timesteps_per_image: 5, inner_epochs: 2}", 10 + 2 * 5 * (2 + 3)),
        # a copied old policy is the trained one in the first of the 32 steps of an epoch
        ("{name: nft, old_policy: copy, inner_epochs: 2}", 10 + 2 * 2 * (31 / 32 + 1 + 3)),
        ("{name: nft, old_policy: ramp_full}", 10 + 2 * (2 + 3)),
    ],
)
def test_forwards_of_an_image_that_is_noised_anew(algorithm: str, forwards: float, run_with: RunWith) -> None:
    assert derive(run_with(*SHAPE, f"algorithm={algorithm}")).forwards_per_image == forwards


@pytest.mark.parametrize(
    ("overrides", "forwards"),
    [
        ((), 2 * (10 + 9 * 3)),  # the model's 7.5; ddim ends without noise
        (("rollout.guidance_scale=1.01",), 2 * (10 + 9 * 3)),
        (("rollout.guidance_scale=1",), 10 + 9 * 3),
        (("rollout.guidance_scale=0",), 10 + 9 * 3),
        (("algorithm={name: grpo, kl_weight: 0.1}",), 2 * (10 + 9 + 9 * 3)),
        # pictures noised anew are learned without guidance
        (("algorithm={name: nft}",), 2 * 10 + 2 * (2 + 3)),
        (("algorithm={name: dpo}",), 2 * 10 + 2 / 8 * (1 + 3)),
        (("algorithm={name: dpo, pairs: offline}", *PAIRS), 1 + 3),
        (("algorithm={name: kto, timesteps_per_image: 2}", *PAIRS), 2 * (1 + 1 + 3)),
        (("algorithm={name: sft}", "rewards={}"), 3),
        (("model={family: flux_fill, path: tiny}",), 10 + 10 * 3),  # its guidance is embedded
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_guidance_without_an_embedding_doubles_what_goes_through_the_solver(
    overrides: tuple[str, ...], forwards: float, run_with: RunWith
) -> None:
    shape = ("rollout.num_steps=10", "training.gradient_checkpointing=false")
    assert derive(run_with(SD, *shape, *overrides)).forwards_per_image == forwards


@pytest.mark.parametrize(
    ("window", "starts"),
    [
        ("{size: 2, range: [0.2, 0.7]}", [2, 3, 4, 5]),
        ("{size: 2, range: [0, 1]}", [0, 1, 2, 3, 4, 5, 6, 7]),  # never step 9
        ("{size: 3, range: [0.5, 1]}", [5, 6]),
        ("{size: 1, range: [0.8, 0.9]}", [8]),
    ],
)
def test_windows_of_ddim_leave_its_last_step_out(window: str, starts: list[int], run_with: RunWith) -> None:
    run = run_with(SD, "rollout.num_steps=10", f"rollout.window={window}")
    assert list(window_starts(run)) == starts
    assert stochastic_steps(run) == run.algorithm.trained_steps(run) == run.rollout.window.size  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("overrides", "sampling"),
    [
        # windows of 2 in [.2, .7] of 10 steps begin at 2, 3, 4 or 5: 3.5 steps before it, taken once for 8 images
        ((), 10 - 3.5 * 7 / 8),
        (("rollout.window.position=fixed",), 10 - 2 * 7 / 8),
        (("rollout.window.position=sliding",), 10 - 3.5 * 7 / 8),
        (("rollout.batch_size_per_device=4",), 10 - 3.5 * 3 / 4),  # half a group in a forward
        (("rollout.batch_size_per_device=16",), 10 - 3.5 * 7 / 8),
        (("rollout.batch_size_per_device=1",), 10),
        (("rollout.shared_noise=false",), 10),
        (("rollout.window=",), 10),  # nothing before the first stochastic step
        (("rollout.window=", "rollout.shared_first_step=true"), 10 - 7 / 8),
        (("rollout.shared_first_step=true",), 10 - 4.5 * 7 / 8),
        (
            ("rollout.window={size: 2, range: [0.2, 0.7], position: sliding, stride: 2}",),
            10 - 11 / 3 * 7 / 8,
        ),  # 2, 4, 5
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_steps_before_the_window_are_shared_with_the_noise(
    overrides: tuple[str, ...], sampling: float, run_with: RunWith
) -> None:
    shared = "rollout={group_size: 8, num_steps: 10, shared_noise: true, window: {size: 2, range: [0.2, 0.7]}, "
    shared += "shared_first_step: false}"
    derived = derive(run_with(shared, "training.gradient_checkpointing=false", *overrides))
    assert derived.forwards_per_image == pytest.approx(sampling + 3 * derived.trained_steps, abs=1e-12)


@pytest.mark.parametrize(
    ("overrides", "kept"),
    [
        (("algorithm={name: sft}", "rewards={}"), set()),
        (("algorithm={name: sft}", "rewards={}", "ema={}"), {"ema"}),
        (("algorithm={name: grpo}",), set()),
        (("algorithm={name: grpo, kl_weight: 0.1}", "ema={}"), {"ema", "reference"}),
        (("algorithm={name: ppo, kl_weight: 0.1}",), {"reference"}),
        (("algorithm={name: dpo}",), {"reference"}),
        (("algorithm={name: nft, kl_weight: 0}",), {"old"}),
        (("algorithm={name: nft}", "ema={}"), {"ema", "old", "reference"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_state_of_a_trained_weight(overrides: tuple[str, ...], kept: set[str], run_with: RunWith) -> None:
    """tests/configs/test_engines.py holds the copies to those in checkpoints."""
    run = run_with(*overrides)
    assert snapshots(run) == kept
    assert derive(run).state_bytes_per_weight == 16 + 4 * len(kept)
    assert derive(run_with(*overrides, "optimizer.state=8bit")).state_bytes_per_weight == 10 + 4 * len(kept)


def test_a_run_that_ends_with_its_warm_up_has_no_epoch(run_with: RunWith) -> None:
    assert derive(run_with("algorithm.sft_steps=10", "training.max_steps=10")).epochs == 0


@pytest.mark.parametrize("world_size", [0, -2])
def test_there_is_at_least_one_process(world_size: int, run_with: RunWith) -> None:
    with pytest.raises(ConfigError) as caught:
        derive(run_with(), world_size)
    assert str(caught.value) == f"--world-size: given {world_size}; expected the number of processes, at least 1"
