"""Sharded weights (FSDP2, DeepSpeed's ZeRO) on two processes are replicated ones, and those of one process: torchrun,
gloo, a CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from safetensors.torch import load_file

from retouch.engine import Engine
from retouch.observe.run_dir import read_metrics
from retouch.rewards.scorers.preservation import PreservationScorer
from tests import forked
from tests.command_line import retouch
from tests.conftest import small_run
from tests.distributed.scores import coarse
from tests.tiny_models import narrow_sd

REPOSITORY = Path(__file__).parents[2]
slow = pytest.mark.slow
TOLERANCE = 1e-5

Tolerances = Mapping[tuple[int, str], float]
"""(Step, metric) of a training step -> what two runs may differ by there, if it is more than `TOLERANCE`."""

ONE = ("optimizer.batch_size_per_device=2",)
SHARDED = ("training.sharding=fsdp2",)
ZERO = ("zero2", "zero3")
DPO = "algorithm={name: dpo, beta: 100.0, timesteps_per_pair: 2, inner_epochs: 2}"
NFT = "algorithm={name: nft, kl_weight: 0.1, timesteps_per_image: 2, inner_epochs: 2}"
GRADIENT = "algorithm={name: reward_gradient, trained_step: all, last_steps: 2}"
ODE = ("rollout.window=null", "rollout.noise_level=null")
SD = ("model={family: sd_inpaint, path: tiny, dtype: fp32, train: {kind: full}}", "rollout.noise_level=null")

QWEN = (
    "model={family: qwen_image_edit, path: tiny, dtype: fp32, max_sequence_length: 96, train: {kind: full}}",
    "rollout.noise_level=null",
)

SMALL = ("rollout.global_groups_per_batch=1", "optimizer.gradient_accumulation=2")
"""One group of three, which lies across the processes; one slot is padding, as in `write_run`."""

FLAT = ("rollout.group_size=2", "rollout.global_groups_per_batch=4")

CASES: dict[str, tuple[str, ...]] = {
    "flux_grpo": (),
    "flux_shared": ("rollout.shared_noise=true",),  # a group's first step once in every process that has some of it
    "flux_dpo": (DPO, *ODE),  # three pairs: one process has one pair less
    "flux_nft": (NFT, *ODE),
    "sd_grpo": (*SD, "optimizer.lr=2e-4"),
    "sd_dpo": (*SD, DPO, *ODE, "optimizer.lr=2e-4"),
    "sd_nft": (*SD, "model.path=${NARROW_SD}", NFT, *ODE, "optimizer.lr=2e-4", *SMALL),
    "flux_gradient": (GRADIENT, *ODE, *SMALL, "optimizer.gradient_accumulation=4"),  # two epochs of one step
    "sft": ("algorithm={name: sft}", "training.gradient_checkpointing=true"),
    "lora": ("model.train={kind: lora, rank: 4, alpha: 64}", "optimizer.lr=1e-2"),
    "qwen_grpo": (*QWEN, *SMALL),  # what its last block makes of the text goes nowhere: weights without a gradient
    "flat": FLAT,
    "flat_nft": (*FLAT, NFT, *ODE),
}
"""Name of a comparison -> what its runs have in common beside `write_run`. Three of them would grow rounding beyond
the tolerance, or until it tips a pixel over, in one step of its learning rate."""

FEW = ("sd_nft", "qwen_grpo")
"""Those of them that are compared in every run of the tests, not only in the slow ones; the first with replicated
weights, too, which test_two_ranks.py compares with one process."""

AMPLIFIED = "sd_grpo"
"""Its first step moves the policy so far that the metrics of the second one amplify rounding 60 times. In float64 one
process and two under ZeRO differ by 9e-16 in weights and 5e-14 in the largest |log ratio|, which is 1.38; in float32 by
2e-7 and up to 1.2e-5, and two runs under ZeRO-2, whose buffers lie elsewhere each time, by 1.4e-5."""

ROWS = {1: 10, 2: 5, 3: 3}
"""Rows of a forward -> forwards of a step, in which one process takes `AMPLIFIED`; 1 is that of `AMPLIFIED-one`."""

COMPARED = [pytest.param(name, marks=slow) for name in CASES if name not in FEW and not name.startswith("flat")]

ONLY_SHARDED = {
    "whole_gradients": ("training.shard_gradients=false",),
    "slow": (),
}
"""Runs that must equal flux_grpo."""


def on_two(runs: Sequence[Sequence[Any]], timeout: float = 2400) -> subprocess.CompletedProcess[str]:
    """Runs of `many_runs`, one after the other in two processes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    return forked.run(
        [*launcher, "-m", "tests.distributed.many_runs", json.dumps(runs)],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        timeout=timeout,
    )


