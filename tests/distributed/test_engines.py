"""The engine on two processes is the engine on one, however the network is shared: torchrun, gloo, a CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from retouch.config import ConfigError
from retouch.config.run import (
    OptimizerConfig,
    TrainingConfig,
)
from retouch.engine.zero import Zero
from tests import forked

REPOSITORY = Path(__file__).parents[2]
TORCH = ("ddp", "fsdp2")
DEEPSPEED = ("zero1", "zero2", "zero3")
SMALL = "tests.distributed.small_network"


def outcomes(folder: Path, ways: tuple[str, ...]) -> dict[str, Any]:
    """What one process found as `one`, and what each of two found as (way, rank)."""
    two = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    for launcher, arguments in (([], []), (two, [",".join(ways)])):
        done = forked.run(
            [sys.executable, *launcher, "-m", SMALL, str(folder), *arguments],
            cwd=REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
            timeout=1200,
        )
        assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((folder / "one.json").read_text())
    for rank in range(2):
        of_rank = json.loads((folder / f"rank-{rank}.json").read_text())
        found |= {f"{way}/{rank}": of_rank[way] for way in ways}
    return found


@pytest.fixture(scope="module")
def by_torch(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return outcomes(tmp_path_factory.mktemp("torch"), TORCH)


@pytest.fixture(scope="module")
def by_deepspeed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    return outcomes(tmp_path_factory.mktemp("deepspeed"), ("ddp", *DEEPSPEED))


@pytest.fixture
def found(way: str, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Of one process, and of each of two that share the network in a way."""
    everything = request.getfixturevalue("by_torch" if way in TORCH else "by_deepspeed")
    return {name: everything[name] for name in ("one", f"{way}/0", f"{way}/1")}


def numbers(value: Any) -> list[float]:
    """All numbers of a nested value, in order."""
    if isinstance(value, dict):
        return [n for name in sorted(value) for n in numbers(value[name])]
    return [n for part in value for n in numbers(part)] if isinstance(value, list) else [value]


every_way = pytest.mark.parametrize("way", [*TORCH, *DEEPSPEED])


@every_way
@pytest.mark.parametrize("what", ["steps", "forwards"])
def test_two_processes_are_one(found: dict[str, Any], what: str) -> None:
    """Loss and gradient norm of every step, across swaps of weights and a new optimizer; forwards on snapshots."""
    one, *two = found.values()
    assert len(set(numbers(one[what]))) >= 8 * (what == "forwards") + 4
    for rank in two:
        assert numbers(rank[what]) == pytest.approx(numbers(one[what]), rel=0, abs=1e-5)


@every_way
def test_weights_and_averages_are_gathered_by_the_first(found: dict[str, Any]) -> None:
    one, first, _ = found.values()
    for what in ("weights", "averages"):
        assert first[what].keys() == one[what].keys()
        assert numbers(first[what]) == pytest.approx(numbers(one[what]), rel=0, abs=1e-5)
    assert numbers(one["weights"]) != numbers(one["averages"])


@every_way
def test_a_gradient_that_is_not_finite_leaves_the_weights(found: dict[str, Any]) -> None:
    assert all(rank["diverged"] is True for rank in found.values())


@every_way
def test_it_goes_on_from_one_process_and_from_another_way(found: dict[str, Any]) -> None:
    """Weights, averages and moments: the second step would differ without them."""
    one, *two = found.values()
    for rank in two:
        for source in ("resumed", "taken_over"):
            assert numbers(rank[source]) == pytest.approx(numbers(one["resumed"]), rel=0, abs=1e-5)


@every_way
def test_what_a_process_holds(found: dict[str, Any], way: str) -> None:
    """Pieces of ZeRO-3 are padded to one length, those of FSDP2 are whole rows."""
    trained = found["one"]["held"]["trained"]
    held = [found[f"{way}/{rank}"]["held"] for rank in range(2)]
    assert all(rank["trained"] == trained for rank in held)
    weights = 1 if way in ("fsdp2", "zero3") else 2
    moments = 2 if way == "ddp" else 1
    for name, copies in (("weights", weights), ("ema", weights), ("moments", 2 * moments)):
        assert sum(rank[name] for rank in held) == pytest.approx(copies * trained, rel=0.07), name


@every_way
def test_gradients_are_exchanged_in_the_last_micro_step_alone(found: dict[str, Any], way: str) -> None:
    """Or in each where they stay sharded; DDP calls no collective at all before the last one."""
    one, *two = found.values()
    assert one["gradients"] == one["whole_gradients"] == [{}, {}]
    for rank in two:
        for kind, early in (("gradients", way != "ddp"), ("whole_gradients", way == "zero3")):
            exchanged = [sum(n for name, n in calls.items() if "reduce" in name) for calls in rank[kind]]
            assert exchanged[1] >= 1 and exchanged[0] == early * exchanged[1], (kind, rank[kind])
        if way == "ddp":
            assert rank["gradients"][0] == {}


@every_way
def test_bf16_is_as_on_one_process(found: dict[str, Any]) -> None:
    """Not with the same roundings; what is frozen is bf16 itself."""
    one, *two = found.values()
    for rank in two:
        assert rank["bf16"] == pytest.approx(one["bf16"], rel=0.01)
        assert rank["bf16"] != rank["steps"][0]


@every_way
def test_weights_are_widened_as_they_are_placed(found: dict[str, Any]) -> None:
    """From files in bf16: every value is one of bf16, and is trained in fp32."""
    one, *two = found.values()
    start = torch.tensor(numbers(one["mapped"]["start"]))
    assert torch.equal(start, start.bfloat16().float())
    for rank in two:
        assert rank["mapped"]["start"] == one["mapped"]["start"]
        assert numbers(rank["mapped"]["steps"]) == pytest.approx(numbers(one["mapped"]["steps"]), rel=1e-5)


def test_deepspeed_exchanges_what_bf16_computed_in_fp32(by_deepspeed: dict[str, Any]) -> None:
    """As DDP does; by itself it would round gradients to bf16 before it sums them."""
    for way in DEEPSPEED:
        assert by_deepspeed[f"{way}/0"]["bf16"] == pytest.approx(by_deepspeed["ddp/0"]["bf16"], rel=1e-6), way


def test_without_deepspeed_it_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ConfigError, match=r"'zero3', which needs DeepSpeed: pip install .retouch\[deepspeed\]., or"):
        Zero(nn.Linear(1, 1), Accelerator(), OptimizerConfig(), TrainingConfig(sharding="zero3"))
