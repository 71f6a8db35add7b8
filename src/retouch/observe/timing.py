"""Wall-clock time of a step by part."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from retouch.observe.measuring import Measurement

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
"""Names of the parts."""


class Stopwatch:
    """Measures the time of named parts. An inner part is not counted in the outer one, and "other" is the rest: the
    parts of a step sum to the step.

    On a GPU the marks between parts are events in the device's queue; only `split` waits for them.

    Args:
        mark: returns a mark of the current time; None: the CPU's clock.
        seconds: returns the time between two marks; may wait for both.
    """

    def __init__(
        self, mark: Callable[[], Any] | None = None, seconds: Callable[[Any, Any], float] | None = None
    ) -> None:
        self._mark_now = mark or (lambda: time.perf_counter())
        self._seconds = seconds or (lambda start, end: end - start)
        self._marks: list[tuple[str, Any]] = []
        self._stack: list[str] = []
        self._start = self._mark_now()

    @property
    def current(self) -> str:
        """The current part; thread-safe."""
        return (self._stack[-1:] or ["other"])[0]

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measure the block as part `name`."""
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
        """Seconds by part since the last split, with their sum as "step"; resets."""
        self._charge()
        spent: dict[str, float] = defaultdict(float)
        start = self._start
        for name, end in self._marks:
            spent[name] += self._seconds(start, end)
            start = end
        self._marks, self._start = [], start
        return {**{name: spent.get(name, 0.0) for name in PARTS}, "step": sum(spent.values())}

    def _charge(self) -> None:
        self._marks.append((self.current, self._mark_now()))


def stopwatch(device_type: str) -> Stopwatch:
    """A stopwatch for computations on a device. Where a GPU's events fail, the CPU's clock goes on."""
    if device_type != "cuda":
        return Stopwatch()
    import torch

    events = Measurement("times of the GPU (now of the CPU, which does not wait for it)")

    def recorded() -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def mark() -> tuple[float, Any]:
        return time.perf_counter(), events.take(recorded)

    def between(start: Any, end: Any) -> float:
        end.synchronize()
        return start.elapsed_time(end) / 1000

    def seconds(start: tuple[float, Any], end: tuple[float, Any]) -> float:
        both = start[1] is not None and end[1] is not None
        found = events.take(between, start[1], end[1]) if both else None
        return end[0] - start[0] if found is None else found

    return Stopwatch(mark, seconds)
