"""The published runs against the values that guides to this kind of training give: taken over, or a comment says why
not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from retouch.config import load_run
from retouch.config.load import read_yaml

from .conftest import CONFIGS, name_of

GUIDE: dict[str, list[Any]] = {
    "algorithm.warmup_steps": [1000, (500, 1000)],
    "rollout.group_size": [1, (4, 8)],
    "rollout.batches_per_epoch": [1, (1, 2)],
    "rollout.num_steps": [50, (30, 50)],
    "rollout.guidance_scale": [3.5, (3, 4)],
    "algorithm.timestep_fraction": [1.0, (0.8, 1.0)],
    "algorithm.inner_epochs": [1, (1, 3)],
    "algorithm.advantage_clip": [5, (3, 10)],
    "algorithm.clip_range": [0.2, (0.1, 0.3)],
    "optimizer.lr": [1e-4],
    "optimizer.gradient_accumulation": [4],
    "training.max_steps": [10000],
    "training.checkpoint_every": [500],
    "data.resolution": [512],
}
"""Option -> the guide's default, and the range it recommends, where it gives one."""

OF: dict[str, dict[str, list[Any]]] = {
    "grpo": {"algorithm.kl_weight": [0.1, (0.05, 0.2)], "algorithm.baseline": ["group"], "ema.decay": [0.9999]},
    "ppo": {"algorithm.kl_weight": [0.1, (0.05, 0.2)], "algorithm.baseline": ["batch"], "ema.decay": [0.9999]},
    "nft": {
        "algorithm.kl_weight": [0.01, (0.005, 0.02)],
        "algorithm.mix": [0.5, (0.3, 0.7)],
        "algorithm.mode": ["normal"],
        "algorithm.old_policy": ["frozen", "ramp_half"],
        "algorithm.baseline": ["group"],
        "ema.decay": [0.999],
    },
    "dpo": {},
    "sft": {},
}

RELEASED = [path for path in sorted(CONFIGS.glob("*.yaml")) if "extends:" not in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", RELEASED, ids=name_of)
def test_a_value_is_the_guide_s_or_has_a_comment(path: Path) -> None:
    run, text = load_run(path).model_dump(), path.read_text(encoding="utf-8")
    guide = {**GUIDE, **OF[run["algorithm"]["name"]]}
    for key, known in guide.items():
        value = look_up(run, key)
        if value is not None and not any(fits(value, k) for k in known):
            assert explained(text, key.rpartition(".")[2]), f"{key} is {value}, the guide has {known}: say why"


def test_an_unexplained_value_is_found(tmp_path: Path) -> None:
    text = (CONFIGS / "flux_fill_grpo.yaml").read_text(encoding="utf-8")
    bare = "\n".join(line.partition("#")[0] for line in text.splitlines())
    (tmp_path / "bare.yaml").write_text(bare, encoding="utf-8")
    with pytest.raises(AssertionError, match="say why"):
        test_a_value_is_the_guide_s_or_has_a_comment(tmp_path / "bare.yaml")


def test_every_option_of_the_guide_is_one_of_ours() -> None:
    """In some published file at least: a renamed key would pass unseen."""
    runs = [load_run(path).model_dump() for path in RELEASED]
    assert not {key for key in {**GUIDE, **OF["grpo"], **OF["nft"]} if all(look_up(run, key) is None for run in runs)}
    assert read_yaml(CONFIGS / "flux_fill_grpo.yaml")["rollout"]["guidance_scale"] == 30


def look_up(run: dict[str, Any], key: str) -> Any:
    """The value of a dotted key, None where the run has no such section or option."""
    node: Any = run
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node


def fits(value: Any, known: Any) -> bool:
    return known[0] <= value <= known[1] if isinstance(known, tuple) else value == known


def explained(text: str, name: str) -> bool:
    """Whether the line of the option has a comment behind it, or one above it."""
    lines = text.splitlines()
    return any(
        re.search(rf"\b{name}:", line.partition("#")[0]) and ("#" in line or lines[i - 1].lstrip().startswith("#"))
        for i, line in enumerate(lines)
    )
