"""How training goes, in the log, where no progress bar shows it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)


class StepLog:
    """A line of the first step, and then at most one in `every_s`, from the records of a run.

    Attributes:
        wanted: False where a bar shows it.
    """

    def __init__(self, steps: int, every_s: float = 60.0) -> None:
        self.wanted = True
        self._steps, self._every_s = steps, every_s
        self._told: float | None = None
        self._reward: float | None = None
        self._seconds: list[float] = []

    def see(self, record: Mapping[str, Any]) -> None:
        """One more record, of whatever kind."""
        if record["kind"] == "rollout":
            self._reward = record.get("combined_score")
        if record["kind"] != "train" or "time" not in record or not self.wanted:
            return
        self._seconds.append(record["time"]["step"])
        now = time.monotonic()
        if self._told is not None and now - self._told < self._every_s:
            return
        loss, reward = record.get("loss"), record.get("reward", self._reward)
        no_loss = "nothing to train on" if record.get("skipped") else "loss not finite"
        said = [no_loss if loss is None else f"loss {loss:.4g}"]
        said += [f"mean reward {reward:.4g}"] if reward is not None else []
        seconds = sum(self._seconds) / len(self._seconds)
        logger.info("step %d of %d: %s, %.3g s a step", record["step"], self._steps, ", ".join(said), seconds)
        self._told, self._seconds = now, []
