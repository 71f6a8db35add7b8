"""Where the time of a step goes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

PARTS = (
    "rollout",
    "text",
    "vae",
    "reward_wait",
    "train_forward",
    "train_backward",
    "optimizer",
    "eval",
    "checkpoint",
    "other",
)
"""Every name a run may charge time to."""


class Stopwatch:
    """Charges wall time to named parts; an inner part is not counted in the outer one, and "other" is the rest, so
    that the parts of a step sum to the step exactly."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = defaultdict(float)
        self._stack: list[str] = []
        self._mark = self._start = time.perf_counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Charge the block to `name`."""
        if name not in PARTS:
            raise ValueError(f"no part {name!r}; there are: {', '.join(PARTS)}")
        self._charge()
        self._stack.append(name)
        try:
            yield
        finally:
            self._charge()
            self._stack.pop()

    def split(self) -> dict[str, float]:
        """Seconds by part since the last split, with their sum as "step"; starts anew."""
        self._charge()
        total = self._mark - self._start
        parts = {name: self._spent.get(name, 0.0) for name in PARTS}
        self._spent.clear()
        self._start = self._mark
        return {**parts, "step": total}

    def _charge(self) -> None:
        now = time.perf_counter()
        self._spent[self._stack[-1] if self._stack else "other"] += now - self._mark
        self._mark = now
