"""Presets: what they fill in, what wins over them, and what an image then costs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from retouch.algorithms.grpo.config import GrpoConfig
from retouch.config import RunConfig, derive, dump_run, parse_run
from retouch.config.presets import preset_lines, preset_values
from retouch.config.run import RolloutConfig
from tests.command_line import retouch

from .conftest import BASE, TINY

RunWith = Callable[..., RunConfig]

QWEN = "model={family: qwen_image}"
SD = "model={family: sd_inpaint}"

ALL_BUT_THE_LAST = {"flux_fill": 5, "qwen_image": 9, "sd_inpaint": 9}


def lora_cost(run: RunConfig) -> float:
    """Forward-equivalents of an image where a backward counts as one: the network is frozen. By hand, not by the
    package: sampling, the reference's forwards, and a forward and a backward of each trained step."""

    rollout, algorithm = run.rollout, run.algorithm
    guided = 2 if run.model.family != "flux_fill" and rollout.guidance_scale != 1.0 else 1
    prefix = 1.0 if rollout.window else 0.0  # windows of the fast preset start at 0, 1 or 2
    shared = (prefix + 1) * (1 - 1 / rollout.group_size) if rollout.shared_noise else 0.0  # and the window's first
    trained: float = run.algorithm.trained_steps(run)
    if rollout.shared_noise and derive(run).optimizer_steps_per_epoch == 1:  # else a group is in several steps
        trained -= 1 - 1 / rollout.group_size
    return guided * (rollout.num_steps - shared + trained * (2 + (1 if algorithm.kl_weight else 0)))  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("family", "reference", "fast"),
    [(QWEN, 74.0, 8.25), (SD, 74.0, 8.25), ("model={family: flux_fill}", 16.0, 8.25)],
)
def test_what_an_image_costs(family: str, reference: float, fast: float, run_with: RunWith) -> None:
    """The published defaults, in forward-equivalents under LoRA: 74 with guidance, 16 for FLUX."""
    assert lora_cost(run_with(family, "rollout.preset=reference")) == reference
    assert lora_cost(run_with(family, "rollout.preset=fast")) == fast
    one_step = (family, "rollout.preset=fast", "optimizer={batch_size_per_device: 8, gradient_accumulation: 8}")
    assert lora_cost(run_with(*one_step)) == fast - 2 * 7 / 8 == 6.5


def test_reference_is_the_published_default(run_with: RunWith) -> None:
    run = run_with(QWEN, "rollout.preset=reference")
    assert run.rollout == RolloutConfig(preset="reference", num_steps=10)
    assert run.algorithm.model_dump(exclude_defaults=True) == {
        "skip_zero_std_groups": False,
        "kl_weight": 0.04,
        "kl_mode": "flow_grpo",
        "timestep_fraction": 0.9,
    }


def test_fast_is_the_levers(run_with: RunWith) -> None:
    run = run_with(QWEN, "rollout.preset=fast")
    assert run.rollout.model_dump(exclude_defaults=True) == {
        "preset": "fast",
        "num_steps": 6,
        "guidance_scale": 1.0,
        "window": {"range": (0.0, 0.67)},
        "shared_noise": True,
    }
    assert run.algorithm.kl_weight == 0  # type: ignore[union-attr]
    assert run_with("rollout.preset=fast").rollout.guidance_scale is None  # FLUX embeds its guidance


def test_nft(run_with: RunWith) -> None:
    """As shipped: 9 noised copies of an image, and a KL; both without guidance."""
    nft = "algorithm={name: nft}"
    reference, fast = (run_with(QWEN, nft, f"rollout.preset={p}") for p in ("reference", "fast"))
    values = [
        (r.rollout.num_steps, r.rollout.guidance_scale, r.algorithm.timesteps_per_image) for r in (reference, fast)
    ]  # type: ignore[union-attr]
    assert values == [(10, 1.0, 9), (6, 1.0, 2)]
    assert [r.algorithm.kl_weight for r in (reference, fast)] == [1e-4, 0.0]  # type: ignore[union-attr]
    groups = [(r.algorithm.scale, r.algorithm.skip_zero_std_groups) for r in (reference, fast)]  # type: ignore[union-attr]
    assert groups == [("batch", False), ("group", True)]


def test_the_reference_of_nft_leaves_out_what_a_written_option_excludes(run_with: RunWith) -> None:
    nft = "algorithm={name: nft, resample_rounds: 1}"
    run_with(QWEN, nft, "optimizer.gradient_accumulation=1", "rollout.preset=reference")


