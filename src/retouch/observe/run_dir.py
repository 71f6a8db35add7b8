"""The run directory and the files that a run appends to.

    RUN/config.yaml  [config-000040.yaml]  [begun_from]  [attempt-1/]  .lock
    RUN/environment.json  metrics.jsonl  log.txt  tensorboard/  [wandb/]  [run_id]  images/step-000040/  checkpoints/

metrics.jsonl has one JSON object per line: {"step", "kind": "train" | "rollout" | "eval" | "event", ...}. Timings and
costs of the first process, and counts of the reward clients of all processes, are under "time" alone; all other fields
are equal in equal runs.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import yaml

from retouch.config import ConfigError, RunConfig, dump_run, yaml12
from retouch.config.trust import consent
from retouch.errors import log_once
from retouch.files import plain_json
from retouch.files.complete import complete_checkpoints
from retouch.files.disk import append_to, expanded, is_own, require_no_link, write_whole
from retouch.imaging.png import write_png
from retouch.observe.bar import TrainingBar, Work
from retouch.observe.earlier import (
    OF_AN_ATTEMPT,
    finished_at,
    keep_config,
    put_aside,
    put_later_aside,
    records_until,
    warn_of_lost_records,
)
from retouch.observe.environment import environment
from retouch.observe.log import LogFile, StepLog
from retouch.observe.run_lock import RunLock
from retouch.observe.sinks import Sink, open_sinks, require_sinks
from retouch.observe.timing import Stopwatch
from retouch.process.console import output_problem
from retouch.rewards.foreign import one_line

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)

_FILES = ("config.yaml", "begun_from", "environment.json", "metrics.jsonl", "log.txt", "run_id", "report.html")

_FOLDERS = ("images", "evaluations", "tensorboard", "checkpoints")

MOST_TEXT = 16 << 20
"""Bytes of a config.yaml or an environment.json that is shown."""

_MOST_RECORDS = 1 << 30
"""Bytes of a metrics.jsonl or rows.jsonl that is shown."""

_ENDS = ("finished", "stopped")
"""Events that end a run which did not fail."""


class RunDir:
    """A run directory opened for writing. Methods do nothing except on the first process."""

    def __init__(self, config: RunConfig, *, main: bool = True) -> None:
        self.path = Path(config.logging.dir).expanduser() / config.name
        self.config = config
        self.main = main
        self._watchers: list[StepLog | TrainingBar] = [StepLog(config.training.max_steps)]
        self._metrics: Any = None
        self._sinks: list[Sink] = []
        self._ended = False
        self._unread = False
        self._log_file: LogFile | None = None
        self._lock = RunLock(self.path)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @cached_property
    def run_file(self) -> str:
        """The whole run as YAML."""
        return dump_run(self.config)

    def owns(self, checkpoint: Path) -> bool:
        """Whether a checkpoint is one of this run."""
        return checkpoint.resolve().parent == self.checkpoints.resolve()

    def begun_from(self) -> Path | None:
        """The checkpoint of another run that this one was begun from, by its file of that name; None without one. Runs
        of earlier versions have it in config.yaml.

        Raises:
            ConfigError: the file that names it is damaged.
        """
        note = self.path / "begun_from"
        if note.is_file():
            return expanded(note.read_text(encoding="utf-8", errors="replace").removesuffix("\n"))
        if not (self.path / "config.yaml").exists():
            return None
        given = read_config(self.path).get("resume")
        foreign = isinstance(given, str) and given != "auto" and not self.owns(expanded(given))
        return expanded(cast("str", given)) if foreign else None

    def open(self, resume_step: int | None, *, evaluated: bool = True, checkpoint: Path | None = None) -> None:
        """Create the directory, or continue in it.

        Args:
            resume_step: step of the checkpoint to resume from; later records are dropped from metrics.jsonl. None
                starts a new run; with `resume=auto` the files of an attempt without a checkpoint are moved to a folder.
            evaluated: whether the checkpoint was written after the evaluation of its step; if not, the run repeats it.
            checkpoint: the checkpoint. One of another run is noted in a file for as long as the run lives: without a
                checkpoint of its own, `resume=auto` begins from it again.

        Raises:
            ConfigError: a new run where one exists, or another process writes here.
        """
        if not self.main:
            return
        self.lock()
        _require_files(self.path)
        # A crash may come at any line: what an earlier attempt left is moved away or cut before anything new is
        # written, and config.yaml, by which other commands know a run, comes after that.
        metrics = self.path / "metrics.jsonl"
        if resume_step is None and self.config.resume != "auto":
            self.require_new()
        earlier = [self.path / name for name in OF_AN_ATTEMPT if (self.path / name).exists()]
        aside = put_aside(self.path, earlier) if resume_step is None and self.holds_run() else None
        self._note_origin(None if resume_step is None else checkpoint)
        if resume_step is not None:
            records = read_metrics(metrics)
            if checkpoint is None or self.owns(checkpoint):
                warn_of_lost_records(metrics, records, resume_step)
                put_later_aside(self.path, resume_step)
            kept = records_until(records, resume_step, evaluated=evaluated)
            write_whole(metrics, "".join(json.dumps(record) + "\n" for record in kept))
            self._ended = finished_at(kept, resume_step) and resume_step >= self.config.training.max_steps
            keep_config(self.path, resume_step, self.run_file)
        write_whole(self.path / "config.yaml", self.run_file)
        write_whole(self.path / "environment.json", json.dumps(environment(), indent=2) + "\n")
        self._metrics = os.fdopen(append_to(metrics), "a", encoding="utf-8")
        self._log_file = LogFile(self.path / "log.txt")
        consent(self.path, self.run_file.encode(), self.config)
        if aside is not None:
            logger.warning("no checkpoint to resume from: starting again; earlier files were moved to %s", aside)
        self._sinks = open_sinks(self.config, self.path, resume_step)

    def _note_origin(self, checkpoint: Path | None) -> None:
        """Keep what the run is begun from in a file of its own: config.yaml, which may be trained again, has what the
        user gave. A new run has none, also where one that stopped at once has left the file."""
        note = self.path / "begun_from"
        if checkpoint is None:
            note.unlink(missing_ok=True)
            return
        with suppress(ConfigError):  # a checkpoint of its own needs no origin
            origin = self.begun_from() if self.owns(checkpoint) else checkpoint.resolve()
            if origin is not None:
                write_whole(note, f"{origin}\n")

    def lock(self) -> None:
        """Lock the directory until `close`, before a checkpoint is chosen.

        Raises:
            ConfigError: another process writes here.
        """
        if self.main:
            self._lock.take()

    def require_free(self) -> None:
        """Raises ConfigError if another process writes here, or something else stands in the place of its files."""
        if self.main:
            self._lock.require_free()
            _require_files(self.path)

    def require_sinks(self) -> None:
        """Raises ConfigError if a service of `logging.sinks` cannot be used."""
        if self.main:
            require_sinks(self.config)

    def require_new(self) -> None:
        """Raises ConfigError if there is a run already."""
        if self.main and self.holds_run():
            raise ConfigError(
                f"{self.path} already holds a run; continue it with resume=auto, set another name=..., or delete it"
            )

    def holds_run(self) -> bool:
        """Whether anything was logged here, or there is a checkpoint."""
        metrics = self.path / "metrics.jsonl"
        return (metrics.exists() and metrics.stat().st_size > 0) or bool(complete_checkpoints(self.checkpoints))

    def log(self, kind: str, step: int, values: Mapping[str, Any], seconds: Mapping[str, float] | None = None) -> None:
        """Append a record, and send its numbers to the sinks as `KIND/NAME`. NaN and infinity (the gradient norm of an
        fp16 overflow) become null, as JSON requires."""
        if not self.main:
            return
        finite = {n: None if isinstance(v, float) and not math.isfinite(v) else v for n, v in values.items()}
        record: dict[str, Any] = {"step": step, "kind": kind, **finite}
        if seconds is not None:
            record["time"] = {name: round(value, 4) for name, value in seconds.items()}
        # the file comes first: a resumed run reads it, and it must hold what the bar or a sink has shown
        self._metrics.write(json.dumps(record, allow_nan=False) + "\n")
        self._metrics.flush()
        for watcher in self._watchers:
            watcher.see(record)
        self._note_lost_output()
        self._ended = self._ended or values.get("event") in _ENDS
        numbers = {f"{kind}/{n}": v for n, v in values.items() if isinstance(v, int | float) and type(v) is not bool}
        numbers |= {f"time/{name}": value for name, value in (seconds or {}).items()}
        for sink in self._sinks if numbers else ():
            sink.numbers(numbers, step)

    def _note_lost_output(self) -> None:
        """Log, once, that log.txt is from here on the only place of log lines."""
        if not self._unread and (problem := output_problem("stderr")):
            self._unread = True
            reason = (problem.strerror or str(problem)).lower()
            logger.warning("standard error cannot be written (%s): the run goes on, and logs to log.txt alone", reason)

    def bar(self, clock: Stopwatch, phase: Callable[[], str], step: int, work: Work | None = None) -> TrainingBar:
        """The progress bar of this run, which follows the records from now on; arguments of `TrainingBar`."""
        bar = TrainingBar(self.config, clock, phase, step, work, main=self.main)
        self._watchers = [bar, StepLog(self.config.training.max_steps, bar.time_left, in_bar=bar.shown)]
        return bar

    def alarm(self, step: int, text: str) -> None:
        """Log a warning and record it."""
        logger.warning("alarm: %s", text)
        self.log("event", step, {"event": "alarm", "alarm": text})

    def save_image(self, step: int, name: str, image: Image) -> None:
        """Write images/step-000040/NAME.png, and send it to the sinks."""
        if not self.main:
            return
        folder = self.path / "images" / f"step-{step:06d}"
        write_png(image, folder / f"{name}.png")
        for sink in self._sinks:
            sink.image(name, image, step)

    def close(self) -> None:
        """Close files and sinks, even if one of them fails. A run without an event of `_ENDS` counts as failed."""
        metrics, self._metrics = self._metrics, None
        sinks, self._sinks = self._sinks, []
        log_file, self._log_file = self._log_file, None
        with ExitStack() as ends:  # the last one first
            ends.callback(self._lock.release)
            if log_file is not None:
                ends.callback(log_file.close)
            for sink in reversed(sinks):
                ends.callback(sink.close, failed=not self._ended)
            if metrics is not None:
                ends.callback(metrics.close)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl; a line that is cut off, or no record of a step, is skipped."""
    return [one for one in read_rows(path) if type(one.get("step")) is int and isinstance(one.get("kind"), str)]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file of lines, such as the rows of an evaluation; other lines are skipped.

    Raises:
        ConfigError: a folder or a pipe.
    """
    if not path.exists():
        return []
    if not path.is_file():
        raise ConfigError(f"{path} is not a file; delete it")
    return list(_records(path.read_bytes().split(b"\n")))


def is_no_file(place: Path) -> bool:
    """Whether a folder or a pipe has the place of the rows of an evaluation, with one warning for all that read them:
    alarms, grids and the report."""
    try:
        found = place.exists() and not place.is_file()
    except OSError:  # where this user may not look
        return False
    if found:
        log_once(logger, "%s: not a file; this evaluation is left out of alarms, grids and the report", place)
    return found


def read_own_rows(run: Path, place: Path) -> list[dict[str, Any]]:
    """`read_rows` of a file of a run directory that may come from anybody; none, with a warning, where it is that of
    another place."""
    if is_own(run, place, _MOST_RECORDS):
        return read_rows(place)
    if is_no_file(place):
        return []
    log_once(logger, "%s: no file of the run itself, or too large: it is left out", place)
    return []


def rows_of(run: Path, evaluation: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The measures of each image of an evaluation, by its record."""
    return read_own_rows(run, run / "evaluations" / f"step-{evaluation['step']:06d}" / "rows.jsonl")


