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
        """Reduce each metric over micro-batches and ranks to a number; resets. Every rank needs the same names. All of
        them are exchanged and read together: the CPU waits for the device in each read."""
        import torch

        sums: dict[str, list[Tensor]] = {}
        largest: dict[str, Tensor] = {}
        for name, pairs in sorted(self._values.items()):  # ranks may have added them in another order
            values = torch.stack([value for value, _ in pairs]).to(engine.device)
            if REDUCTIONS[name] == "max":
                largest[name] = values.max()
            elif REDUCTIONS[name] == "sum":
                sums[name] = [values.sum()]
            else:
                # a tensor that is made of a number would be copied to the device
                weights = torch.stack(
                    [w.to(values) if isinstance(w, torch.Tensor) else torch.full_like(values[0], w) for _, w in pairs]
                )
                sums[name] = [(values * weights).sum(), weights.sum()]
        result = dict.fromkeys(self._values, 0.0)
        if largest:
            found = engine.gather(torch.stack([*largest.values()])[None]).amax(0).tolist()
            result |= zip(largest, found, strict=True)
        if sums:
            totals = iter(engine.sum(torch.stack([part for parts in sums.values() for part in parts])).cpu())
            for name, parts in sums.items():
                total, *weight = [next(totals) for _ in parts]
                if not weight or weight[0] > 0:
                    result[name] = float(total / weight[0] if weight else total)
        self._values.clear()
        return result
