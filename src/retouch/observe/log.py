"""The log of a run: two sentences at its top, lines of training and of evaluations, and its file log.txt."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from retouch.algorithms.vlm_grpo.config import VlmDerived
from retouch.config import Derived, RunConfig
from retouch.config.cost import DEFAULT_GPU, cost, cost_lines, known_peak
from retouch.files.disk import append_to
from retouch.observe.measuring import Measurement
from retouch.process.machine import nvidia_smi
from retouch.process.plain_text import PrintableFormatter, count_of

logger = logging.getLogger(__name__)


def log_cost(config: RunConfig, processes: int) -> None:
    """Log what a run will cost on the GPUs of this machine, or on the default one where none is known. A fault of the
    count is a warning."""
    Measurement("cost of the run").take(_log_cost, config, processes)


def _log_cost(config: RunConfig, processes: int) -> None:
    gpu = next((name for name in nvidia_smi() if known_peak(name)), DEFAULT_GPU)
    logger.info("%s", "\n".join(cost_lines(config, cost(config, processes, gpu))))


def header(config: RunConfig, derived: Derived | VlmDerived, parameters: int, resumed_from: Path | None) -> str:
    """One sentence on what is trained, and one on its steps.

    Args:
        parameters: number of trained parameters.
        resumed_from: checkpoint that the run continues from.
    """
    begin = f"resumed from {resumed_from}" if resumed_from else "new run"
    what = "the text encoder" if isinstance(derived, VlmDerived) else config.model.train.kind
    processes = count_of(derived.world_size, "process", "processes")
    return (
        f"{config.name}: {begin}, {config.algorithm.name} trains {parameters:,} parameters ({what}) of "
        f"{config.model.family} on {processes}. {_steps(config, derived)}"
    )


def _steps(config: RunConfig, derived: Derived | VlmDerived) -> str:
    steps = count_of(config.training.max_steps, "optimizer step")
    if isinstance(derived, VlmDerived):
        prompts, completions = derived.global_prompts_per_generation, derived.global_completions_per_generation
        used = count_of(derived.optimizer_steps_per_generation, "optimizer step")
        return (
            f"It takes {steps}; {completions} completions of {count_of(prompts, 'prompt')} are trained on for {used}."
        )
    if not derived.global_images_per_epoch:
        rows = "pair" if "win" in config.algorithm.given_images else "image"
        return f"It takes {steps} of {count_of(derived.global_rows_per_step, rows)} each."
    supervised = config.algorithm.supervised_steps(config)
    warmup = f", the first {supervised} supervised" if supervised else ""
    images, examples = derived.global_images_per_epoch, count_of(derived.global_groups_per_epoch, "example")
    used = count_of(derived.optimizer_steps_per_epoch, "optimizer step")
    return f"It takes {steps}{warmup}; an RL epoch samples {images} images of {examples} and trains on them for {used}."


class StepLog:
    """Logs the time that the first evaluation promises, the first step, and then at most one line every `every_s`
    seconds.

    Args:
        time_left: returns the time left, or "".
        in_bar: a progress bar shows the same on the terminal, whose handler filters records with `in_bar`.
    """

    def __init__(
        self, steps: int, time_left: Callable[[], str] = str, every_s: float = 60.0, *, in_bar: bool = False
    ) -> None:
        self._steps, self._time_left, self._every_s, self._in_bar = steps, time_left, every_s, in_bar
        self._told: float | None = None
        self._reward: float | None = None
        self._seconds: list[float] = []

    def see(self, record: Mapping[str, Any]) -> None:
        """Add a record of any kind."""
        left = self._time_left()
        # TRL's steps have a reward of their own; elsewhere that of the last rollouts is reported with the steps on them
        if record["kind"] == "rollout":
            self._reward = record.get("combined_score")
        if record["kind"] == "eval" and self._told is None and left:
            logger.info("%s, at the speed of this evaluation", left, extra={"in_bar": self._in_bar})
        if record["kind"] != "train" or "time" not in record:
            return
        self._seconds.append(record["time"]["step"])
        now = time.monotonic()
        if self._told is not None and now - self._told < self._every_s:
            return
        reward = record.get("reward", self._reward)
        loss = loss_text(record) + (f", mean reward {reward:.4g}" if reward is not None else "")
        seconds = sum(self._seconds) / len(self._seconds)
        values = record["step"], self._steps, loss, seconds, f", {left}" if left else ""
        logger.info("step %d of %d: %s, %.3g s a step%s", *values, extra={"in_bar": self._in_bar})
        self._told, self._seconds = now, []


def loss_text(record: Mapping[str, Any]) -> str:
    """The loss of a training record, or why there is none."""
    loss = record.get("loss")
    if loss is not None:
        return f"loss {loss:.4g}"
    return "skipped (zero reward variance or failed rewards)" if record.get("skipped") else "loss is NaN or Inf"


def means_text(means: Mapping[str, float]) -> str:
    """The means of an evaluation, without those that have another name already."""
    again = repeated_names(means)
    return ", ".join(f"{name} {value:.3f}" for name, value in means.items() if name not in again)


def repeated_names(*means: Mapping[str, float | None]) -> set[str]:
    """Details whose values have another name in each of some evaluations: of a reward, one that its value is
    (`ocr.ned`), and what evaluations measure, too (`preservation.outside_l1` beside `outside_l1`). Another detail that
    happens to be equal, such as exact matches where nothing can be read, has a name of its own."""
    found = set[str]()
    for name in means[0]:
        reward, _, detail = name.partition(".")
        others = [detail, *([reward] if detail == _value_of(reward, means) else [])]
        if detail and any(all(one.get(name) == one.get(other, _NOTHING) for one in means) for other in others):
            found.add(name)
    return found


_NOTHING = object()


def _value_of(reward: str, means: Sequence[Mapping[str, float | None]]) -> str | None:
    """The detail that a reward which reads returns as its value."""
    equal = (
        n for n in ("ned", "confidence") if all(one.get(f"{reward}.{n}", _NOTHING) == one.get(reward) for one in means)
    )
    return next(equal, None)


class LogFile:
    """Appends the records of the logger `retouch` from INFO on to a file, at any level of the program. Other handlers
    receive the same records as before; without any, warnings still go to standard error."""

    def __init__(self, path: Path) -> None:
        self._logger = logging.getLogger("retouch")
        self._level = self._logger.level
        self._threshold = self._logger.getEffectiveLevel()
        file = _RunFile(path, encoding="utf-8")
        file.setFormatter(PrintableFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self._others = _handlers(self._logger)
        self._added: list[logging.Handler] = [file]
        if not self._others and logging.lastResort is not None:  # Python uses it only without other handlers
            self._others = [logging.lastResort]
            self._added += self._others
        for handler in self._added:
            self._logger.addHandler(handler)
        for handler in self._others:
            handler.addFilter(self._passes)
        if self._threshold > logging.INFO:
            self._logger.setLevel(logging.INFO)

    def close(self) -> None:
        """Close the file, and put the level and the other handlers back."""
        if self._threshold > logging.INFO:
            self._logger.setLevel(self._level)
        for handler in self._others:
            handler.removeFilter(self._passes)
        for handler in self._added:
            self._logger.removeHandler(handler)
        self._added[0].close()

    def _passes(self, record: logging.LogRecord) -> bool:
        """Whether the other handlers would receive the record at the original level."""
        return record.levelno >= self._threshold or record.name.partition(".")[0] != "retouch"


class _RunFile(logging.FileHandler):
    """A file of a run directory; nothing is written through a link."""

    def _open(self) -> TextIOWrapper:
        return os.fdopen(append_to(Path(self.baseFilename)), "a", encoding=self.encoding)


def _handlers(logger: logging.Logger) -> list[logging.Handler]:
    """The handlers of a logger and its parents."""
    above = _handlers(logger.parent) if logger.propagate and logger.parent is not None else []
    return [*logger.handlers, *above]