@pytest.mark.parametrize("preset", ["reference", "fast"])
@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("rollout.num_steps=4", "rollout", "num_steps", 4),
        ("rollout.guidance_scale=3.0", "rollout", "guidance_scale", 3.0),
        ("rollout.shared_noise=false", "rollout", "shared_noise", False),
        ("rollout.window=null", "rollout", "window", None),
        ("algorithm.kl_weight=0.5", "algorithm", "kl_weight", 0.5),
        ("algorithm.kl_weight=0", "algorithm", "kl_weight", 0),
        ("algorithm.timestep_fraction=0.5", "algorithm", "timestep_fraction", 0.5),
    ],
)
def test_a_written_key_wins(
    preset: str, override: str, section: str, key: str, value: object, run_with: RunWith
) -> None:
    run = run_with(QWEN, f"rollout.preset={preset}", override)
    assert getattr(getattr(run, section), key) == value


@pytest.mark.parametrize("preset", ["reference", "fast"])
def test_a_written_window_wins_part_by_part(preset: str, run_with: RunWith) -> None:
    window = run_with(f"rollout.preset={preset}", "rollout.window={size: 3}").rollout.window
    assert window is not None
    assert (window.size, window.range) == (3, (0.0, 0.67) if preset == "fast" else (0.0, 0.5))


def test_a_preset_never_contradicts_what_is_written(run_with: RunWith) -> None:
    """A window says which steps are trained, and a fraction says it, too: whichever is written stands alone."""
    assert run_with("rollout.preset=fast", "algorithm.timestep_fraction=0.5").rollout.window is None
    assert run_with(QWEN, "rollout.preset=reference", "rollout.window={size: 2}").algorithm.timestep_fraction == 1.0  # type: ignore[union-attr]
    assert run_with(QWEN, "rollout.preset=reference", "rollout.step_rule=cps").algorithm.kl_mode == "exact"  # type: ignore[union-attr]
    assert run_with("rollout.preset=reference", "algorithm.resample_rounds=1").algorithm.skip_zero_std_groups  # type: ignore[union-attr]
    assert run_with(QWEN, "rollout.preset=reference", "rollout.num_steps=5").algorithm.timestep_fraction == 0.8  # type: ignore[union-attr]


def test_a_filled_in_run_is_an_ordinary_one(run_with: RunWith) -> None:
    """Read back from a run directory, every key is written; and sections that are objects count as written, too."""
    run = run_with(QWEN, "rollout.preset=reference")
    assert parse_run(yaml.safe_load(dump_run(run))) == run
    built: dict[str, Any] = {**BASE, "rollout": RolloutConfig(preset="fast", num_steps=8)}
    assert parse_run(built).rollout == run_with("rollout={preset: fast, num_steps: 8}").rollout
    assert parse_run(built).rollout.window is not None


def test_a_run_file_with_another_algorithm_in_it_may_keep_its_preset(run_with: RunWith) -> None:
    assert run_with("algorithm={name: sft}", "rollout.preset=fast").rollout.num_steps == RolloutConfig().num_steps


@pytest.mark.parametrize("preset", ["reference", "fast"])
def test_objects_of_a_class_need_not_repeat_its_name(preset: str) -> None:
    """`GrpoConfig()` and a model of one family: neither is another one, and the preset is not left out."""
    model: dict[str, Any] = {"path": "tiny", "train": {"kind": "lora"}}
    written = {**BASE, "rollout": {"preset": preset}, "algorithm": {"name": "grpo"}}
    same = RunConfig.model_validate({**written, "model": {"family": "sd_inpaint", **model}})
    kind = type(same.model)
    made = RunConfig.model_validate({**written, "algorithm": GrpoConfig(), "model": kind.model_validate(model)})
    assert made.rollout == same.rollout and made.algorithm == same.algorithm


def test_check_prints_what_it_came_to(run_with: RunWith) -> None:
    run = run_with("rollout.preset=fast", "rollout.num_steps=8")
    lines = [" ".join(line.split()) for line in preset_lines(run)]
    assert lines == [
        "rollout.num_steps 8 (run file; preset fast: 6)",
        "rollout.window {'size': 2, 'range': [0.0, 0.67]} (preset fast)",
        "rollout.shared_noise True (preset fast)",
        "algorithm.kl_weight 0.0 (preset fast)",
    ]
    assert preset_lines(run_with()) == [] and preset_values(run_with()) == {}
    outcome = retouch("check", TINY, "rollout.preset=reference", "--verbose")
    assert "rollout.num_steps" in outcome.out and "(run file; preset reference: 6)" in outcome.out
    told = json.loads(retouch("check", TINY, "rollout.preset=reference", "--json").out)
    assert told["preset"]["rollout.num_steps"] == 4 and "preset" not in json.loads(retouch("check", TINY, "--json").out)