def require_own(run: Path) -> None:
    """Refuse to show what is no file of a run directory itself, which may come from anybody.

    Raises:
        ConfigError: its config.yaml or metrics.jsonl is a link, leads to another place, or is too large.
    """
    for name, most in (("config.yaml", MOST_TEXT), ("metrics.jsonl", _MOST_RECORDS)):
        require_no_link(run / name)
        if not is_own(run, run / name, most):
            raise ConfigError(f"{run / name} has more than {most} bytes; restore it, or delete the run")


def read_config(run: Path) -> dict[str, Any]:
    """The run file of a run directory as it is written: its components may be unknown here.

    Raises:
        ConfigError: not a run directory, or not the file of a run.
    """
    file = run / "config.yaml"
    if not file.is_file():
        raise ConfigError(f"{run} is not a run directory (no config.yaml); give a folder that `retouch train` wrote")
    try:
        found = yaml12.parse(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{file}: a run file is a mapping of keys; this one holds {type(found).__name__}")
    return cast("dict[str, Any]", found)


@contextmanager
def reading_records(run: Path | str) -> Iterator[None]:
    """Within it, a record without the fields of a run is an error of its files, not of this program.

    Raises:
        ConfigError: naming the run and the field.
    """
    try:
        yield
    except ConfigError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, IndexError, ArithmeticError) as error:
        raise ConfigError(
            f"{run}: its config.yaml, metrics.jsonl or evaluations are not those of a run ({type(error).__name__}: "
            f"{one_line(str(error), most=200)}); restore them, or delete the run"
        ) from error


def _records(lines: Sequence[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        with suppress(ValueError):
            record = plain_json.loads(line)
            if isinstance(record, dict):
                yield cast("dict[str, Any]", record)


def _require_files(run: Path) -> None:
    """Check what a run writes again or reads. Raises as `require_no_link`."""
    for path in (*(run / name for name in _FILES), *run.glob("config-*.yaml")):
        require_no_link(path)
    folders = [run, *(run / name for name in _FOLDERS), *run.glob("images/step-*"), *run.glob("evaluations/step-*")]
    for path in folders:
        if (path.is_symlink() or path.exists()) and not path.is_dir():
            raise ConfigError(f"{path} is not a folder; delete it")
