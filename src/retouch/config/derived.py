"""Numbers that follow from a run file: computed once, named, shown by `retouch check` and logged before step 0."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from retouch.algorithms.sections import (
    DpoConfig,
    GrpoConfig,
    NftConfig,
    RlConfig,
    SftConfig,
)
from retouch.algorithms.vlm_grpo.config import VlmDerived, VlmGrpoConfig
from retouch.config.errors import ConfigError
from retouch.config.needs import seen_tokens, step_rule, trains_on_rewards
from retouch.config.run import RunConfig
from retouch.families.facts import (
    ENDS_WITHOUT_NOISE,
    FACTS,
)
from retouch.families.sections import QwenImageEditModel


@dataclass(frozen=True)
class Derived:
    """What a run amounts to on `world_size` processes.

    Attributes:
        images_per_epoch_per_device, padded_images_per_epoch: every rollout batch is padded by itself until it divides.
        global_rows_per_step: images (DPO: pairs) that one optimizer step sees at most; an epoch is dealt evenly into
            its steps.
        forwards_per_image: forward-equivalents of the network that one image costs, sampled and trained: solver steps,
            1 for each noised copy or trained step under each snapshot (old, reference) and for each log-probability
            that is computed again, then 3 for each of them in each inner epoch (a backward counts as 2; 1 more with
            gradient checkpointing). Classifier-free guidance doubles what goes through the solver: sampling, and the
            trained steps of GRPO and PPO.
        state_bytes_per_weight: device memory that training keeps for every trained weight at most, in fp32: the
            weight, its gradient, two moments of AdamW (less where optimizer.moments says so), and one copy in each
            snapshot; with training.sharding this is shared out over the devices. Frozen weights, activations,
            autocast's copies and, on several processes without sharding, the buckets of the gradient exchange (4 more)
            come on top.
        vision_tokens: tokens of the text encoder that a source of `data` takes; 0 where it reads no pictures.
    """

    world_size: int
    warmup_steps: int
    global_images_per_rollout_batch: int
    global_groups_per_epoch: int
    global_images_per_epoch: int
    images_per_epoch_per_device: int
    padded_images_per_epoch: int
    global_rows_per_step: int
    optimizer_steps_per_epoch: int
    epochs: int
    stochastic_steps: int
    trained_steps: int
    forwards_per_image: float
    state_bytes_per_weight: int
    vision_tokens: int

    def as_dict(self) -> dict[str, int | float]:
        return asdict(self)


def stochastic_steps(run: RunConfig) -> int:
    """Steps of a rollout that draw noise and have a density: the window, or all (but the last one of some rules)."""
    rule = step_rule(run)
    if rule is None:
        return 0
    if run.rollout.window:
        return run.rollout.window.size
    return run.rollout.num_steps - (1 if rule in ENDS_WITHOUT_NOISE else 0)


def trained_steps(run: RunConfig) -> int:
    """Steps of a rollout that enter the loss."""
    if not isinstance(run.algorithm, GrpoConfig):
        return 0
    share = stochastic_steps(run) * run.algorithm.timestep_fraction
    return max(1, math.ceil(share - 1e-9))  # 25 x 0.28 is 7.000000000000001


def window_starts(run: RunConfig) -> range:
    """First steps that the window may have, in order."""
    rollout, rule = run.rollout, step_rule(run)
    assert rollout.window is not None
    low, high = (round(share * rollout.num_steps) for share in rollout.window.range)
    high = min(high, rollout.num_steps - 1) if rule in ENDS_WITHOUT_NOISE else high
    return range(low, high - rollout.window.size + 1)


def sliding_places(run: RunConfig) -> list[int]:
    """First steps of a sliding window in turn; the last one ends at the end of its range, whatever the stride."""
    assert run.rollout.window is not None
    starts = window_starts(run)
    return sorted({*starts[:: run.rollout.window.stride], starts[-1]})


def snapshots(run: RunConfig) -> set[str]:
    """Copies of the trained weights that the run keeps beside them."""
    algorithm = run.algorithm
    kept = {"ema"} if run.ema else set[str]()
    if isinstance(algorithm, DpoConfig) or (isinstance(algorithm, GrpoConfig | NftConfig) and algorithm.kl_weight):
        kept.add("reference")
    return kept | {"old"} if isinstance(algorithm, NftConfig) else kept


def numbers(run: RunConfig, world_size: int = 1) -> Derived | VlmDerived:
    """What `retouch check` prints, whatever the algorithm.

    Raises:
        ConfigError: a run that could never take an optimizer step on this many processes.
    """
    if isinstance(run.algorithm, VlmGrpoConfig):
        return run.algorithm.derive(run, world_size)
    return derive(run, world_size)


def derive(run: RunConfig, world_size: int = 1) -> Derived:
    """Compute the numbers of a run that trains the diffusion network.

    Raises:
        ConfigError: a run that could never take an optimizer step on this many processes.
    """
    if world_size < 1:
        raise ConfigError(f"--world-size: given {world_size}; it is the number of processes, at least 1")
    optimizer, training, algorithm = run.optimizer, run.training, run.algorithm
    assert not isinstance(algorithm, VlmGrpoConfig)  # they have their own `derive`
    rows_per_step = optimizer.batch_size_per_device * optimizer.gradient_accumulation * world_size
    if not trains_on_rewards(run):
        return Derived(
            world_size=world_size,
            warmup_steps=algorithm.warmup_steps if isinstance(algorithm, RlConfig) else training.max_steps,
            global_images_per_rollout_batch=0,
            global_groups_per_epoch=0,
            global_images_per_epoch=0,
            images_per_epoch_per_device=0,
            padded_images_per_epoch=0,
            global_rows_per_step=rows_per_step,
            optimizer_steps_per_epoch=0,
            epochs=0,
            stochastic_steps=0,
            trained_steps=0,
            forwards_per_image=forwards_per_image(run, 0),
            state_bytes_per_weight=_state_bytes(run),
            vision_tokens=_vision_tokens(run),
        )
    assert isinstance(algorithm, RlConfig)
    rollout = run.rollout
    groups = rollout.global_groups_per_batch * rollout.batches_per_epoch
    images_per_batch = rollout.global_groups_per_batch * rollout.group_size
    images = images_per_batch * rollout.batches_per_epoch
    per_device = math.ceil(images_per_batch / world_size) * rollout.batches_per_epoch
    rows_per_device = math.ceil(groups / world_size) if isinstance(algorithm, DpoConfig) else per_device
    steps_per_inner_epoch = math.ceil(
        rows_per_device / (optimizer.batch_size_per_device * optimizer.gradient_accumulation)
    )
    per_epoch = steps_per_inner_epoch * algorithm.inner_epochs
    return Derived(
        world_size=world_size,
        warmup_steps=algorithm.warmup_steps,
        global_images_per_rollout_batch=images_per_batch,
        global_groups_per_epoch=groups,
        global_images_per_epoch=images,
        images_per_epoch_per_device=per_device,
        padded_images_per_epoch=per_device * world_size - images,
        global_rows_per_step=rows_per_step,
        optimizer_steps_per_epoch=per_epoch,
        epochs=math.ceil((training.max_steps - algorithm.warmup_steps) / per_epoch),
        stochastic_steps=stochastic_steps(run),
        trained_steps=trained_steps(run),
        forwards_per_image=forwards_per_image(run, per_epoch),
        state_bytes_per_weight=_state_bytes(run),
        vision_tokens=_vision_tokens(run),
    )


def moment_bytes(run: RunConfig) -> int:
    """Of AdamW's two moments of a trained weight."""
    return 8 if run.optimizer.moments == "fp32" else 2


