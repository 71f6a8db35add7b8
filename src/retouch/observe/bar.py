"""The progress bar of training: phase, steps and time left; below it loss, reward and seconds per step.

    flux_fill_grpo  RL · sampling  ━━━━━━━━━━╸━━━━━━━━━━━━━━  34/80  0:04:10 left
    loss 0.1408 · reward 0.547 · trend ▲ 0.034 · 4.14 s a step

It follows the records of metrics.jsonl, and reads the current activity from the run's stopwatch.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any

from rich.console import Console, RenderableType
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task
from rich.text import Text

from retouch.config import RunConfig
from retouch.observe.log import loss_text
from retouch.observe.timing import Stopwatch

_PHASES = {"sft": "SFT", "warmup": "warm-up", "rl": "RL"}

_ACTIVITIES = {
    "rollout": "sampling",
    "text": "text",
    "vae": "VAE",
    "reward_wait": "rewards",
    "train_forward": "training",
    "train_backward": "training",
    "optimizer": "training",
    "checkpoint": "saving",
}
"""Part of a step (`timing.PARTS`) -> the activity shown after the phase."""

_TREND = 10
"""The reward trend is the mean of the last N rewards minus the mean of the N before; of fewer, of each half."""

_RECENT = 50
"""Number of steps that the mean step time is over."""


class Pace:
    """Estimates the seconds left in the current phase from the records of a run.

    Args:
        ends: last step of each phase.
        eval_every: steps between evaluations; 0: only at the ends.
    """

    def __init__(self, ends: Mapping[str, int], eval_every: int) -> None:
        self._ends = ends
        self._eval_every = eval_every
        self._phase = ""
        self._steps: deque[float] = deque(maxlen=_RECENT)
        self._evaluation = 0.0

    @property
    def step(self) -> float | None:
        """Mean seconds of a step, evaluations excluded; None before the first one of a phase."""
        return sum(self._steps) / len(self._steps) if self._steps else None

    def see(self, record: Mapping[str, Any]) -> None:
        """Add a record of any kind."""
        if record["kind"] == "eval" and "time" in record:
            self._evaluation = record["time"]["step"]
        elif record["kind"] == "train" and "time" in record:
            if record["phase"] != self._phase:
                self._phase = record["phase"]
                self._steps.clear()
            self._steps.append(record["time"]["step"])

    def left(self, phase: str, step: int) -> float | None:
        """Seconds from `step` to the end of its phase, evaluations included; None before its first step."""
        if self.step is None or phase != self._phase:
            return None
        end = self._ends[phase]
        evaluations = 1 + ((end - 1) // self._eval_every - step // self._eval_every if self._eval_every else 0)
        return max(0, end - step) * self.step + evaluations * self._evaluation


class TrainingBar:
    """The bar of a run, shown inside its context.

    Attributes:
        shown: there is a terminal or a notebook to show it on.
    """

    def __init__(
        self, config: RunConfig, clock: Stopwatch, phase: Callable[[], str], step: int, *, main: bool = True
    ) -> None:
        """Args:
        clock: stopwatch of the run.
        phase: returns the phase of the next step: sft, warmup or rl.
        step: number of steps taken.
        main: this is the first process.
        """
        console = _console()
        self.shown = main and (console.is_terminal or console.is_jupyter)
        supervised, last = config.algorithm.supervised_steps(config), config.training.max_steps
        ends = {"warmup": supervised, "sft": last, "rl": last}
        self.pace = Pace(ends, config.training.eval_every)
        self._clock, self._phase = clock, phase
        self._done = step
        self._loss = ""
        self._rewards: deque[float] = deque(maxlen=2 * _TREND)
        self._over: float | None = None
        columns = (_Live(self._now), BarColumn(), MofNCompleteColumn(), _Live(self._left))
        self._bar = _TwoLines(
            self._line, config.name, *columns, console=console, transient=True, disable=not self.shown
        )
        self._task = self._bar.add_task("", total=config.training.max_steps, completed=step)

    def __enter__(self) -> TrainingBar:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def see(self, record: Mapping[str, Any]) -> None:
        """Add a record of any kind."""
        self.pace.see(record)
        reward = record.get("combined_score" if record["kind"] == "rollout" else "reward")
        if record["kind"] in ("rollout", "train") and isinstance(reward, float):
            self._rewards.append(reward)
        if record["kind"] == "train":
            self._done, self._loss = record["step"], loss_text(record)
        left = self.pace.left(self._phase(), self._done)
        self._over = None if left is None else time.monotonic() + left
        self._bar.update(self._task, completed=self._done, refresh=True)

    def trend(self) -> float | None:
        """Mean of the later half of the last rewards minus that of the earlier half; None for fewer than four."""
        values = list(self._rewards)
        half = len(values) // 2
        return (sum(values[-half:]) - sum(values[-2 * half : -half])) / half if half > 1 else None

    def _now(self) -> str:
        part, phase = self._clock.current, _PHASES[self._phase()]
        if part == "eval":
            return "evaluating"
        return f"{phase} · {_ACTIVITIES[part]}" if part in _ACTIVITIES else phase

    def _left(self) -> str:
        if self._over is None:
            return ""
        seconds = timedelta(seconds=round(max(0.0, self._over - time.monotonic())))
        return f"{seconds} to RL" if self._phase() == "warmup" else f"{seconds} left"

    def _line(self) -> str:
        parts = [self._loss] if self._loss else []
        parts += [f"reward {self._rewards[-1]:.3f}"] if self._rewards else []
        trend, pace = self.trend(), self.pace.step
        parts += (
            [f"trend {'▲' if trend > 0 else '▼' if trend < 0 else '■'} {abs(trend):.3f}"] if trend is not None else []
        )
        parts += [f"{pace:.3g} s a step"] if pace is not None else []
        return " · ".join(parts)


class _TwoLines(Progress):
    """A bar with a line of text below it."""

    def __init__(self, below: Callable[[], str], name: str, *columns: ProgressColumn, **options: Any) -> None:
        self._below = below
        super().__init__(_Live(lambda: name), *columns, **options)

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield Text(self._below(), style="dim", no_wrap=True, overflow="ellipsis")


class _Live(ProgressColumn):
    """A text that is computed on every refresh."""

    def __init__(self, text: Callable[[], str]) -> None:
        self._text = text
        super().__init__()

    def render(self, task: Task) -> Text:
        return Text(self._text(), no_wrap=True)


def _console() -> Console:
    """The console of the log lines; sharing it keeps them above the bar."""
    handlers = [handler for handler in logging.getLogger().handlers if isinstance(handler, RichHandler)]
    return handlers[0].console if handlers else Console(stderr=True)