def write_run(signs: Path, folder: Path) -> Path:
    """Two steps on the nine images of three groups, which lie across the processes; one slot is padding.

    Sampled one by one and once, so that all have the same pixels but for the rounding that `coarse` explains. AdamW's
    eps is raised, or it would blow up rounding where a gradient is almost 0.
    """
    run = small_run(
        signs,
        folder / "runs",
        algorithm__kl_weight=0.01,
        algorithm__inner_epochs=2,
        rollout__group_size=3,
        rollout__global_groups_per_batch=3,
        rollout__batch_size_per_device=1,
        optimizer__eps=1e-3,
        optimizer__lr=1e-3,
        optimizer__batch_size_per_device=1,
        optimizer__gradient_accumulation=5,
        training__max_steps=2,
        evaluation__num_examples=1,
        evaluation__grid_examples=0,
        evaluation__weights="raw",  # of their pictures no value lies on the border of two levels
        ema={"decay": 0.5},
    )
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run), encoding="utf-8")
    return path


def replicated_and_sharded(run: Path, name: str) -> list[list[Any]]:
    """The runs `NAME-ddp` and `NAME-fsdp2` of a case."""
    fault = ["flat"] if name.startswith("flat") else []
    both = [fault, "train", str(run), f"name={name}-ddp", *CASES[name]]
    return [both, [*both, f"name={name}-fsdp2", *SHARDED]]


def on_one(run: Path, name: str, to: str = "one", rows: int = 1, sampled: int = 1) -> None:
    """The run `NAME-TO` of a case, in this process; rows of a forward of training and sampling are of `AMPLIFIED`."""
    sizes = [f"optimizer.batch_size_per_device={rows}", f"optimizer.gradient_accumulation={ROWS[rows]}"]
    sizes.append(f"rollout.batch_size_per_device={sampled}")
    outcome = retouch("train", run, f"name={name}-{to}", *CASES[name], *(sizes if name == AMPLIFIED else ONE))
    assert outcome.code == 0, outcome.err


@pytest.fixture(scope="module", autouse=True)
def coarse_scores() -> Iterator[None]:
    """In this process; `many_runs` has them, too."""
    with mock.patch.object(PreservationScorer, "score", coarse(PreservationScorer.score)):
        yield


