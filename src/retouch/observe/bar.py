"""The progress bar of training: phase, steps and time left; below it the work of an epoch, and loss, reward and seconds
per step.

    flux_fill_grpo  RL · sampling  ━━━━━━━━━━╸━━━━━━━━━━━━━━  34/80  0:04:10 left
                    images sampled ━━━━━━━━━━━━━━━━━╸━━━━━━━  61/96
    loss 0.1408 · reward 0.547 · trend ▲ 0.034 · 4.14 s a step

It follows the records of metrics.jsonl, and reads the current activity from the run's stopwatch and its costs.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

from rich.console import Console, RenderableType
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TaskID
from rich.text import Text

from retouch.algorithms.vlm_grpo.config import VlmDerived
from retouch.config import Derived, RunConfig
from retouch.config.cost import evaluation_forwards, forwards_of, supervised_forwards
from retouch.observe.cost import Costs
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


class Inside(NamedTuple):
    """Work of an epoch or an evaluation: its unit, and how much of it is done."""

    unit: str
    done: float
    total: int


class Work:
    """The work of an epoch and of an evaluation on this process, and how much of it is done.

    Args:
        costs: counts of the run, which begin again with every record of a step or an evaluation.
        awaiting: returns the number of sampled images without a reward yet.
        evaluated: number of examples of an evaluation.

    Attributes:
        of_step: forwards of the network in an optimizer step, by phase.
        of_evaluation: forwards of the network in an evaluation.
    """

    def __init__(
        self,
        config: RunConfig,
        derived: Derived | VlmDerived,
        costs: Costs,
        awaiting: Callable[[], int],
        evaluated: int,
    ) -> None:
        world, forwards = derived.world_size, forwards_of(config, derived.as_dict())
        self._costs, self._awaiting = costs, awaiting
        self._sampling = forwards.sampling
        self._evaluated = -(-evaluated * config.evaluation.images_per_example // world)
        self.of_evaluation = self._evaluated * evaluation_forwards(config)
        self.of_step = dict[str, float]()
        self._of_training, self._supervised, self._last = 0.0, 0, ""
        if isinstance(derived, VlmDerived):  # whose steps are mostly forwards of another network
            self._images = derived.images_per_generation_per_device
            self._steps = derived.optimizer_steps_per_generation
            return
        self._supervised = derived.warmup_steps
        self._images, self._steps = derived.images_per_epoch_per_device, derived.optimizer_steps_per_epoch
        supervised = derived.global_rows_per_step / world * supervised_forwards(config)
        self.of_step |= {"sft": supervised, "warmup": supervised}
        if self._steps:
            self.of_step["rl"] = self._images * forwards.all / self._steps
            self._of_training = self._images * (forwards.ratios + forwards.training) / self._steps

    def inside(self, part: str, phase: str, step: int) -> Inside | None:
        """The work under way; None between epochs and in supervised steps, which are short.

        Args:
            part: current part of the run's stopwatch.
            phase: of the next step.
            step: number of steps taken.
        """
        if part == "eval":
            images = self._costs.rows("eval") * self._evaluated / self.of_evaluation if self.of_evaluation else 0
            return Inside("images evaluated", min(images, self._evaluated), self._evaluated)
        self._last = _WORK.get(part, self._last)  # other parts are moments between these
        if phase != "rl" or not self._steps:
            return None
        if self._last == "steps trained":
            now = self._costs.rows("train_forward") / self._of_training if self._of_training else 0.0
            done = (step - self._supervised) % self._steps + min(now, 0.99)
            return Inside(self._last, done, self._steps) if done or part in _WORK else None  # None: the epoch is over
        images = self._costs.images
        if self._last == "images scored":
            return Inside(self._last, max(0, images - self._awaiting()), max(images, self._images))
        if self._last == "images sampled" and self._sampling:
            begun = self._costs.rows("rollout") / self._sampling
            return Inside(self._last, max(images, min(begun, self._images)), max(images, self._images))
        return None


_WORK = {
    "rollout": "images sampled",
    "reward_wait": "images scored",
    "train_forward": "steps trained",
    "train_backward": "steps trained",
}
"""Part of a step -> the unit of its work."""


class Pace:
    """Estimates the seconds left in the current phase from the records of a run.

    Args:
        ends: last step of each phase.
        eval_every: steps between evaluations; 0: only at the ends.
        work: forwards of a step and of an evaluation, from which the time of a step is estimated before the first one.
    """

    def __init__(self, ends: Mapping[str, int], eval_every: int, work: Work | None = None) -> None:
        self._ends = ends
        self._eval_every = eval_every
        self._work = work
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

    def is_measured(self, phase: str) -> bool:
        """Whether a step of the phase was taken."""
        return self.step is not None and phase == self._phase

    def left(self, phase: str, step: int) -> float | None:
        """Seconds from `step` to the end of its phase, evaluations included; None before its first step and the first
        evaluation."""
        each = self.step if self.is_measured(phase) else self._estimate(phase)
        if each is None:
            return None
        end = self._ends[phase]
        evaluations = 1 + ((end - 1) // self._eval_every - step // self._eval_every if self._eval_every else 0)
        return max(0, end - step) * each + evaluations * self._evaluation

    def _estimate(self, phase: str) -> float | None:
        """Seconds of a step at the speed of the last evaluation."""
        work = self._work
        if work is None or not self._evaluation or not work.of_evaluation or phase not in work.of_step:
            return None
        return work.of_step[phase] * self._evaluation / work.of_evaluation


def shown_left(seconds: float, phase: str) -> str:
    """The time to the end of a phase, such as `0:04:10 left`."""
    return f"{timedelta(seconds=round(max(0.0, seconds)))} {'to RL' if phase == 'warmup' else 'left'}"


class TrainingBar:
    """The bar of a run, shown inside its context.

    Attributes:
        shown: there is a terminal or a notebook to show it on.
    """

    def __init__(
        self,
        config: RunConfig,
        clock: Stopwatch,
        phase: Callable[[], str],
        step: int,
        work: Work | None = None,
        *,
        main: bool = True,
    ) -> None:
        """Args:
        clock: stopwatch of the run.
        phase: returns the phase of the next step: sft, warmup or rl.
        step: number of steps taken.
        work: of an epoch; None: no bar of it.
        main: this is the first process.
        """
        console = _console()
        self.shown = main and console is not None and (console.is_terminal or console.is_jupyter)
        supervised, last = config.algorithm.supervised_steps(config), config.training.max_steps
        ends = {"warmup": supervised, "sft": last, "rl": last}
        self.pace = Pace(ends, config.training.eval_every, work)
        self._clock, self._phase, self._work = clock, phase, work
        self._done = step
        self._loss = ""
        self._rewards: deque[float] = deque(maxlen=2 * _TREND)
        self._over: float | None = None
        columns = 80 if console is None else console.width
        name, width = config.name if columns >= 80 else "", max(8, min(40, columns - 62))
        self._bar = _BarLines(self._inside, self._line, width, console=console, transient=True, disable=not self.shown)
        texts = (lambda: name, self._now, self.time_left)
        self._task = self._bar.add_task("", total=config.training.max_steps, completed=step, texts=texts)

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

    def _inside(self) -> Inside | None:
        return None if self._work is None else self._work.inside(self._clock.current, self._phase(), self._done)

    def time_left(self) -> str:
        """The time to the end of the phase; "" where it cannot be estimated yet."""
        if self._over is None:
            return ""
        phase = self._phase()
        about = "" if self.pace.is_measured(phase) else "about "
        return about + shown_left(self._over - time.monotonic(), phase)

    def _line(self) -> str:
        parts = [self._loss] if self._loss else []
        parts += [f"reward {self._rewards[-1]:.3f}"] if self._rewards else []
        trend, pace = self.trend(), self.pace.step
        parts += (
            [f"trend {'▲' if trend > 0 else '▼' if trend < 0 else '■'} {abs(trend):.3f}"] if trend is not None else []
        )
        parts += [f"{pace:.3g} s a step"] if pace is not None else []
        return " · ".join(parts)


class _BarLines(Progress):
    """The bar of the run, below it that of its epoch, and a line of text."""

    def __init__(
        self, inside: Callable[[], Inside | None], below: Callable[[], str], width: int, **options: Any
    ) -> None:
        self._inside, self._below = inside, below
        columns = (_Field(0), _Field(1), BarColumn(width), MofNCompleteColumn(), _Field(2))
        super().__init__(*columns, **options)

    def get_renderables(self) -> Iterable[RenderableType]:
        tasks, inside = self.tasks, self._inside()
        if inside is not None and inside.total:
            texts = {"texts": (str, lambda: inside.unit, str)}
            tasks.append(Task(TaskID(1), "", inside.total, inside.done, _get_time=self.get_time, fields=texts))
        yield self.make_tasks_table(tasks)
        yield Text(self._below(), style="dim", no_wrap=True, overflow="ellipsis")


class _Field(ProgressColumn):
    """A text of a line, which is computed on every refresh."""

    def __init__(self, number: int) -> None:
        self._number = number
        super().__init__()

    def render(self, task: Task) -> Text:
        return Text(task.fields["texts"][self._number](), no_wrap=True, overflow="ellipsis")


def _console() -> Console | None:
    """The console of the log lines; sharing it keeps them above the bar. None where they are only warnings."""
    handlers = [handler for handler in logging.getLogger().handlers if isinstance(handler, RichHandler)]
    if handlers and handlers[0].level >= logging.WARNING:
        return None
    return handlers[0].console if handlers else Console(stderr=True)
