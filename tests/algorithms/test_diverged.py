"""A step whose gradient contains NaN or Inf ends the run before its weights change, and names the examples."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from retouch.observe.run_dir import read_metrics
from retouch.training.step import Step
from tests.command_line import retouch
from tests.selection import default

pytestmark = pytest.mark.usefixtures("shallow")

RUNS: dict[str, dict[str, Any]] = {
    "sft": {"algorithm": {"name": "sft"}, "model__train": {"kind": "lora", "rank": 4}},
    "grpo": {"algorithm__inner_epochs": 3, "algorithm__kl_weight": 0.1, "ema": {"decay": 0.9, "update_interval": 1}},
    "reward_gradient": {
        "algorithm": {"name": "reward_gradient", "kl_weight": 0.1},
        "rewards": {"seam": {}},
        "rollout__window": None,
        "rollout__noise_level": None,
    },
    "nft": {"algorithm": {"name": "nft", "inner_epochs": 3}, "rollout__window": None, "rollout__noise_level": None},
    "dpo": {"algorithm": {"name": "dpo", "inner_epochs": 3}, "rollout__window": None, "rollout__noise_level": None},
}
"""Runs whose first step makes weights so large that the forward of the second overflows."""


@pytest.mark.parametrize("kind", default(RUNS, {"sft", "dpo"}.__contains__))
def test_a_run_ends_with_the_examples_and_its_checkpoint_repeats_the_step(
    kind: str, tmp_path: Path, run_file: Callable[..., dict[str, Any]]
) -> None:
    steps = {"training__max_steps": 4, "training__checkpoint_every": 1}
    run = run_file(**RUNS[kind], name=kind, optimizer__lr=1e30, **steps)
    if kind == "sft":
        run["data"] = run.pop("warmup_data")
        del run["rewards"], run["rollout"]["window"]
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(run), encoding="utf-8")
    ended = retouch("train", file)
    assert ended.code == 1 and "Traceback" not in ended.err, ended.err
    line = ended.err.splitlines()[-1]
    assert line.startswith("error: the gradient norm is nan; lower optimizer.lr")
    assert "; the loss of forward " in line and " is nan, of examples " in line
    where = tmp_path / "runs" / kind
    assert line.endswith(f"; continue with retouch train {where}/config.yaml resume=auto")
    assert [folder.name for folder in sorted((where / "checkpoints").iterdir())] == ["step-000001"]
    assert retouch("train", file, "resume=auto").err.splitlines()[-1] == line
    records = read_metrics(where / "metrics.jsonl")
    assert [r["step"] for r in records if r["kind"] == "train"] == [1]
    assert records[-1]["event"] == "diverged" and f"error: {records[-1]['reason']}" == line


def step_of(positions: list[int], rows_per_forward: int, elsewhere: list[str]) -> Step:
    """A step on examples with ids 100 more than their positions; `elsewhere` is what other processes found."""
    engine = SimpleNamespace(device="cpu", gather_list=lambda found: [*elsewhere, *found])
    run: Any = SimpleNamespace(engine=engine)
    size: Any = SimpleNamespace(rows=rows_per_forward)
    data: Any = SimpleNamespace(items=[SimpleNamespace(id=100 + position) for position in range(9)])
    rows = torch.arange(len(positions))
    return Step(run, size, rows, torch.tensor(1.0), 0.1, data=data, positions=positions, seeds=positions)


@pytest.mark.parametrize(
    ("losses", "elsewhere", "told"),
    [
        ([0.5, 0.25, 1.0], [], ""),
        ([0.5, float("nan"), float("inf")], [], "; the loss of forward 2 is nan, of examples 105, 106"),
        ([0.5, 1.0, float("-inf")], [], "; the loss of forward 3 is -inf, of examples 108"),
        ([0.5, 0.25, 1.0], ["", "; of another"], "; of another"),
        ([], [], ""),
    ],
)
def test_the_first_nonfinite_loss_forward_of_all_processes(
    losses: list[float], elsewhere: list[str], told: str
) -> None:
    step = step_of([3, 4, 5, 6, 8], 2, elsewhere)
    pairs = zip(losses, step.rows.split(2), strict=False)
    assert step._first_nonfinite_loss([(torch.tensor(loss), rows) for loss, rows in pairs]) == told


def test_a_forward_is_that_of_the_rows_that_its_batch_begins_with() -> None:
    """Whatever else a recipe puts into a batch, and in whatever order its rows are."""
    step = step_of([3, 4, 5, 6, 8], 2, [])
    rows = torch.tensor([4, 1])
    for batch in (rows, (rows, range(1)), ((rows, range(1)), None)):
        step._losses.clear()
        step._run.engine.micro_step = lambda last: nullcontext()  # type: ignore[method-assign]
        step._run.engine.backward = lambda loss: None  # type: ignore[method-assign]
        step._run.clock = SimpleNamespace(part=lambda name: nullcontext())  # type: ignore[assignment]
        for _ in step.forwards([batch]):
            step.backward(torch.tensor(float("inf"), requires_grad=True), {}, 2)
        assert step._first_nonfinite_loss(step._losses) == "; the loss of forward 1 is inf, of examples 108, 104"
