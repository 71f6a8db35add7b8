"""One optimizer step: its micro-batches, its gradient, its update; again in smaller forwards if memory runs out."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from retouch.config.derived import forward_precision, parts_per_forward
from retouch.engine import Diverged, OutOfMemory
from retouch.errors import first_line, fitting
from retouch.observe import Metrics
from retouch.training.stopping import continuing

if TYPE_CHECKING:
    from retouch.config import RunConfig
    from retouch.config.run import OptimizerConfig
    from retouch.data.dataset import Dataset
    from retouch.engine import Engine
    from retouch.training.build import Run

logger = logging.getLogger(__name__)

T = TypeVar("T")

ON_POLICY_TOLERANCE = {"fp32": 1e-5, "bf16": 5e-3, "fp16": 1e-3}
"""Largest |log ratio| before the first update of an epoch without a warning, by precision of the forward: what rounding
explains where forwards of sampling and of training have about as many rows."""

_SMALLER_MOMENTS = "optimizer.state=8bit or model.train.kind=lora, or training.sharding on several devices"


class ForwardSize:
    """How many rows a forward of training has; halved when memory runs out.

    Attributes:
        rows: of each forward.
        parts_per_forward: trained steps, or noised copies, of a row in each; stays when `rows` is halved.
    """

    def __init__(self, config: RunConfig, engine: Engine) -> None:
        self.rows = config.optimizer.batch_size_per_device
        self.parts_per_forward = parts_per_forward(config, engine.device.type)
        self._config, self._engine = config, engine

    def halve(self, problem: str) -> None:
        """Half the rows from now on, and no gradient of the forwards so far.

        Args:
            problem: the first line of the error; the error holds frames, and they tensors.

        Raises:
            OutOfMemory: there is only one, or other processes would wait for this one's gradients.
        """
        optimizer, rows = self._config.optimizer, self.rows
        if rows == 1:
            raise OutOfMemory(
                f"out of memory with one row in a forward ({problem}); set training.gradient_checkpointing=true, "
                "optimizer.steps_per_forward=1 (grpo, ppo, nft, dpo, kto), or a smaller data.resolution"
            )
        if self._engine.world_size > 1 or optimizer.on_out_of_memory == "stop":
            total = optimizer.rows_per_device(self._engine.world_size)
            fewer = next(size for size in range(rows // 2, 0, -1) if total % size == 0)
            also = "" if optimizer.global_batch_size else f" and gradient_accumulation={total // fewer}"
            also += self._as_many_steps(fewer)
            raise OutOfMemory(
                f"out of memory with {rows} rows in a forward ({problem}); set optimizer.batch_size_per_device={fewer}"
                f"{also}, which gives the same gradients"
            )
        self.rows = rows // 2
        logger.warning(
            "out of memory with %d rows in a forward (%s): the step begins again with %d, the same gradients up to "
            "rounding; optimizer.batch_size_per_device=%d%s from the start avoids this",
            rows,
            problem,
            self.rows,
            self.rows,
            self._as_many_steps(self.rows),
        )
        self._engine.drop_gradients()

    def until_it_fits(self, forwards: Callable[[], T]) -> T:
        """The result of some forwards without gradients, which begin again with half the rows if memory runs out.

        Raises:
            OutOfMemory: halving cannot help.
        """
        while True:
            try:
                return forwards()
            except torch.OutOfMemoryError as error:
                problem = first_line(error)
            self.halve(problem)

    def chunks(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Some rows by forwards."""
        return rows.split(self.rows) if len(rows) else ()

    def parts(
        self, rows: Tensor, count: int, inputs: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
    ) -> list[tuple[Tensor, range]]:
        """Some rows by forwards, with a span of the trained steps, or noised copies, of each row. As many on every
        process.

        Args:
            count: of these of a row; `optimizer.steps_per_forward` of them are in a forward.
            inputs: `Experience.first_inputs`; None: each row has its own. Where the rollout shares first steps, rows of
                one input take one row of the network: their first step has forwards of its own.
        """
        first: list[Tensor] = []
        if inputs is not None and self._config.rollout.shares_first_step:
            first = self._parts_by_input(rows, inputs(rows)[1])
        starts, size = range(len(first) > 0, count, self.parts_per_forward), self.parts_per_forward
        rest = [(chunk, range(count)[i : i + size]) for chunk in self.chunks(rows) for i in starts]
        return [(chunk, range(1)) for chunk in first] + rest

    def _parts_by_input(self, rows: Tensor, inputs: Tensor) -> list[Tensor]:
        """Some rows, each with the number of its input, by forwards of as many inputs as other forwards have rows of
        the network; none if the rows are more than half of them inputs, on any process: forwards of fewer rows are
        slower."""
        own = len(inputs.unique())
        most = int(self._engine.gather(torch.tensor([own], dtype=torch.int64)).max())
        if 2 * most > len(rows):
            return []
        size = self.rows * self.parts_per_forward
        chunks = [rows[(inputs >= i) & (inputs < i + size)] for i in range(0, own, size)]
        while len(chunks) * size < most:  # sharded weights are gathered in every forward, on every process
            longest = max(range(len(chunks)), key=lambda number: len(chunks[number]))
            chunks[longest : longest + 1] = chunks[longest].tensor_split(2)
        return chunks

    def _as_many_steps(self, rows: int) -> str:
        """The setting that keeps the steps in a forward, where `steps_per_forward: auto` would take more for fewer
        rows."""
        config, device = self._config, self._engine.device.type
        smaller = config.optimizer.model_copy(update={"batch_size_per_device": rows})
        more = parts_per_forward(config.model_copy(update={"optimizer": smaller}), device) != self.parts_per_forward
        return f" and optimizer.steps_per_forward={self.parts_per_forward}" if more else ""