@pytest.fixture(scope="module")
def few(signs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The folder with the runs of `FEW`, and how their two processes ended: in the last run, `fails`, one raises."""
    folder = tmp_path_factory.mktemp("sharded")
    os.environ["NARROW_SD"] = narrow_sd()  # a third of the width: runs of a case are compared with each other alone
    run = write_run(signs, folder)
    first, *others = FEW
    two = [*replicated_and_sharded(run, first), *(replicated_and_sharded(run, name)[1] for name in others)]
    done = on_two([*two, [["raise"], "train", str(run), "name=fails", *SMALL]], timeout=600)
    for name in FEW:
        on_one(run, name)
    return folder, done


@pytest.fixture(scope="module")
def runs(few: tuple[Path, Any]) -> Path:
    """The folder with every run of `CASES` as `NAME-one`, `NAME-ddp` and `NAME-fsdp2`, and the others by their name."""
    folder, _ = few
    run = folder / "run.yaml"
    cases = [name for name in CASES if name not in FEW]
    two = [arguments for name in cases for arguments in replicated_and_sharded(run, name)]
    for name, options in ONLY_SHARDED.items():
        two.append([["slow"] if name == "slow" else [], "train", str(run), f"name={name}", *options, *SHARDED])
    bf16 = ("algorithm={name: sft}", "training.mixed_precision=bf16")
    two.append([[], "train", str(run), "name=bf16-ddp", *bf16])
    two.append([[], "train", str(run), "name=bf16-fsdp2", *bf16, *SHARDED])
    two.append([[], "train", str(run), "name=resumed-fsdp2", *SHARDED])
    two.append([[], "train", str(run), "name=resumed-none"])
    done = on_two(two)
    assert done.returncode == 0, done.stderr[-4000:]
    for name in cases:
        if not name.startswith("flat"):
            on_one(run, name)
    return folder


@pytest.fixture(scope="module")
def zero_runs(runs: Path) -> Path:
    """The same folder with every run as `NAME-zero2` and `NAME-zero3`, too."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    run = str(runs / "run.yaml")
    two: list[list[Any]] = []
    for name, options in CASES.items():
        fault = ["flat"] if name.startswith("flat") else []
        two += [[fault, "train", run, f"name={name}-{zero}", *options, f"training.sharding={zero}"] for zero in ZERO]
    two.append([["slow"], "train", run, "name=slow-zero3", "training.sharding=zero3"])
    two += [[[], "train", run, f"name=resumed-{zero}", f"training.sharding={zero}"] for zero in ZERO]
    done = on_two(two)
    assert done.returncode == 0, done.stderr[-4000:]
    return runs


def records(run: Path) -> list[dict[str, Any]]:
    return read_metrics(run / "metrics.jsonl")


@pytest.fixture(scope="module")
def tolerances(runs: Path) -> Tolerances:
    """Twice the range of each metric of `AMPLIFIED` over six runs of one process that compute the same, with other
    numbers of rows in forwards of sampling and of training. If rounding errors are normal, a further run is farther
    than that from the first one in .7 % of cases."""
    names = ["one"]
    for sampled, rows in list(product((1, 3), ROWS))[1:]:
        names.append(f"{sampled}-{rows}-rows")
        on_one(runs / "run.yaml", AMPLIFIED, names[-1], rows, sampled)
    of_runs = zip(*(records(runs / "runs" / f"{AMPLIFIED}-{name}") for name in names), strict=True)
    found = dict[tuple[int, str], float]()
    for first, *others in of_runs:
        for name, value in first.items() if first["kind"] == "train" else ():
            if isinstance(value, float) and name != "time":
                values = [value, *(other[name] for other in others)]
                found[first["step"], name] = 2 * (max(values) - min(values))
    return found


def same_numbers(one: Path, two: Path, tolerances: Tolerances = MappingProxyType({})) -> None:
    """Every number that was logged, timings aside; of those above 1 the tolerance is a share, as in fp32."""
    first, second = records(one), records(two)
    assert [(r["kind"], r["step"]) for r in first] == [(r["kind"], r["step"]) for r in second]
    for a, b in zip(first, second, strict=True):
        assert a.keys() == b.keys()
        for name in a.keys() - {"time"}:
            expected: Any = a[name]
            if isinstance(expected, float):
                least = tolerances.get((a["step"], name), 0.0) if a["kind"] == "train" else 0.0
                expected = pytest.approx(expected, rel=TOLERANCE, abs=max(TOLERANCE, least))
            assert b[name] == expected, (a["step"], name)


def same_weights(one: Path, two: Path, step: str = "step-000002") -> None:
    """In the weights, the averages and every snapshot of a checkpoint."""
    files = sorted(p.relative_to(one) for p in (one / "checkpoints" / step).rglob("*.safetensors"))
    assert files == sorted(p.relative_to(two) for p in (two / "checkpoints" / step).rglob("*.safetensors"))
    assert len(files) >= 2
    for file in files:
        mine, theirs = load_file(one / file), load_file(two / file)
        assert mine.keys() == theirs.keys()
        for name, tensor in mine.items():
            assert float((tensor - theirs[name]).abs().max()) <= TOLERANCE, (file, name)


def tells(run: Path) -> None:
    """What moves in a run is far above what two runs may differ by: the loss, the gradient, and the weights against
    what they were or averaged."""
    trained = [r for r in records(run) if r["kind"] == "train"]
    assert len(trained) == 2 and min(r["grad_norm"] for r in trained) > 20 * TOLERANCE
    assert abs(trained[1]["loss"] - trained[0]["loss"]) > 20 * TOLERANCE
    step = run / "checkpoints" / "step-000002"
    now, *before = (load_file(file) for file in sorted(step.rglob("*.safetensors"), reverse=True))  # weights/ first
    moved = [float((now[n] - then[n]).abs().max()) for then in before if then.keys() == now.keys() for n in now]
    assert max(moved) > 20 * TOLERANCE


def held(run: Path, rank: int) -> dict[str, Any]:
    return json.loads((run / f"rank-{rank}.json").read_text())


def same_as_one(folder: Path, name: str) -> None:
    one, sharded = (folder / "runs" / f"{name}-{engine}" for engine in ("one", "fsdp2"))
    tells(one)
    same_numbers(one, sharded)
    same_weights(one, sharded)


def compare(folder: Path, name: str) -> None:
    same_as_one(folder, name)
    ddp, sharded = (folder / "runs" / f"{name}-{engine}" for engine in ("ddp", "fsdp2"))
    same_numbers(ddp, sharded)
    same_weights(ddp, sharded)
    for rank in range(2):  # gradients are exchanged once in each of two steps
        assert held(ddp, rank)["exchanges"] == 2 < held(ddp, rank)["backwards"]


def halves(folder: Path, name: str) -> None:
    """Every process has a half of weights, moments and snapshots; the halves are the whole, as one process saves it."""
    saved = folder / "runs" / f"{name}-one/checkpoints/step-000002/weights/diffusion_pytorch_model.safetensors"
    whole = sum(tensor.numel() for tensor in load_file(saved).values())
    first, second = (held(folder / "runs" / f"{name}-fsdp2", rank) for rank in range(2))
    assert first["trained"] == second["trained"] == whole
    for part, numbers in (("weights", whole), ("moments", 2 * whole)):
        assert first[part] + second[part] == numbers
        assert first[part] == pytest.approx(numbers / 2, rel=0.02)
    assert first["snapshots"].keys() == {"ema", "old", "reference"}
    for snapshot in first["snapshots"]:
        assert first["snapshots"][snapshot] + second["snapshots"][snapshot] == whole


def stopped(done: subprocess.CompletedProcess[str], run: Path) -> None:
    """By the process that raised; nothing was saved."""
    assert done.returncode != 0
    assert "fails on purpose" in done.stdout + done.stderr
    assert not list((run / "checkpoints").glob("step-*"))


def test_sharded_is_replicated_is_one_process_and_one_that_fails_stops_the_other(
    few: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    """One test, so that its processes start once."""
    folder, done = few
    stopped(done, folder / "runs" / "fails")
    compare(folder, FEW[0])
    halves(folder, FEW[0])
    for name in FEW[1:]:
        same_as_one(folder, name)


@pytest.mark.parametrize("name", COMPARED)
def test_sharded_is_replicated_is_one_process(runs: Path, name: str) -> None:
    compare(runs, name)


@slow
@pytest.mark.parametrize("zero", ZERO)
@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("flat")])
def test_zero_is_one_process(zero_runs: Path, name: str, zero: str, request: pytest.FixtureRequest) -> None:
    one, sharded = (zero_runs / "runs" / f"{name}-{engine}" for engine in ("one", zero))
    same_numbers(one, sharded, request.getfixturevalue("tolerances") if name == AMPLIFIED else {})
    same_weights(one, sharded)


