"""One optimizer step: its micro-batches, its gradient, and a second attempt with smaller ones when memory runs out."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from retouch.config.derived import forward_precision, parts_per_forward
from retouch.data.sampler import batch_examples
from retouch.engine import Diverged, OutOfMemory
from retouch.errors import first_line, fitting
from retouch.observe import Metrics

if TYPE_CHECKING:
    from retouch.config.run import OptimizerConfig
    from retouch.data.dataset import Dataset
    from retouch.training.session import Session

logger = logging.getLogger(__name__)

ON_POLICY_TOLERANCE = {"fp32": 1e-5, "bf16": 5e-3, "fp16": 1e-3}
"""Largest |log ratio| before the first update of an epoch without a warning, by precision of the forward: what rounding
explains where forwards of sampling and of training have about as many rows."""

_SMALLER_MOMENTS = "optimizer.state=8bit or model.train.kind=lora, or training.sharding on several devices"


class Step:
    """One optimizer step on rows that this process holds.

    Attributes:
        rows: [n] indices of the rows.
        total: sum of the rows' weights over all processes, which normalizes every loss of the step.
        data: dataset of the examples.
        positions: of each row's example in it.
        seeds: of each row's noise or image.
        fresh: the weights are still those that sampled the rows.
        ends_epoch: it is the last step on these rows.
        values: metrics, once the step is taken.
        updated: whether it changed the weights.
    """

    def __init__(
        self,
        session: Session,
        rows: Tensor,
        total: Tensor,
        lr: float,
        *,
        data: Dataset,
        positions: list[int],
        seeds: list[int],
        fresh: bool = False,
        ends_epoch: bool = False,
    ) -> None:
        self.session = session
        self.rows = rows
        self.total = total
        self.data, self.positions, self.seeds = data, positions, seeds
        self.fresh = fresh
        self.ends_epoch = ends_epoch
        self.values: dict[str, float] = {"skipped": 1.0}
        self.updated = False
        self._lr = lr

    def attempts(self) -> Iterator[Attempt]:
        """Attempts at forwards and backwards of all rows; the update follows the one that fits in memory. None if no
        row of any process has a weight: the step is then skipped.

        An attempt after another one starts from no gradient, with half the rows in a forward. Its gradient is, bit for
        bit, that of a run file with so few rows and as many steps of each in a forward.

        Raises:
            OutOfMemory: halving cannot help.
            Diverged: the gradient contains NaN or Inf; it names the first forward whose loss does.
        """
        if float(self.total) == 0:
            return
        session, run, attempt = self.session, self.session.run, None
        for attempt in attempts(session, self.rows):
            yield attempt
        assert attempt is not None
        with run.clock.part("optimizer"):
            try:
                with fitting("in the optimizer", _SMALLER_MOMENTS):  # they are allocated in the first step
                    stepped = run.engine.step(self._lr)
            except Diverged as error:
                raise Diverged(f"{error}{self._first_nonfinite_loss(attempt.losses)}") from None
        self.values = {**attempt.metrics.reduce(run.engine), **stepped, "lr": self._lr}
        self.updated = not stepped["overflow"]
        if self.fresh and "max_abs_log_ratio" in self.values:
            self._compare_with_record()
        if session.progress.phase == "rl":
            self.values |= {"rows": float(self.total), "skipped": 0.0}

    def old(self, now: Tensor, recorded: Tensor) -> Tensor:
        """Log-probabilities or means of the rows under the policy that sampled them.

        That is `now` until the first update: the record then differs only by rounding, which under bf16 is many times
        the clip range and would clip at random.
        """
        return now.detach() if self.fresh else recorded

    def off_policy(self, now: Tensor, recorded: Tensor, weight: Tensor) -> dict[str, Tensor]:
        """The metric `max_abs_log_ratio` against the record [B, W], for rows with a weight [B]; empty unless fresh."""
        if not self.fresh:
            return {}
        off = (now.detach() - recorded).abs().amax(1)
        return {"max_abs_log_ratio": torch.where(weight > 0, off, 0.0).max()}

    def _first_nonfinite_loss(self, losses: Sequence[Tensor]) -> str:
        """The first forward of all processes with a loss of NaN or Inf, with the ids of its examples. A collective."""
        found = ""
        for number, loss in enumerate(losses):
            if not loss.isfinite():
                rows = self.session.rows_per_forward  # forwards of the same rows, such as spans of steps, are in turn
                start = number * -(-len(self.positions) // rows) // len(losses) * rows
                ids = [str(self.data.items[position].id) for position in self.positions[start : start + rows]]
                found = f"; the loss of forward {number + 1} is {loss:g}, of examples {', '.join(ids)}"
                break
        return next(filter(None, self.session.run.engine.gather_list([found])), "")

    def _compare_with_record(self) -> None:
        """Log that the policy of training is not that of sampling, if it is not."""
        off = max(self.values["max_abs_log_ratio"], self.session.off_policy)
        self.values["max_abs_log_ratio"] = off
        tolerance = ON_POLICY_TOLERANCE[forward_precision(self.session.config)]
        if self.updated and off > tolerance:
            logger.warning(
                "off policy before the first update: max |log ratio| is %.2e, above %.0e. If forwards of sampling and "
                "of training have different numbers of rows, bf16 explains it, above all with guidance: set "
                "algorithm.old_log_probs=recomputed. If not, rollout and training do not compute the same policy",
                off,
                tolerance,
            )


class Attempt:
    """One attempt at all forwards of some rows; a context manager that notes when memory runs out.

    Attributes:
        metrics: of the micro-batches so far.
        problem: first line of the error; None while everything fits.
        losses: of the micro-batches so far, without their graphs.
    """

    def __init__(self, session: Session, rows: Tensor | None = None) -> None:
        self.metrics = Metrics()
        self.problem: str | None = None
        self.losses: list[Tensor] = []
        self._session = session
        self._rows = torch.arange(0, dtype=torch.int64) if rows is None else rows
        self._forward = ExitStack()

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        self._forward.close()
        if not isinstance(error, torch.OutOfMemoryError):
            return False
        self.problem = first_line(error)
        return True

    def chunks(self, rows: Tensor | None = None) -> tuple[Tensor, ...]:
        """The rows of each forward: of the step, or of the given ones."""
        rows = self._rows if rows is None else rows
        return rows.split(self._session.rows_per_forward) if len(rows) else ()

    def micro_batches(self, batches: Sequence[Any] | None = None) -> Iterator[Any]:
        """Each micro-batch of an optimizer step, for one forward and one `backward`: these, or `chunks`.

        Gradients are exchanged between processes in the last one only.
        """
        run, batches = self._session.run, self.chunks() if batches is None else batches
        for number, batch in enumerate(batches):
            with run.engine.micro_step(last=number == len(batches) - 1):
                self._forward.enter_context(run.clock.part("train_forward"))
                yield batch

    def backward(self, loss: Tensor, values: Mapping[str, Tensor], rows: Tensor | float) -> None:
        """Add the gradient of a micro-batch.

        Args:
            loss: its share of the step's loss; the normalizer counts all processes and micro-batches.
            values: metrics, means over `rows` rows.

        Raises:
            ValueError: the loss is no scalar, or has no gradient.
        """
        if loss.ndim or not loss.requires_grad:
            given = f"shape {tuple(loss.shape)}" if loss.ndim else "a scalar without gradient"
            raise ValueError(f"backward: given a loss of {given}; expected a scalar with a gradient by the weights")
        self._forward.close()
        with self._session.run.clock.part("train_backward"):
            self._session.run.engine.backward(loss)
        self.losses.append(loss.detach())
        self.metrics.add({**values, "loss": loss}, weight=rows)


def attempts(session: Session, rows: Tensor | None = None) -> Iterator[Attempt]:
    """Attempts at forwards of all rows until one fits in memory. Each has half the rows in a forward of the one before,
    and the session keeps that number.

    Args:
        rows: None if the caller gives them to `Attempt.chunks`.

    Raises:
        OutOfMemory: halving cannot help.
    """
    while True:
        attempt = Attempt(session, rows)
        yield attempt
        if attempt.problem is None:
            return
        session.rows_per_forward = _fewer(session, attempt.problem)
        session.run.engine.drop_gradients()


def learning_rate(optimizer: OptimizerConfig, base: float, step: int, steps: int) -> float:
    """Learning rate of step `step` (from 0) of a phase of `steps`: warm-up, then constant or decay to 0."""
    ramp = min(1.0, (step + 1) / optimizer.ramp_steps) if optimizer.ramp_steps else 1.0
    share = step / max(1, steps)
    decay = {"constant": 1.0, "linear": 1 - share, "cosine": 0.5 * (1 + math.cos(math.pi * share))}
    return base * ramp * decay[optimizer.schedule]


def step_positions(session: Session, size: int, until: int) -> list[list[int]]:
    """Positions, in data of `size` examples, of this process's rows of the next step and, if there is one before step
    `until`, of the step after it."""
    optimizer, engine, begun = session.config.optimizer, session.run.engine, session.progress.step
    per_rank = optimizer.rows_per_device(engine.world_size)
    mine = slice(engine.rank * per_rank, (engine.rank + 1) * per_rank)
    steps = range(begun, min(begun + 2, until))
    return [batch_examples(size, per_rank * engine.world_size, session.config.seed, step)[mine] for step in steps]


def _fewer(session: Session, problem: str) -> int:
    """Half the rows of a forward.

    Raises:
        OutOfMemory: there is only one, or other processes would wait for this one's gradients.
    """
    optimizer, rows = session.config.optimizer, session.rows_per_forward
    if rows == 1:
        raise OutOfMemory(
            f"out of memory with one row in a forward ({problem}); set training.gradient_checkpointing=true, "
            "optimizer.steps_per_forward=1 (grpo, ppo, nft, dpo, kto), or a smaller data.resolution"
        )
    if session.run.engine.world_size > 1 or optimizer.on_out_of_memory == "stop":
        total = optimizer.rows_per_device(session.run.engine.world_size)
        fewer = next(size for size in range(rows // 2, 0, -1) if total % size == 0)
        also = "" if optimizer.global_batch_size else f" and gradient_accumulation={total // fewer}"
        also += _as_many_steps(session, fewer)
        raise OutOfMemory(
            f"out of memory with {rows} rows in a forward ({problem}); set optimizer.batch_size_per_device={fewer}"
            f"{also}, which gives the same gradients"
        )
    logger.warning(
        "out of memory with %d rows in a forward (%s): the step begins again with %d, the same gradients up to "
        "rounding; optimizer.batch_size_per_device=%d%s from the start avoids this",
        rows,
        problem,
        rows // 2,
        rows // 2,
        _as_many_steps(session, rows // 2),
    )
    return rows // 2


def _as_many_steps(session: Session, rows: int) -> str:
    """The setting that keeps the steps in a forward, where `steps_per_forward: auto` would take more for fewer rows."""
    config, device = session.config, session.run.engine.device.type
    smaller = config.optimizer.model_copy(update={"batch_size_per_device": rows})
    steps = parts_per_forward(config, device)
    more = parts_per_forward(config.model_copy(update={"optimizer": smaller}), device) != steps
    return f" and optimizer.steps_per_forward={steps}" if more else ""
