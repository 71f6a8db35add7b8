"""Log lines of training and of evaluations."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)


class StepLog:
    """Logs the first step, and then at most one line every `every_s` seconds.

    Args:
        in_bar: a progress bar shows the same on the terminal, whose handler filters records with `in_bar`.
    """

    def __init__(self, steps: int, every_s: float = 60.0, *, in_bar: bool = False) -> None:
        self._steps, self._every_s, self._in_bar = steps, every_s, in_bar
        self._told: float | None = None
        self._reward: float | None = None
        self._seconds: list[float] = []

    def see(self, record: Mapping[str, Any]) -> None:
        """Add a record of any kind."""
        if record["kind"] == "rollout":
            self._reward = record.get("combined_score")
        if record["kind"] != "train" or "time" not in record:
            return
        self._seconds.append(record["time"]["step"])
        now = time.monotonic()
        if self._told is not None and now - self._told < self._every_s:
            return
        reward = record.get("reward", self._reward)
        loss = loss_text(record) + (f", mean reward {reward:.4g}" if reward is not None else "")
        seconds = sum(self._seconds) / len(self._seconds)
        values = record["step"], self._steps, loss, seconds
        logger.info("step %d of %d: %s, %.3g s a step", *values, extra={"in_bar": self._in_bar})
        self._told, self._seconds = now, []


def loss_text(record: Mapping[str, Any]) -> str:
    """The loss of a training record, or why there is none."""
    loss = record.get("loss")
    if loss is not None:
        return f"loss {loss:.4g}"
    return "skipped (zero reward variance or failed rewards)" if record.get("skipped") else "loss is NaN or Inf"


def means_text(means: Mapping[str, float]) -> str:
    """The means of an evaluation. A detail is left out if its value has another name already: `ocr.ned` beside an equal
    `ocr`, or `preservation.outside_l1` beside an equal `outside_l1`."""

    def repeated(name: str) -> bool:
        reward, _, detail = name.partition(".")
        return bool(detail) and means[name] in (means.get(reward), means.get(detail))

    return ", ".join(f"{name} {value:.3f}" for name, value in means.items() if not repeated(name))