@slow
@pytest.mark.parametrize("fault", ["scaled", "lost"])
def test_a_gradient_that_is_not_the_same_is_beyond_them(runs: Path, tolerances: Tolerances, fault: str) -> None:
    """One that is a ten-thousandth too large, and one without a micro-batch."""
    real, count = Engine.backward, 0

    def backward(self: Engine, loss: torch.Tensor) -> None:
        nonlocal count
        count += 1
        real(self, loss * (1.0001 if fault == "scaled" else float(count != 3)))

    with mock.patch.object(Engine, "backward", backward):
        on_one(runs / "run.yaml", AMPLIFIED, fault)
    one, broken = (runs / "runs" / f"{AMPLIFIED}-{name}" for name in ("one", fault))
    with pytest.raises(AssertionError, match="grad_norm"):
        same_numbers(one, broken, tolerances)
    assert 0 < max(tolerances.values()) < 1e-3


@slow
def test_zero_with_slow_rewards_or_a_process_of_dead_groups_does_not_hang(zero_runs: Path) -> None:
    same_numbers(zero_runs / "runs" / "flux_grpo-one", zero_runs / "runs" / "slow-zero3")
    for zero in ZERO:
        for name in ("flat", "flat_nft"):
            dealt_out(zero_runs / "runs" / f"{name}-ddp", zero_runs / "runs" / f"{name}-{zero}")


@slow
def test_what_a_process_holds_under_zero(zero_runs: Path) -> None:
    """Both halve the moments, stage 3 weights and snapshots as well; a piece is padded by a number at most."""
    for zero, share in (("zero2", 1.0), ("zero3", 0.5)):
        for rank in range(2):
            found = held(zero_runs / "runs" / f"flux_nft-{zero}", rank)
            whole = found["trained"]
            assert found["moments"] == pytest.approx(whole, rel=0.02)
            assert found["snapshots"].keys() == {"ema", "old", "reference"}
            for size in (found["weights"], *found["snapshots"].values()):
                assert size == pytest.approx(share * whole, rel=0.02)


