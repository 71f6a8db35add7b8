"""The published runs against the values that guides to this kind of training give: taken over, or a comment says why
not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from retouch.config import load_run
from retouch.config.load import read_yaml

from .conftest import CONFIGS, RUNS, name_of

GUIDE: dict[str, list[Any]] = {
    "algorithm.sft_steps": [1000, (500, 1000)],
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
    "kto": {"algorithm.sft_steps": [0]},
    "sft": {},
    "reward_gradient": {},
}


@pytest.mark.parametrize("path", RUNS, ids=name_of)
def test_a_value_is_the_guide_s_or_has_a_comment(path: Path) -> None:
    """A file that extends another is held to the values of both; the comment stands where the value is set."""
    assert unexplained(path) == []


def test_an_unexplained_value_is_found(tmp_path: Path) -> None:
    text = (CONFIGS / "flux_fill_grpo.yaml").read_text(encoding="utf-8")
    bare = "\n".join(line.partition("#")[0] for line in text.splitlines())
    (tmp_path / "flux_fill_grpo.yaml").write_text(bare, encoding="utf-8")
    assert "rollout.num_steps" in unexplained(tmp_path / "flux_fill_grpo.yaml")
    full = (CONFIGS / "flux_fill_grpo_full.yaml").read_text(encoding="utf-8")
    (tmp_path / "full.yaml").write_text(full, encoding="utf-8")
    assert "rollout.num_steps" in unexplained(tmp_path / "full.yaml")  # inherited without a word
    assert "optimizer.lr" not in unexplained(tmp_path / "full.yaml")
    (tmp_path / "flux_fill_grpo.yaml").write_text(text, encoding="utf-8")
    assert unexplained(tmp_path / "full.yaml") == []
    bare = "\n".join(line.partition("#")[0] for line in full.splitlines())
    (tmp_path / "full.yaml").write_text(bare, encoding="utf-8")
    # the comments below are on other values, or on the same one said again
    bare_here = ["optimizer.lr", "training.max_steps", "training.checkpoint_every", "algorithm.kl_weight"]
    assert unexplained(tmp_path / "full.yaml") == bare_here


def test_every_option_of_the_guide_is_one_of_ours() -> None:
    """In some published file at least, or typed over one: a renamed key would pass unseen."""
    typed = load_run(CONFIGS / "flux_fill_grpo.yaml", ["optimizer.gradient_accumulation=4"])
    runs = [run.model_dump() for run in (*map(load_run, RUNS), typed)]
    assert not {key for key in {**GUIDE, **OF["grpo"], **OF["nft"]} if all(look_up(run, key) is None for run in runs)}
    assert read_yaml(CONFIGS / "flux_fill_grpo.yaml")["rollout"]["guidance_scale"] == 30


def unexplained(path: Path) -> list[str]:
    """Options whose value is not the guide's, and that no comment of the file that sets them explains."""
    run = load_run(path).model_dump()
    guide = {**GUIDE, **OF[run["algorithm"]["name"]]}
    values = {key: value for key in guide if (value := look_up(run, key)) is not None}
    strange = [key for key, value in values.items() if not any(fits(value, known) for known in guide[key])]
    return [key for key in strange if not explained(path, key)]


def look_up(run: dict[str, Any], key: str) -> Any:
    """The value of a dotted key, None where the run has no such section or option."""
    node: Any = run
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node


def fits(value: Any, known: Any) -> bool:
    return known[0] <= value <= known[1] if isinstance(known, tuple) else value == known


def explained(path: Path, key: str) -> bool:
    """Whether the line that sets an option has a comment behind it, or one above it: in this file, or if it does not
    set it, in the one it extends."""
    text = path.read_text(encoding="utf-8")
    lines, root = text.splitlines(), yaml.compose(text)
    line = line_of(root, key.split("."))
    if line is not None:
        return "#" in lines[line] or lines[line - 1].lstrip().startswith("#")
    below = line_of(root, ["extends"])
    return below is not None and explained(path.parent / lines[below].split()[1], key)


def line_of(node: Any, key: Sequence[str]) -> int | None:
    """Index of the line on which a key stands; None where it does not."""
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    found = next(((name, value) for name, value in pairs if name.value == key[0]), None)
    if found is None:
        return None
    return found[0].start_mark.line if len(key) == 1 else line_of(found[1], key[1:])
