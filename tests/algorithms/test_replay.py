"""A step whose gradient contains NaN or Inf leaves a dump, and `retouch replay` repeats it bitwise."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from retouch.engine.saved import declare_complete
from retouch.observe.run_dir import read_metrics
from retouch.training.dump import read_dump
from tests.command_line import retouch

LORA = {"kind": "lora", "rank": 4}
BROKEN: dict[str, dict[str, Any]] = {
    "sft": {"algorithm": {"name": "sft"}, "model__train": LORA, "data": None, "rewards": None},
    "grpo": {"algorithm__inner_epochs": 3, "algorithm__kl_weight": 0.1, "ema": {"decay": 0.9, "update_interval": 1}},
    "nft": {"algorithm": {"name": "nft", "inner_epochs": 3}, "rollout__window": None, "rollout__noise_level": None},
    "dpo": {"algorithm": {"name": "dpo", "inner_epochs": 3}, "rollout__window": None, "rollout__noise_level": None},
}
"""Runs whose first step makes weights so large that the forward of the second overflows."""


def broken_run(kind: str, signs: Path, folder: Path, run_file: Callable[..., dict[str, Any]]) -> tuple[Path, Path]:
    """A run that ended in its second step -> (run file, dump)."""
    overrides = {name: value for name, value in BROKEN[kind].items() if value is not None}
    run = run_file(**overrides, name=kind, optimizer__lr=1e30, training__max_steps=4)
    if kind == "sft":
        run["data"] = run.pop("warmup_data")
        del run["rewards"], run["rollout"]["window"]
    file = folder / f"{kind}.yaml"
    file.write_text(yaml.safe_dump(run), encoding="utf-8")
    outcome = retouch("train", file)
    assert outcome.code == 1 and "Traceback" not in outcome.err, outcome.err
    [dump] = (folder / "runs" / kind / "dumps").iterdir()
    line = outcome.err.splitlines()[-1]
    assert line.startswith("error: the gradient norm is nan; lower optimizer.lr") and str(dump) in line
    return file, dump


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_step_is_repeated_bitwise(
    kind: str, signs: Path, tmp_path: Path, run_file: Callable[..., dict[str, Any]]
) -> None:
    _, dump = broken_run(kind, signs, tmp_path, run_file)
    before = sorted(path for path in tmp_path.rglob("*"))
    outcome = retouch("replay", dump)
    assert outcome.code == 0, outcome.err
    assert outcome.out.splitlines()[-1] == "reproduced: every loss and the gradient norm have the same bits"
    assert "without effect" not in outcome.out
    assert sorted(path for path in tmp_path.rglob("*")) == before  # it writes nothing