@slow
def test_every_process_holds_a_half(runs: Path) -> None:
    halves(runs, "flux_nft")
    replicated = held(runs / "runs" / "flux_nft-ddp", 0)
    assert replicated["weights"] == replicated["trained"]


@slow
@pytest.mark.parametrize("name", ONLY_SHARDED)
def test_slow_rewards_and_whole_gradients_change_nothing(runs: Path, name: str) -> None:
    same_numbers(runs / "runs" / "flux_grpo-one", runs / "runs" / name)
    same_weights(runs / "runs" / "flux_grpo-one", runs / "runs" / name)


def dealt_out(ddp: Path, sharded: Path) -> None:
    """Both groups of the first process are flat; the four rows left are dealt out, two each."""
    same_numbers(ddp, sharded)
    first, second = (held(sharded, rank)["backwards"] for rank in range(2))
    assert first == second == held(ddp, 0)["backwards"]
    assert [r["rows"] for r in records(sharded) if r["kind"] == "train"] == [4.0, 4.0]  # of eight, in each of two steps


@slow
@pytest.mark.parametrize("name", ["flat", "flat_nft"])
def test_a_process_with_dead_groups_alone_does_not_hang(runs: Path, name: str) -> None:
    dealt_out(runs / "runs" / f"{name}-ddp", runs / "runs" / f"{name}-fsdp2")
    # two rows in each of two steps; both trained steps, or noised copies, of a row have a forward of their own
    assert [held(runs / "runs" / f"{name}-fsdp2", rank)["backwards"] for rank in range(2)] == [8, 8]


@slow
def test_weights_that_are_gathered_in_bf16_train_as_whole_ones_under_autocast(runs: Path) -> None:
    """Not with the same roundings."""
    for a, b in zip(records(runs / "runs" / "bf16-ddp"), records(runs / "runs" / "bf16-fsdp2"), strict=True):
        if a["kind"] == "train":
            assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=0.02)
            assert b["loss"] == pytest.approx(a["loss"], rel=0.01)


@slow
@pytest.mark.parametrize("sharding", ["none", "fsdp2", *ZERO])
def test_two_one_two_processes_resume_as_if_nothing_had_happened(
    runs: Path, sharding: str, request: pytest.FixtureRequest
) -> None:
    """An epoch each: shared by two, on one, shared by two; against one process throughout."""
    if sharding in ZERO:
        request.getfixturevalue("zero_runs")
    run, resumed = runs / "run.yaml", f"resumed-{sharding}"
    name = (f"name={resumed}", "resume=auto")
    on_one = retouch("train", run, *name, "training.max_steps=4", *ONE)
    assert on_one.code == 0, on_one.err
    again = on_two([[[], "train", str(run), *name, "training.max_steps=6", f"training.sharding={sharding}"]])
    assert again.returncode == 0, again.stderr[-4000:]
    whole = retouch("train", run, f"name=whole-{sharding}", "training.max_steps=6", *ONE)
    assert whole.code == 0, whole.err
    folders = [runs / "runs" / folder for folder in (f"whole-{sharding}", resumed)]
    a, b = ([r for r in records(folder) if r["kind"] == "train"] for folder in folders)
    assert [r["step"] for r in b] == [1, 2, 3, 4, 5, 6]
    for mine, theirs in zip(a, b, strict=True):
        for metric in ("loss", "grad_norm", "kl", "error"):
            assert theirs.get(metric, 0.0) == pytest.approx(mine.get(metric, 0.0), rel=0, abs=1e-5), metric
    same_weights(*folders, "step-000006")


@slow
def test_a_checkpoint_of_sharded_weights_is_a_diffusers_folder(runs: Path) -> None:
    config = json.loads(
        (runs / "runs" / "flux_grpo-fsdp2" / "checkpoints" / "step-000002" / "weights" / "config.json").read_text()
    )
    assert config["_class_name"] == "FluxTransformer2DModel"


@slow
@pytest.mark.parametrize("sharding", ["fsdp2", "zero3"])
def test_a_process_that_fails_stops_the_other_that_shares_its_weights(
    signs: Path, tmp_path: Path, sharding: str
) -> None:
    if sharding in ZERO and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    run = write_run(signs, tmp_path)
    done = on_two([[["raise"], "train", str(run), "name=t", f"training.sharding={sharding}"]], timeout=600)
    stopped(done, tmp_path / "runs" / "t")