class Step(AbstractContextManager["Step", bool]):
    """One optimizer step on rows that this process holds: a context manager around its forwards and backwards, which
    updates the weights when it is left. If no row of any process counts, it has no forwards and updates nothing.

    One that runs out of memory is not taken, and its iterator yields it again, with half the rows in a forward. Its
    gradient is then, bit for bit, that of a run file with so few rows and as many steps of each in a forward.

    Attributes:
        rows: [n] indices of the rows.
        normalizer: number of rows of all processes that count in the loss: the divisor of every loss of the step.
        data: dataset of the examples.
        positions: of each row's example in it; none of a step without forwards.
        seeds: of each row's noise or image.
        before_first_update: the weights are still those that sampled the rows.
        values: metrics, once the step is taken.
        updated: whether it changed the weights.
    """

    def __init__(
        self,
        run: Run,
        size: ForwardSize,
        rows: Tensor,
        normalizer: Tensor,
        lr: float,
        *,
        data: Dataset,
        positions: list[int],
        seeds: list[int],
        supervised: bool = False,
        before_first_update: bool = False,
        ends_epoch: bool = False,
        log_ratio: float = 0.0,
    ) -> None:
        """Args:
        supervised: it is no step of RL, whose metrics count rows.
        ends_epoch: it is the last one on the rows of its epoch.
        log_ratio: largest |log ratio| of what the sampler recorded, where the record was replaced.
        """
        self._count = float(normalizer)  # read once: the CPU waits for the device
        skipped = self._count == 0
        self.rows = rows[:0] if skipped else rows
        self.normalizer = normalizer.to(run.engine.device)
        self.data, self.positions, self.seeds = data, [] if skipped else positions, seeds
        self.before_first_update = before_first_update
        self.values: dict[str, float] = {"skipped": 1.0}
        self.updated = False
        self._run, self._size, self._lr = run, size, lr
        self._supervised, self._ends_epoch, self._log_ratio = supervised, ends_epoch, log_ratio
        self._forward = ExitStack()
        self._problem = ""
        self._rows: Any = self.rows  # of the forward under way
        self._metrics, self._losses = Metrics(), list[tuple[Tensor, Tensor]]()

    @property
    def ends_epoch(self) -> bool:
        """Whether it is the last step on the rows of its epoch, and not to be taken again."""
        return self._ends_epoch and not self._problem

    def until_it_fits(self) -> Iterator[Step]:
        """The step, and again with half the rows in a forward as long as memory runs out.

        Raises:
            OutOfMemory: halving cannot help.
        """
        yield self
        while self._problem:
            self._size.halve(self._problem)
            self._problem = ""
            self._metrics, self._losses = Metrics(), []
            yield self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        """Update the weights.

        Raises:
            Diverged: the gradient contains NaN or Inf; it names the first forward whose loss does.
        """
        self._forward.close()
        if isinstance(error, torch.OutOfMemoryError):
            self._problem = first_line(error)
            return True
        if error is None and self._count != 0:
            self._update()
        return False

    def forwards(self, batches: Sequence[Any] | None = None) -> Iterator[Any]:
        """Each micro-batch, for one forward and one `backward`: these, or the rows of the step by forwards. One is a
        tensor of rows, or a tuple that begins with it.

        Gradients are exchanged between processes in the last one only.
        """
        engine, batches = self._run.engine, self._size.chunks(self.rows) if batches is None else batches
        for number, batch in enumerate(batches):
            with engine.micro_step(last=number == len(batches) - 1):
                self._forward.enter_context(self._run.clock.part("train_forward"))
                self._rows = batch
                while isinstance(self._rows, tuple):
                    self._rows = cast("tuple[Any, ...]", self._rows)[0]
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
        with self._run.clock.part("train_backward"):
            self._run.engine.backward(loss)
        self._losses.append((loss.detach(), self._rows))
        self._metrics.add({**values, "loss": loss}, weight=rows)

    def old_policy_values(self, now: Tensor, recorded: Tensor) -> Tensor:
        """Log-probabilities or means of the rows under the policy that sampled them.

        Those are `now` until the first update: the record then differs only by rounding, which under bf16 is many times
        the clip range and would clip at random.
        """
        return now.detach() if self.before_first_update else recorded

    def log_ratio_metric(self, now: Tensor, recorded: Tensor, weight: Tensor) -> dict[str, Tensor]:
        """The metric `max_abs_log_ratio` against the record [B, W], for rows with a weight [B]; empty after the first
        update."""
        if not self.before_first_update:
            return {}
        off = (now.detach() - recorded).abs().amax(1)
        return {"max_abs_log_ratio": torch.where(weight > 0, off, 0.0).max()}

    def _update(self) -> None:
        run = self._run
        with run.clock.part("optimizer"):
            try:
                with fitting("in the optimizer", _SMALLER_MOMENTS):  # they are allocated in the first step
                    stepped = run.engine.step(self._lr)
            except Diverged as error:
                where = self._first_nonfinite_loss(self._losses)
                raise Diverged(f"{error}{where}; {continuing(run.dir.path)}") from None
        self.values = {**self._metrics.reduce(run.engine), **stepped, "lr": self._lr}
        self.updated = not stepped["overflow"]
        if self.before_first_update and "max_abs_log_ratio" in self.values:
            self._compare_with_record()
        if not self._supervised:
            self.values |= {"rows": self._count, "skipped": 0.0}

    def _first_nonfinite_loss(self, losses: Sequence[tuple[Tensor, Tensor]]) -> str:
        """The first forward of all processes with a loss of NaN or Inf, with the ids of its examples. A collective.

        Args:
            losses: of each forward, with its rows.
        """
        found, positions = "", dict(zip(self.rows.tolist(), self.positions, strict=True))
        for number, (loss, rows) in enumerate(losses):
            if not loss.isfinite():
                ids = [str(self.data.items[positions[row]].id) for row in rows.tolist()]
                found = f"; the loss of forward {number + 1} is {loss:g}, of examples {', '.join(ids)}"
                break
        return next(filter(None, self._run.engine.gather_list([found])), "")

    def _compare_with_record(self) -> None:
        """Log that the policy of training is not that of sampling, if it is not."""
        off = max(self.values["max_abs_log_ratio"], self._log_ratio)
        self.values["max_abs_log_ratio"] = off
        tolerance = ON_POLICY_TOLERANCE[forward_precision(self._run.config)]
        if self.updated and off > tolerance:
            logger.warning(
                "off policy before the first update: max |log ratio| is %.2e, above %.0e. If forwards of sampling and "
                "of training have different numbers of rows, bf16 explains it, above all with guidance: set "
                "algorithm.old_log_probs=recomputed. If not, rollout and training do not compute the same policy",
                off,
                tolerance,
            )


def learning_rate(optimizer: OptimizerConfig, base: float, step: int, steps: int) -> float:
    """Learning rate of step `step` (from 0) of a phase of `steps`: warm-up, then constant or decay to 0."""
    ramp = min(1.0, (step + 1) / optimizer.ramp_steps) if optimizer.ramp_steps else 1.0
    share = step / max(1, steps)
    decay = {"constant": 1.0, "linear": 1 - share, "cosine": 0.5 * (1 + math.cos(math.pi * share))}
    return base * ramp * decay[optimizer.schedule]