def _state_bytes(run: RunConfig) -> int:
    return 4 * (2 + len(snapshots(run))) + moment_bytes(run)


def _vision_tokens(run: RunConfig) -> int:
    return seen_tokens(run.model, run.data.size) if isinstance(run.model, QwenImageEditModel) else 0


def forwards_per_image(run: RunConfig, optimizer_steps: int) -> float:
    """Forward-equivalents of one image; see `Derived`.

    Args:
        optimizer_steps: of an epoch; of a single one no log-probability is computed again.
    """
    algorithm, rollout, facts = run.algorithm, run.rollout, FACTS[run.model.family]
    scale = facts.guidance_scale if rollout.guidance_scale is None else rollout.guidance_scale
    guided = 2 if facts.doubles_for_guidance and scale > 1 else 1
    backward = 3 + (1 if run.training.gradient_checkpointing else 0)
    if isinstance(algorithm, SftConfig):
        return float(backward)
    if isinstance(algorithm, DpoConfig):
        per_member = algorithm.timesteps_per_pair * (1 + backward)
        if algorithm.pairs == "offline":
            return float(per_member)
        return guided * rollout.num_steps + per_member * algorithm.inner_epochs * 2 / rollout.group_size
    if isinstance(algorithm, NftConfig):
        asked = len(snapshots(run) - {"ema"})
        noised = algorithm.timesteps_per_image * algorithm.inner_epochs * (asked + backward)
        return float(guided * rollout.num_steps + noised)
    assert isinstance(algorithm, GrpoConfig)
    trained = trained_steps(run)
    reference = trained if algorithm.kl_weight else 0
    again = trained if algorithm.old_log_probs == "recomputed" and optimizer_steps > 1 else 0
    return guided * (_sampling_steps(run) + again + reference + algorithm.inner_epochs * trained * backward)


def _sampling_steps(run: RunConfig) -> float:
    """Forwards that sampling one image takes; steps before the window are taken once a group where noise is shared."""
    rollout = run.rollout
    if not (rollout.window and rollout.shared_noise):
        return float(rollout.num_steps)
    starts: Sequence[int] = window_starts(run)
    if rollout.window.position == "sliding":
        starts = sliding_places(run)
    first = starts[0] if rollout.window.position == "fixed" else sum(starts) / len(starts)
    together = min(rollout.group_size, rollout.batch_size_per_device)
    return rollout.num_steps - first * (1 - 1 / together)
