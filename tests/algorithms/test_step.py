"""A step that runs out of memory is yielded again with half the rows, and counts as taken once."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from retouch.engine import OutOfMemory
from retouch.training.step import ForwardSize, Step

from .runs import Config


def stand_in(config: Config, log: list[str], **optimizer: Any) -> Any:
    """A run whose engine notes what it does."""
    engine = SimpleNamespace(
        world_size=1,
        device=torch.device("cpu"),
        micro_step=lambda last: nullcontext(log.append("last" if last else "forward")),
        backward=lambda loss: log.append("backward"),
        step=lambda lr: log.append("step") or {"grad_norm": 1.0, "overflow": 0.0},
        drop_gradients=lambda: log.append("drop"),
        sum=lambda value: value,
        gather=lambda value: value,
    )
    run_file = config(optimizer__batch_size_per_device=4, optimizer__gradient_accumulation=1, **optimizer)
    return SimpleNamespace(engine=engine, clock=SimpleNamespace(part=lambda _: nullcontext()), config=run_file)


def tried(run: Any, fits: int, rows: int = 4, normalizer: float = 4.0) -> list[tuple[list[int], bool, bool]]:
    """(Rows of its forwards, whether it ends the epoch, whether it updated the weights) of each time that the step is
    yielded, in memory for `fits` rows."""
    size, weight = ForwardSize(run.config, run.engine), torch.ones((), requires_grad=True)
    data: Any = SimpleNamespace(items=[])
    given = list(range(rows))
    step = Step(
        run,
        size,
        torch.arange(rows),
        torch.tensor(normalizer),
        0.1,
        data=data,
        positions=given,
        seeds=given,
        ends_epoch=True,
    )
    found: list[tuple[list[int], bool, bool]] = []
    for again in step.until_it_fits():
        sizes: list[int] = []
        with again:
            for chunk in again.forwards():
                sizes.append(len(chunk))
                if len(chunk) > fits:
                    raise torch.OutOfMemoryError("tried to allocate")
                again.backward(weight * len(chunk), {}, len(chunk))
        found.append((sizes, again.ends_epoch, again.updated))
    return found


def test_it_is_yielded_until_its_forwards_fit(config: Config) -> None:
    log: list[str] = []
    found = tried(stand_in(config, log), 1)
    assert found == [([4], False, False), ([2], False, False), ([1, 1, 1, 1], True, True)]
    assert log == ["last", "drop", "forward", "drop", *["forward", "backward"] * 3, "last", "backward", "step"]


def test_metrics_of_forwards_that_were_dropped_do_not_count(config: Config) -> None:
    run = stand_in(config, [])
    size, weight, given = ForwardSize(run.config, run.engine), torch.ones((), requires_grad=True), [0, 1, 2, 3]
    size.rows = 2
    data: Any = SimpleNamespace(items=[])
    step = Step(run, size, torch.arange(4), torch.tensor(4.0), 0.1, data=data, positions=given, seeds=given)
    for again in step.until_it_fits():
        with again:
            for number, chunk in enumerate(again.forwards()):
                if number == 1 and len(chunk) == 2:
                    raise torch.OutOfMemoryError("tried to allocate")
                again.backward(weight * len(chunk) / 4, {}, len(chunk))
    assert step.values["loss"] == 1.0


def test_one_that_fits_is_yielded_once(config: Config) -> None:
    log: list[str] = []
    assert tried(stand_in(config, log), 4) == [([4], True, True)]
    assert log == ["last", "backward", "step"]


def test_one_without_rows_that_count_has_no_forward_and_no_update(config: Config) -> None:
    log: list[str] = []
    assert tried(stand_in(config, log), 4, normalizer=0.0) == [([], True, False)]
    assert log == []


def test_one_row_that_does_not_fit_ends_the_run(config: Config) -> None:
    with pytest.raises(OutOfMemory, match="out of memory with one row in a forward"):
        tried(stand_in(config, []), 0)
