"""configs/accelerate: what the files say, and what they promise: two data-parallel processes are one, split."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from safetensors.torch import load_file
from torch.testing import assert_close

from retouch.engine.saved import complete_checkpoints
from retouch.observe.run_dir import read_metrics
from tests import forked
from tests.command_line import retouch

from .conftest import CONFIGS, ENGINES, name_of, shrink

KINDS = {
    "gpu1": (1, "NO"),
    "gpu8": (8, "MULTI_GPU"),
    "gpu16": (16, "MULTI_GPU"),
    "zero2": (8, "DEEPSPEED"),
    "zero3": (8, "DEEPSPEED"),
    "zero3_offload": (8, "DEEPSPEED"),
}


@pytest.mark.parametrize("path", ENGINES, ids=name_of)
def test_accelerate_reads_the_file(path: Path) -> None:
    engine: Any = load_config_from_file(str(path))
    processes, kind = KINDS[path.stem]
    assert (engine.num_processes, engine.distributed_type) == (processes, kind)
    assert engine.num_machines == (2 if engine.num_processes == 16 else 1)
    if kind == "DEEPSPEED":
        sharded, offloaded = path.stem != "zero2", path.stem == "zero3_offload"
        assert engine.deepspeed_config["zero_stage"] == (3 if sharded else 2)
        assert engine.deepspeed_config.get("zero3_save_16bit_model", False) == sharded  # or no weights are saved
        for part in ("optimizer", "param"):
            assert engine.deepspeed_config[f"offload_{part}_device"] == ("cpu" if offloaded else "none")


@pytest.mark.parametrize("path", ENGINES, ids=name_of)
def test_precision_is_left_to_the_run_file(path: Path) -> None:
    """The engine reads it there; a second place could only disagree."""
    lines = path.read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if line.startswith("mixed_precision")]


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        pytest.param("flux_fill_grpo.yaml", 2, marks=pytest.mark.full),
        pytest.param("flux_fill_grpo_lora.yaml", 2, marks=pytest.mark.full),
        pytest.param("flux_fill_nft.yaml", 2, marks=pytest.mark.slow),  # tests/distributed has both, on smaller runs
        pytest.param("flux_fill_dpo.yaml", 3, marks=pytest.mark.slow),
    ],
)
def test_two_processes_train_what_one_does(name: str, groups: int, signs: dict[str, Path], tmp_path: Path) -> None:
    """Full weights and LoRA, a warm-up step and an RL step: the same rewards, gradients and weights. DPO's three groups
    are three pairs, one of whose members lie on different ranks, and one rank has a pair less."""
    path = CONFIGS / "tiny" / name
    common = [*shrink(path, signs, tmp_path), "rewards={preservation: {}}", "logging.sinks=[]", "training.eval_every=0"]
    common.append(f"rollout.global_groups_per_batch={groups}")
    one = [*common, "name=one", "optimizer.gradient_accumulation=2"]
    two = [*common, "name=two", "optimizer.gradient_accumulation=1"]
    assert retouch("train", path, *one).code == 0
    on_two("train", path, *two)
    expected, found = (records(tmp_path / run) for run in ("one", "two"))
    assert len(found) == len(expected)
    for theirs, mine in zip(expected, found, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-6)
    assert_close(weights(tmp_path / "two"), weights(tmp_path / "one"), atol=2e-5, rtol=0)


@pytest.mark.full
@pytest.mark.parametrize("name", ["flux_fill_grpo.yaml", "flux_fill_dpo.yaml"])
def test_two_processes_resume_inside_an_epoch_each_with_its_own_rows(
    name: str, signs: dict[str, Path], tmp_path: Path
) -> None:
    """Stopped after the first of two steps of an epoch; rank 0's rows on both would train another policy."""
    path = CONFIGS / "tiny" / name
    options = [*shrink(path, signs, tmp_path), "rewards={preservation: {}}", "logging.sinks=[]", "resume=auto"]
    options += [
        "algorithm.sft_steps=0",
        "algorithm.inner_epochs=2",
        "optimizer.schedule=constant",
    ]
    options += ["optimizer.gradient_accumulation=1", "training.eval_every=0"]
    options += ["training.max_steps=2", "training.checkpoint_every=1"]
    on_two("train", path, *options, "name=whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    shutil.rmtree(tmp_path / "again/checkpoints/step-000002")
    on_two("train", path, *options, "name=again")
    assert records(tmp_path / "again") == records(tmp_path / "whole")
    assert_close(weights(tmp_path / "again"), weights(tmp_path / "whole"), atol=0, rtol=0)


def on_two(*arguments: object) -> None:
    """A command of the package on two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "retouch"]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = forked.run([*command, *map(str, arguments)], env=environment, timeout=240)
    assert done.returncode == 0, done.stderr


def records(run: Path) -> list[dict[str, Any]]:
    """Numbers of every training step and rollout epoch, timings aside."""
    kept = [r for r in read_metrics(run / "metrics.jsonl") if r["kind"] in ("train", "rollout")]
    return [{k: v for k, v in record.items() if isinstance(v, int | float)} for record in kept]


def weights(run: Path) -> dict[str, Any]:
    newest = complete_checkpoints(run / "checkpoints")[-1]
    return {name: t for file in (newest / "weights").glob("*.safetensors") for name, t in load_file(file).items()}
