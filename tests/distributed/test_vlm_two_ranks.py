"""vlm_grpo on two processes (gloo, CPU) is vlm_grpo on one, on the same completions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from torch.testing import assert_close

pytest.importorskip("trl")

from tests.recipes.vlm_runs import records, run_section, weights

CHILD = """
import random, sys
import torch
torch.set_num_threads(1)
from trl import GRPOTrainer

def replayed(self, prompt_ids, images, multimodal_fields, num_generations, *options):
    said, seen = [], {}
    for ids in prompt_ids:
        number = seen[tuple(ids)] = seen.get(tuple(ids), -1) + 1
        draw = random.Random(f"{list(ids)} {number} {self.state.global_step}")
        said.append([draw.randrange(60, 90) for _ in range(draw.randrange(2, 6))])
    return said, None

GRPOTrainer._generate_single_turn = replayed
from retouch.cli import main
main()
"""
"""`retouch` whose completions depend on the prompt and the place in its group alone."""


def run(launcher: list[str], file: Path, *overrides: str) -> None:
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "COLUMNS": "1000"}
    script = file.parent / "child.py"
    script.write_text(CHILD, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, *launcher, str(script), "train", str(file), *overrides],
        env={**environment, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr


def test_two_processes_are_one(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    section = run_section(tmp_path, {"beta": 0.05, "lr_scheduler_type": "constant", "learning_rate": 1e-3})
    file.write_text(yaml.safe_dump(section), encoding="utf-8")
    run([], file, "name=one")
    two = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    run(two, file, "name=two", "algorithm.trl.per_device_train_batch_size=4")
    expected, found = (records(tmp_path / name) for name in ("one", "two"))
    assert len(found) == len(expected) == 2
    for theirs, mine in zip(expected, found, strict=True):
        for name in ("reward", "reward_std", "grad_norm", "reward/letters", "completions/mean_length"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-7), name
    assert expected[0]["grad_norm"] > 0
    # Adam divides by the root of the gradient's square: where that is rounding, so is the step's direction
    assert_close(weights(tmp_path / "two", 2), weights(tmp_path / "one", 2), atol=2e-4, rtol=0)
