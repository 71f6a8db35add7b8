"""Two processes train as one does: torchrun with gloo on a CPU, through the real command line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from retouch.models.loading import tiny_path
from retouch.observe.run_dir import read_metrics
from tests.command_line import retouch

WEIGHTS = "diffusion_pytorch_model.safetensors"

CHILD = """
import os, sys
import torch
torch.set_num_threads(1)
from safetensors.torch import save_file
import retouch.recipes.session as session
finish = session.Session.finish

def finish_and_save(self):
    finish(self)
    file = self.run.dir.path / f"rank-{self.run.engine.rank}.safetensors"
    save_file({n: t.clone() for n, t in self.run.policy.state().items()}, file)

session.Session.finish = finish_and_save
from retouch.cli import main
main()
"""
"""`retouch`, and at the end the weights of every rank, not only those that the first one saves."""


def on_two(run: Path, *overrides: str) -> Path:
    """Train with two processes -> the run directory."""
    child = run.with_name("child.py")
    child.write_text(CHILD, encoding="utf-8")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [sys.executable, *launcher, str(child), "train", str(run), "name=two", *overrides],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return run.parent / "runs" / "two"


def on_one(run: Path, *overrides: str) -> Path:
    """Train in this process -> the run directory."""
    outcome = retouch("train", run, "name=one", *overrides)
    assert outcome.code == 0, outcome.err
    return run.parent / "runs" / "one"


@pytest.fixture
def run_yaml(run_file: Callable[..., dict[str, Any]], tmp_path: Path) -> Path:
    """A step of warm-up on 10 rows, two of RL on 9: groups of 3 lie across the ranks, and one slot is padding. AdamW's
    eps is raised, or it would blow up rounding where a gradient is almost 0."""
    path = tmp_path / "run.yaml"
    run = run_file(
        algorithm__warmup_steps=1,
        algorithm__kl_weight=0.01,
        rollout__group_size=3,
        rollout__global_groups_per_batch=3,
        rollout__batch_size_per_device=9,
        optimizer__eps=1e-3,
        optimizer__lr=1e-3,
        training__max_steps=3,
        ema={"decay": 0.5},
    )
    path.write_text(yaml.safe_dump(run), encoding="utf-8")
    return path


def test_two_ranks_train_as_one_process_does(run_yaml: Path) -> None:
    """Of the same global batch: equal weights on both ranks, and those of one process within rounding."""
    one = on_one(run_yaml, "optimizer.batch_size_per_device=2", "optimizer.gradient_accumulation=5")
    two = on_two(run_yaml, "optimizer.batch_size_per_device=1", "optimizer.gradient_accumulation=5")
    first, second = (load_file(two / f"rank-{rank}.safetensors") for rank in range(2))
    alone = load_file(one / "checkpoints" / "step-000003" / "weights" / WEIGHTS)
    for name, expected in alone.items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], expected, atol=1e-5, rtol=0, msg=name)
    start = load_file(tiny_path("flux_fill") / "transformer" / WEIGHTS)
    assert max(float((t - start[name].float()).abs().max()) for name, t in alone.items()) > 1e-3
    averaged = [load_file(run / "checkpoints" / "step-000003" / "ema" / WEIGHTS) for run in (one, two)]
    for name, expected in averaged[0].items():
        torch.testing.assert_close(averaged[1][name], expected, atol=1e-5, rtol=0, msg=name)
    same_records(read_metrics(one / "metrics.jsonl"), read_metrics(two / "metrics.jsonl"))


def same_records(one: list[dict[str, Any]], two: list[dict[str, Any]]) -> None:
    """What is logged is that of all ranks together, once."""
    assert [(r["kind"], r["step"]) for r in one] == [(r["kind"], r["step"]) for r in two]
    for a, b in zip(one, two, strict=True):
        for name in a.keys() - {"time", "max_abs_log_ratio"}:
            assert b[name] == (pytest.approx(a[name], rel=1e-3, abs=1e-5) if isinstance(a[name], float) else a[name]), (
                name
            )
        assert b.get("max_abs_log_ratio", 0) <= max(1e-5, 1.1 * a.get("max_abs_log_ratio", 0))
