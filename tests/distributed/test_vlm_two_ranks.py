"""vlm_grpo on two processes (gloo, CPU) is vlm_grpo on one, on the same completions: data parallel, and under DeepSpeed
with the files of configs/accelerate."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from torch.testing import assert_close

pytest.importorskip("trl")

from retouch.engine.checkpoint import read_state
from retouch.observe.run_dir import read_rows
from tests import forked
from tests.algorithms.vlm_runs import records, run_section, weights

CHILD = """
import os, random, sys
import torch
torch.set_num_threads(1)
from trl import GRPOTrainer
import retouch.algorithms.vlm_grpo.scoring as scoring

def replayed(self, prompt_ids, images, multimodal_fields, num_generations, *options):
    said, seen = [], {}
    for ids in prompt_ids:
        number = seen[tuple(ids)] = seen.get(tuple(ids), -1) + 1
        draw = random.Random(f"{list(ids)} {number} {self.state.global_step}")
        said.append([draw.randrange(60, 90) for _ in range(draw.randrange(2, 6))])
    return said, None

encode, kept = scoring.encode_response, []

def encoded(model, responses, **options):
    found = encode(model, responses, **options)
    if len(responses) > 3:  # of training: an evaluation of three examples pads a rank
        kept.append(found[0])
    return found

GRPOTrainer._generate_single_turn = replayed
scoring.encode_response = encoded
from retouch.cli import main
try:
    main()
finally:
    torch.save(kept, f"{sys.argv[0]}-{os.environ.get('RANK', 0)}.pt")
"""
"""`retouch` whose completions depend on the prompt and the place in its group alone. It leaves the text states that it
drew from beside itself."""

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
HALF = "algorithm.trl.per_device_train_batch_size=4"
CONFIGS = Path(__file__).parents[2] / "configs" / "accelerate"
LORA = {"beta": 0.05, "lr_scheduler_type": "constant", "learning_rate": 1e-3}
FULL = {"use_peft": False, "lora_r": None, "lora_alpha": None, "lora_dropout": None, **LORA, "beta": 0.0}


def deepspeed(stage: int) -> tuple[str, ...]:
    """The launcher that the documentation names, on two processes."""
    pytest.importorskip("deepspeed")
    return ("-m", "accelerate.commands.launch", "--config_file", f"{CONFIGS}/zero{stage}.yaml", "--num_processes", "2")


def start(launcher: tuple[str, ...], file: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "1000"}
    if "accelerate.commands.launch" not in launcher:
        environment["ACCELERATE_USE_CPU"] = "true"
    script = file.parent / "child.py"
    script.write_text(CHILD, encoding="utf-8")
    return forked.run(
        [sys.executable, *launcher, str(script), "train", str(file), *overrides],
        env={**environment, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=900,
    )


def run(launcher: tuple[str, ...], file: Path, *overrides: str) -> list[Tensor]:
    """Train -> the text states that pictures were drawn from, those of the ranks one after the other in each step."""
    done = start(launcher, file, *overrides)
    assert done.returncode == 0, done.stderr
    ranks = [torch.load(f"{file.parent}/child.py-{rank}.pt") for rank in range(2 if launcher else 1)]
    return [row for step in zip(*ranks, strict=True) for rows in step for row in rows]


def run_file(folder: Path, trl: Mapping[str, Any]) -> Path:
    file = folder / "run.yaml"
    section = run_section(folder, trl, evaluation={"num_examples": 3, "grid_examples": 1})
    options = section["algorithm"]["trl"]
    section["algorithm"]["trl"] = {name: value for name, value in options.items() if value is not None}
    if not section["algorithm"]["trl"]["use_peft"]:
        section["algorithm"]["negative_encoder"] = "policy"
    file.write_text(yaml.safe_dump(section), encoding="utf-8")
    return file


def same(one: Path, two: Path, steps: int = 2) -> None:
    """Metrics and weights."""
    expected, found = records(one), records(two)
    assert len(found) == len(expected) == steps
    for theirs, mine in zip(expected, found, strict=True):
        for name in (
            "loss",
            "reward",
            "reward_std",
            "grad_norm",
            "entropy",
            "reward/letters",
            "completions/mean_length",
        ):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-7), name
    assert expected[0]["grad_norm"] > 0
    # Adam divides by the root of the gradient's square: where that is rounding, so is the step's direction
    assert_close(weights(two, steps), weights(one, steps), atol=2e-4, rtol=0)


def test_two_processes_are_one(tmp_path: Path) -> None:
    file = run_file(tmp_path, LORA)
    states = run((), file, "name=one")
    assert_close(run(TORCHRUN, file, "name=two", HALF, "rewards.letters.url=auto"), states, atol=1e-5, rtol=0)
    assert (tmp_path / "two" / "reward-server.log").read_text().count("letters loaded on cpu") == 1
    same(tmp_path / "one", tmp_path / "two")
    start = [read_rows(tmp_path / f"{name}/evaluations/step-000000/rows.jsonl") for name in ("one", "two")]
    assert start[0] == start[1] and len({row["read"] for row in start[0]}) == 3
    for name in ("one", "two"):
        assert read_state(tmp_path / name / "checkpoints/step-000002")["rewards"]["asked"] == 16


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "trl"), [(2, LORA), (3, LORA), (3, FULL)], ids=["zero2-lora", "zero3-lora", "zero3"])
def test_deepspeed_is_one_process_and_resumes(tmp_path: Path, stage: int, trl: Mapping[str, Any]) -> None:
    """The text states, too, for which ZeRO-3 gathers the weights; the second half after a resume."""
    launcher, file = deepspeed(stage), run_file(tmp_path, trl)
    states = run((), file, "name=one", "training.max_steps=4")
    assert len(states) == 32
    first = run(launcher, file, "name=two", HALF)
    assert_close(first, states[:16], atol=1e-5, rtol=0)
    second = run(launcher, file, "name=two", HALF, "training.max_steps=4", "resume=auto")
    assert_close(second, states[16:], atol=5e-4, rtol=0)  # behind two steps of Adam, see `same`
    same(tmp_path / "one", tmp_path / "two", 4)
    assert_sharded(tmp_path / "two", stage)


def assert_sharded(folder: Path, stage: int) -> None:
    """The checkpoint holds the pieces of two processes."""
    [state] = (folder / "checkpoints" / "step-000004").glob("global_step*")
    assert len(list(state.glob("*_optim_states.pt"))) == 2
    assert len(list(state.glob("*_model_states.pt"))) == (1 if stage == 2 else 2)


@pytest.mark.slow
def test_state_of_deepspeed_is_refused_on_one_process(tmp_path: Path) -> None:
    launcher, file = deepspeed(2), run_file(tmp_path, LORA)
    run(launcher, file, "name=two", HALF)
    done = start((), file, "name=two", "training.max_steps=4", "resume=auto")
    assert done.returncode == 2
    assert "was written under DeepSpeed ZeRO-2 on 2 processes, but this is no DeepSpeed" in done.stderr
