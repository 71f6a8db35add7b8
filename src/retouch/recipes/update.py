"""One optimizer step from the losses of its micro-batches; every recipe takes its steps here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from retouch.observe import Metrics
from retouch.recipes.session import Session

MicroLoss = Callable[[], tuple[Tensor, Mapping[str, Tensor], Tensor | float]]
"""One forward -> its share of the step's loss (the normalizer counts all ranks and micro-batches), metrics, and the
rows that these are means of."""


def optimizer_step(session: Session, losses: Sequence[MicroLoss], lr: float) -> tuple[dict[str, float], bool]:
    """Forward and backward of every micro-batch, then one update -> (metrics, whether the weights changed)."""
    run, engine, metrics = session.run, session.run.engine, Metrics()
    for number, loss_of in enumerate(losses):
        with engine.micro_step(last=number == len(losses) - 1):
            with run.clock.part("train_forward"):
                loss, values, rows = loss_of()
            with run.clock.part("train_backward"):
                engine.backward(loss)
        metrics.add({**values, "loss": loss}, weight=rows)
    with run.clock.part("optimizer"):
        stepped = engine.step(lr)
    return {**metrics.reduce(engine), **stepped, "lr": lr}, not stepped["overflow"]
