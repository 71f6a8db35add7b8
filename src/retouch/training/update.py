"""One optimizer step from the losses of its micro-batches; every recipe takes its steps here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from retouch.engine import OutOfMemory
from retouch.observe import Metrics
from retouch.training.session import Session

logger = logging.getLogger(__name__)

MicroLoss = Callable[[], tuple[Tensor, Mapping[str, Tensor], Tensor | float]]
"""One forward -> its share of the step's loss (the normalizer counts all ranks and micro-batches), metrics, and the
rows that these are means of."""

Computed = TypeVar("Computed")

LossesOf = Callable[[int], Sequence[MicroLoss]]
"""Rows of a forward -> the micro-batches of the step. May be asked again, and must then give the same losses."""


def optimizer_step(session: Session, losses_of: LossesOf, lr: float) -> tuple[dict[str, float], bool]:
    """Forward and backward of every micro-batch, then one update -> (metrics, whether the weights changed).

    Begun again with half the rows in a forward where memory runs out, its gradient is, bit for bit, that of a run file
    that asked for so few.

    Raises:
        OutOfMemory: not to be mended so.
    """
    run, engine = session.run, session.run.engine
    metrics = within_memory(session, lambda rows: _accumulated(session, losses_of(rows)))
    with run.clock.part("optimizer"):
        try:
            stepped = engine.step(lr)
        except torch.OutOfMemoryError as error:  # its moments come into being in the first step
            raise OutOfMemory(
                f"out of memory in the optimizer ({str(error).splitlines()[0]}); set optimizer.state=8bit or "
                "model.train.kind=lora, or training.sharding on several devices"
            ) from error
    return {**metrics.reduce(engine), **stepped, "lr": lr}, not stepped["overflow"]


def within_memory(session: Session, compute: Callable[[int], Computed]) -> Computed:
    """What comes of so many rows in a forward. Where the device is out of memory, what was accumulated is dropped and
    it begins again with half, which the session keeps.

    Raises:
        OutOfMemory: not to be mended so.
    """
    problem = ""
    while True:
        try:
            return compute(session.rows_per_forward)
        except torch.OutOfMemoryError as error:
            problem = str(error).splitlines()[0]
        # outside of `except`, whose traceback holds the tensors of the forward
        session.rows_per_forward = _fewer(session, problem)
        session.run.engine.drop_gradients()


def _accumulated(session: Session, losses: Sequence[MicroLoss]) -> Metrics:
    """Gradients of the step, in the weights."""
    run, engine, metrics = session.run, session.run.engine, Metrics()
    for number, loss_of in enumerate(losses):
        with engine.micro_step(last=number == len(losses) - 1):
            with run.clock.part("train_forward"):
                loss, values, rows = loss_of()
            with run.clock.part("train_backward"):
                engine.backward(loss)
        metrics.add({**values, "loss": loss}, weight=rows)
    return metrics


def _fewer(session: Session, problem: str) -> int:
    """Half the rows of a forward.

    Raises:
        OutOfMemory: there is only one, or other processes would wait for this one's gradients.
    """
    optimizer, rows = session.config.optimizer, session.rows_per_forward
    if rows == 1:
        raise OutOfMemory(
            f"out of memory with one row in a forward ({problem}); set training.gradient_checkpointing=true, "
            "optimizer.steps_per_forward=1 (grpo, ppo), or a smaller data.resolution"
        )
    if session.run.engine.world_size > 1 or optimizer.on_out_of_memory == "stop":
        total = optimizer.batch_size_per_device * optimizer.gradient_accumulation
        fewer = next(size for size in range(rows // 2, 0, -1) if total % size == 0)
        raise OutOfMemory(
            f"out of memory with {rows} rows in a forward ({problem}); set optimizer.batch_size_per_device={fewer} "
            f"and gradient_accumulation={total // fewer}, which gives the same gradients"
        )
    logger.warning(
        "out of memory with %d rows in a forward (%s): the step begins again with %d, the same gradients up to "
        "rounding; optimizer.batch_size_per_device=%d from the start saves this",
        rows,
        problem,
        rows // 2,
        rows // 2,
    )
    return rows // 2
