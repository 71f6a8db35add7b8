"""Metrics with declared reductions.

Losses return tensors, which are collected without a device sync and reduced once per optimizer step over micro-batches
and ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from retouch.engine import Engine

Reduction = Literal["mean", "sum", "max"]

REDUCTIONS: dict[str, Reduction] = {
    "loss": "sum",  # each micro-batch is already divided by the normalizer of the step
    "error": "mean",
    "ratio": "mean",
    "clip_fraction": "mean",
    "approx_kl": "mean",
    "kl": "mean",
    "max_abs_log_ratio": "max",
    "logit": "mean",
    "preference_accuracy": "mean",
    "label_accuracy": "mean",
    "label_margin": "mean",
    "win_error_change": "mean",
    "lose_error_change": "mean",
    "positive_error": "mean",
    "negative_error": "mean",
    "old_velocity_distance": "mean",
    "positive_share": "mean",
    "gradient_rms": "mean",
}


class Metrics:
    """Metrics of one optimizer step. Means are weighted by the number of samples that counted."""

    def __init__(self) -> None:
        self._values: dict[str, list[tuple[Tensor, Tensor | float]]] = defaultdict(list)

    def add(self, values: Mapping[str, Tensor], weight: Tensor | float) -> None:
        """Collect the metrics of a micro-batch of `weight` samples.

        Raises:
            KeyError: a metric whose reduction is not declared.
        """
        for name, value in values.items():
            if name not in REDUCTIONS:
                raise KeyError(
                    f"metric {name!r} has no declared reduction; set retouch.observe.metrics.REDUCTIONS[{name!r}] to "
                    "'mean', 'sum' or 'max'"
                )
            self._values[name].append((value.detach().float(), weight))

    def reduce(self, engine: Engine) -> dict[str, float]:
        """Reduce each metric over micro-batches and ranks to a number; resets. Every rank needs the same names."""
        import torch

        result: dict[str, float] = {}
        for name, pairs in self._values.items():
            values = torch.stack([value for value, _ in pairs])
            # a tensor that is made of a number would be copied to the device
            weights = torch.stack(
                [w.to(values) if isinstance(w, torch.Tensor) else torch.full_like(values[0], w) for _, w in pairs]
            )
            kind = REDUCTIONS[name]
            if kind == "max":
                result[name] = float(engine.gather(values.max()[None]).max())
            elif kind == "sum":
                result[name] = float(engine.sum(values.sum()))
            else:
                total = engine.sum(torch.stack([(values * weights).sum(), weights.sum()]))
                result[name] = float(total[0] / total[1]) if float(total[1]) > 0 else 0.0
        self._values.clear()
        return result
