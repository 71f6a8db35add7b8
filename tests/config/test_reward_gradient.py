"""What reward gradients refuse, each with its message and a neighbour that works, and what they cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from retouch.config import RunConfig, derive
from retouch.config.check import warnings_of

Problems = Callable[..., list[str]]
RunWith = Callable[..., RunConfig]

SD = "model={family: sd_inpaint, path: tiny}"
REWARD = "rewards={seam: {}}"


def gradient(**options: Any) -> str:
    return "algorithm={name: reward_gradient" + "".join(f", {key}: {value}" for key, value in options.items()) + "}"


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            (gradient(), "rewards={jpeg_size: {}}"),
            (
                "rewards.jpeg_size: given scorer 'jpeg_size', but reward_gradient trains on the gradient of a reward "
                "with respect to the pixels, which it does not have; set rewards.jpeg_size.role=gold, and train on one "
                "of "
            ),
        ),
        (
            (gradient(), "rewards={seam: {url: auto}}"),
            (
                "rewards.seam.url: given 'auto', but a server returns no gradient; leave url out and set "
                "rewards.seam.device, or set rewards.seam.role=gold"
            ),
        ),
        (
            (gradient(), "rewards={seam: {gated_by: preservation}, preservation: {weight: 0}}"),
            (
                "rewards.seam.gated_by: given 'preservation', but reward_gradient trains on the gradient of the value "
                "itself; leave gated_by out, or set rewards.seam.weight=0"
            ),
        ),
        (
            (gradient(), "rewards={seam: {transform: win_rate}}", "rollout.group_size=4"),
            (
                "rewards.seam.transform: given 'win_rate', but reward_gradient trains on the gradient of the value "
                "itself; leave transform out, or set rewards.seam.weight=0"
            ),
        ),
        (
            (gradient(), "rewards={seam: {min_group_std: 0.1}}"),
            (
                "rewards.seam.min_group_std: given 0.1, but reward_gradient trains on the gradient of the value "
                "itself; leave min_group_std out, or set rewards.seam.weight=0"
            ),
        ),
        (
            (gradient(inner_epochs=2), REWARD),
            (
                "algorithm.inner_epochs: given 2, but the gradient of a reward is that of the weights that sampled the "
                "image; leave inner_epochs out"
            ),
        ),
        (
            (gradient(combine="sum_then_normalize"), REWARD),
            (
                "algorithm.combine: given 'sum_then_normalize', but the gradient is that of the weighted sum of the "
                "rewards; leave combine out"
            ),
        ),
        (
            (gradient(resample_rounds=1), REWARD),
            "algorithm.resample_rounds: given 1, but no sample is compared with its group; leave resample_rounds out",
        ),
        (
            (gradient(last_steps=2), REWARD),
            (
                "algorithm.last_steps: given 2, but algorithm.trained_step is 'last'; set trained_step=random or all, "
                "or leave last_steps out"
            ),
        ),
        (
            (gradient(trained_step="random", last_steps=11), REWARD),
            "algorithm.last_steps: given 11, but rollout.num_steps is 10; set last_steps to at most 10",
        ),
        (
            (gradient(reward_at="step"), REWARD),
            (
                "algorithm.reward_at: given 'step', but the prediction of the last step implies the final image; set "
                "algorithm.trained_step=random, or leave reward_at out"
            ),
        ),
        (
            (gradient(), REWARD, "rollout.solver=dpm2"),
            "rollout.solver: given 'dpm2', but reward_gradient differentiates first-order steps; leave solver out",
        ),
        (
            (gradient(), REWARD, SD, "rollout.guidance_scale=7.5"),
            (
                "rollout.guidance_scale: given 7.5, which takes a second forward with a negative prompt, and the "
                "gradient would train that one away from the reward; set rollout.guidance_scale=1"
            ),
        ),
        (
            (gradient(), REWARD, "model.true_guidance_scale=2"),
            (
                "model.true_guidance_scale: given 2, which takes a second forward with a negative prompt, and the "
                "gradient would train that one away from the reward; set model.true_guidance_scale=1"
            ),
        ),
        (
            (gradient(), REWARD, "rollout.preset=fast"),
            (
                "rollout.preset: given 'fast', but reward_gradient has no presets; leave preset out, and set "
                "rollout.num_steps and guidance_scale"
            ),
        ),
        (
            (gradient(), REWARD, "optimizer.steps_per_forward=1"),
            "optimizer.steps_per_forward: given 1, but reward_gradient takes every trained step as a row; leave it out",
        ),
        (
            (gradient(), REWARD, "rollout.window={size: 1}"),
            "rollout.window: given, but reward_gradient samples by the ODE; leave it out",
        ),
        (
            (gradient(kl_weight=0, kl_reference="base"), REWARD),
            (
                "algorithm.kl_reference: given 'base', but reward_gradient keeps no reference policy here; set "
                "algorithm.kl_weight, or leave kl_reference out"
            ),
        ),
    ],
)
def test_it_refuses(overrides: tuple[str, ...], line: str, problems: Problems) -> None:
    [found] = problems(*overrides)
    assert found.startswith(f"small.yaml: {line}"), found


@pytest.mark.parametrize(
    "overrides",
    [
        (gradient(), REWARD, "rollout.group_size=1"),
        (gradient(), "rewards={seam: {}, jpeg_size: {role: gold}, ocr: {weight: 0, url: auto}}"),
        (gradient(trained_step="random", last_steps=10, reward_at="step"), REWARD),
        (gradient(), REWARD, SD, "rollout.guidance_scale=1"),
        (gradient(sft_steps=2, kl_weight=0, region="mask", region_dilation=1), REWARD),
        (gradient(), "rewards={seam: {crop: mask_box, weight: -1}, preservation: {}}"),
    ],
)
def test_it_takes(overrides: tuple[str, ...], run_with: RunWith) -> None:
    assert run_with(*overrides).algorithm.name == "reward_gradient"


@pytest.mark.parametrize(
    ("options", "rows", "forwards", "decodes"),
    [
        ({"kl_weight": 0}, 1, 10 + 4, 1),
        ({}, 1, 10 + 4 + 1, 1),
        ({"trained_step": "random", "reward_at": "step"}, 1, 10 + 4 + 1, 1),
        ({"trained_step": "all"}, 10, 10 + 10 * 5, 1),
        ({"trained_step": "all", "last_steps": 3, "kl_weight": 0, "reward_at": "step"}, 3, 10 + 3 * 4, 3),
    ],
)
def test_what_an_image_costs(
    options: dict[str, Any], rows: int, forwards: float, decodes: int, run_with: RunWith
) -> None:
    """The steps of sampling, and per trained step a forward and a backward, here with gradient checkpointing, and the
    reference."""
    shape = ("rollout.num_steps=10", "rollout.group_size=2", "rollout.global_groups_per_batch=4")
    run = run_with(gradient(**options), REWARD, *shape, "training.gradient_checkpointing=true")
    derived = derive(run)
    assert derived.forwards_per_image == forwards
    assert (derived.trained_steps, derived.decoder_backwards_per_image) == (rows, decodes)
    per_step = run.optimizer.rows_per_step(1)
    assert derived.optimizer_steps_per_epoch == -(-8 * rows // per_step)


def test_gradients_that_an_epoch_takes_once_and_uses_twice_are_a_warning(run_with: RunWith) -> None:
    shape = ("rollout.group_size=2", "rollout.global_groups_per_batch=4", "optimizer.batch_size_per_device=4")
    runs = [run_with(gradient(), REWARD, *shape, f"optimizer.gradient_accumulation={n}") for n in (1, 2)]
    told = [[line for line in warnings_of(run) if "taken once" in line] for run in runs]
    assert told == [
        [
            (
                "optimizer.gradient_accumulation: an epoch has 2 optimizer steps on one process, but the gradients of "
                "its rewards are taken once, before the first; raise gradient_accumulation, or lower "
                "rollout.global_groups_per_batch"
            )
        ],
        [],
    ]


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ("algorithm={name: grpo}", "rewards={seam: {gradient_weight: 1}}"),
            (
                "rewards.seam.gradient_weight: given 1, but grpo does not read it; leave it out, or set "
                "algorithm.name=nft"
            ),
        ),
        (
            (gradient(), "rewards={seam: {gradient_weight: 1}}"),
            (
                "rewards.seam.gradient_weight: given 1, but reward_gradient does not read it; leave it out, or set "
                "algorithm.name=nft"
            ),
        ),
        (
            ("algorithm={name: nft}", "rewards={preservation: {}, seam: {role: gold, gradient_weight: 1}}"),
            ("rewards.seam.gradient_weight: given 1, but role is 'gold', which is never trained on; leave it out"),
        ),
        (
            ("algorithm={name: nft}", "rewards={jpeg_size: {gradient_weight: 1}}"),
            (
                "rewards.jpeg_size: given scorer 'jpeg_size', but rewards.jpeg_size.gradient_weight trains on the "
                "gradient of a reward with respect to the pixels, which it does not have; set "
                "rewards.jpeg_size.gradient_weight=0, and train on one of "
            ),
        ),
        (
            ("algorithm={name: nft}", "rewards={preservation: {}, seam: {weight: -1, gradient_weight: 1}}"),
            (
                "rewards.seam.gradient_weight: given 1, but rewards.seam.weight is -1: its advantages would lower what "
                "its gradient raises; set rewards.seam.weight to 0 or more, or leave gradient_weight out"
            ),
        ),
        (
            ("algorithm={name: nft}", "rewards={seam: {gradient_weight: 1, url: auto}}"),
            (
                "rewards.seam.url: given 'auto', but a server returns no gradient; leave url out and set "
                "rewards.seam.device, or set rewards.seam.gradient_weight=0"
            ),
        ),
    ],
)
def test_gradient_weights_that_nothing_reads_are_refused(
    overrides: tuple[str, ...], line: str, problems: Problems
) -> None:
    [found] = problems(*overrides)
    assert found.startswith(f"small.yaml: {line}"), found


def test_a_gradient_weight_is_accepted_and_its_decode_is_counted(run_with: RunWith) -> None:
    for weight, decodes in ((0, 0), (1, 1)):
        run = run_with("algorithm={name: nft}", f"rewards={{seam: {{gradient_weight: {weight}}}}}")
        assert derive(run).decoder_backwards_per_image == decodes
