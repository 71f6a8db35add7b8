"""The run directory and the files that a run appends to.

    RUN/config.yaml  [config-000040.yaml]  [begun_from]  [attempt-1/]  .lock
    RUN/environment.json  metrics.jsonl  log.txt  tensorboard/  [wandb/]  [run_id]  images/step-000040/  checkpoints/

metrics.jsonl has one JSON object per line: {"step", "kind": "train" | "rollout" | "eval" | "event", ...}. Timings and
costs of the first process are under "time" alone; all other fields are equal in equal runs.
"""

from __future__ import annotations

import errno
import importlib.metadata
import itertools
import json
import logging
import math
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import yaml
from filelock import FileLock, Timeout

from retouch.config import ConfigError, RunConfig, dump_run, yaml12
from retouch.config.trust import consent
from retouch.files import plain_json
from retouch.files.complete import complete_checkpoints
from retouch.files.disk import append_to, expanded, is_own, require_no_link, write_whole
from retouch.imaging.png import write_png
from retouch.observe.bar import TrainingBar, Work
from retouch.observe.log import LogFile, StepLog
from retouch.observe.measuring import Measurement
from retouch.observe.sinks import Sink, open_sinks, require_sinks
from retouch.observe.timing import Stopwatch
from retouch.process.console import output_problem
from retouch.rewards.foreign import one_line

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)

PACKAGES = (
    "retouch",
    "torch",
    "diffusers",
    "transformers",
    "peft",
    "accelerate",
    "rapidocr",
    "onnxruntime",
    "numpy",
    "pillow",
)


_OF_AN_ATTEMPT = ("images", "evaluations", "tensorboard", "wandb", "run_id", "metrics.jsonl")
"""Files that are moved to a folder of their own when a run starts again; the last one marks a directory as a run."""

_BY_STEP = ("evaluations", "images", "checkpoints")
"""Folders with a folder `step-000040` for each step; the last one shows that a run has later steps."""

_STEP = re.compile(r"(?:\.replaced-)?step-(\d+)")

_FILES = ("config.yaml", "begun_from", "environment.json", "metrics.jsonl", "log.txt", "run_id", "report.html")

_FOLDERS = ("images", "evaluations", "tensorboard", "checkpoints")

_PROBES_S = 0.5
"""Seconds that a start, or the check before it, waits for the lock: a page that is watched
(`status.lock_holder`) and `RunLock.require_free` hold it for an instant."""

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
        metrics = self.path / "metrics.jsonl"
        if resume_step is None and self.config.resume != "auto":
            self.require_new()
        earlier = [self.path / name for name in _OF_AN_ATTEMPT if (self.path / name).exists()]
        aside = _put_aside(self.path, earlier) if resume_step is None and self.holds_run() else None
        self._note_origin(None if resume_step is None else checkpoint)
        if resume_step is not None:
            if checkpoint is None or self.owns(checkpoint):
                _warn_of_lost_records(metrics, resume_step)
                _put_later_aside(self.path, resume_step)
            _truncate(metrics, resume_step, evaluated=evaluated)
            self._ended = self._finished_at(resume_step)
            _keep_config(self.path, resume_step, self.run_file)
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

    def _finished_at(self, step: int) -> bool:
        """Whether the run finished at this step, and has no more steps."""
        finished = any(
            (r["step"], r.get("event")) == (step, "finished") for r in read_metrics(self.path / "metrics.jsonl")
        )
        return finished and step >= self.config.training.max_steps

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


class RunLock:
    """A lock on RUN/.lock, which holds the pid of its process and its host. The kernel releases it when that process
    dies."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._place = run / ".lock"
        self._lock = FileLock(self._place, blocking=False, thread_local=False, fallback_to_soft=False)

    def take(self) -> None:
        """Hold the lock until `release`. A file system without locks is warned about.

        Raises:
            ConfigError: another process holds it.
        """
        if self._lock.is_locked:
            return
        require_no_link(self._place)
        self._run.mkdir(parents=True, exist_ok=True)
        self._place.touch()  # a full or read-only disk is an error
        try:
            self._lock.acquire(blocking=True, timeout=_PROBES_S)
        except Timeout:
            raise self._taken() from None
        except OSError as error:
            logger.warning("%s cannot be locked (%s); make sure that no other process writes there", self._run, error)
            return
        self._place.write_text(f"{os.getpid()}\n{platform.node()}\n", encoding="utf-8")

    def require_free(self) -> None:
        """Check before a model is loaded; takes nothing and creates no file.

        Raises:
            ConfigError: another process holds it.
        """
        require_no_link(self._place)
        if self._lock.is_locked or not os.access(self._place, os.W_OK):
            return
        try:
            self._lock.acquire(blocking=True, timeout=_PROBES_S)
        except Timeout:
            raise self._taken() from None
        except OSError:
            return
        self._lock.release()

    def release(self) -> None:
        self._lock.release()

    def _taken(self) -> ConfigError:
        number = self._place.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
        number = number if number.isdecimal() else "unknown"
        return ConfigError(
            f"another process (pid {number}) is writing to {self._run}; wait for it, or set another name=..."
        )


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


def read_own_rows(run: Path, place: Path) -> list[dict[str, Any]]:
    """`read_rows` of a file of a run directory that may come from anybody; none, with a warning, where it is that of
    another place."""
    if is_own(run, place, _MOST_RECORDS):
        return read_rows(place)
    warn_once(place, "no file of the run itself, or too large: it is left out")
    return []


@cache
def warn_once(place: Path, problem: str) -> None:
    """Name what is wrong with a file of a run, each problem the first time: evaluations, alarms and the report read it
    again."""
    logger.warning("%s: %s", place, problem)


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


def environment() -> dict[str, Any]:
    """Versions and machine, to repeat the run."""
    import torch

    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "gpus": Measurement("names of the GPUs in environment.json").take(_gpu_names) or [],
        "threads": torch.get_num_threads(),
        "command": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _gpu_names() -> list[str]:
    """Names of the GPUs that torch can use; `device_count` may include others, for example with an old driver."""
    import torch

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)]


@cache
def _version(package: str) -> str | None:
    """The version of a package, None where it is not installed. Looking it up takes milliseconds."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


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


def _warn_of_lost_records(metrics: Path, step: int) -> None:
    """Warn where metrics.jsonl has no record of optimizer steps before a checkpoint, which needs none of them. A run
    that was begun from another run's checkpoint has those after it: they begin with its first record."""
    records = read_metrics(metrics)
    taken = {record["step"] for record in records if record["kind"] == "train"}
    first = min((record["step"] + (record["kind"] != "train") for record in records), default=1)
    lost = sum(number not in taken for number in range(first, step + 1))
    if lost:
        logger.warning(
            "%s: damaged: %d of the %d optimizer steps before the checkpoint are missing in it, in curves and in "
            "reports; training is not affected",
            metrics,
            lost,
            step,
        )


def _truncate(metrics: Path, step: int, *, evaluated: bool) -> None:
    """Drop what a run that is resumed at a step writes again: later steps, an evaluation of this step that the
    checkpoint does not know of, and that of the end unless the run finished."""
    kept = [record for record in read_metrics(metrics) if record["step"] <= step]
    finished = any((record["step"], record.get("event")) == (step, "finished") for record in kept)
    for place, record in enumerate(kept):
        repeated = not evaluated or (record.get("moment") == "end" and not finished)
        if (record["step"], record["kind"]) == (step, "eval") and repeated:
            kept = kept[:place]
            break
    write_whole(metrics, "".join(json.dumps(record) + "\n" for record in kept))


def _put_aside(run: Path, files: Sequence[Path]) -> Path:
    """Move files of an attempt to a folder of the run directory."""
    aside = _new_attempt(run)
    _move(run, files, aside)
    return aside


def _new_attempt(run: Path) -> Path:
    places = (run / f"attempt-{number}" for number in itertools.count(1))
    aside = next(place for place in places if not place.exists())
    aside.mkdir()
    return aside


def _move(run: Path, files: Sequence[Path], aside: Path) -> None:
    """Move files of a run, in their order. A folder may be a link to another file system, to which renaming cannot
    lead: what is in it stays there, in a folder of the name of `aside`."""
    for file in files:
        place = aside / file.relative_to(run)
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            file.rename(place)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            beside = file.parent / aside.name / file.name
            beside.parent.mkdir(exist_ok=True)
            file.rename(beside)


def _put_later_aside(run: Path, step: int) -> None:
    """Where a run resumes from an earlier checkpoint than its newest, move the files of later steps away: the next
    `resume=auto` would go on from a checkpoint of steps that metrics.jsonl has no more."""
    later = [
        folder
        for part in _BY_STEP
        for folder in sorted((run / part).glob("*step-*"))
        if (match := _STEP.fullmatch(folder.name)) and int(match[1]) > step
    ]
    if not any(folder in later for folder in complete_checkpoints(run / "checkpoints")):
        return  # it was stopped after its newest checkpoint, and comes to the same files again
    aside = _new_attempt(run)
    if (run / "metrics.jsonl").is_file():  # first: after a kill, the next start finds later checkpoints again
        shutil.copyfile(run / "metrics.jsonl", aside / "metrics.jsonl")
    _move(run, later, aside)
    logger.warning("the checkpoints of steps after %d, and their files, were moved to %s", step, aside)


def _keep_config(run: Path, step: int, now: str) -> None:
    """Keep the run file that was in use up to a step as config-000040.yaml if the present one differs. Run files of
    dropped steps are deleted."""
    ends = {leg: leg.stem.partition("-")[2] for leg in sorted(run.glob("config-*.yaml"))}
    beyond = [leg for leg, end in ends.items() if end.isdecimal() and int(end) >= step]
    held = beyond[0] if beyond else run / "config.yaml"
    written = held.read_text(encoding="utf-8", errors="replace") if held.exists() else now
    if not _is_run_file(written):
        logger.warning("%s: damaged; the run file of the steps before the checkpoint is lost", held)
    elif _without_resume(written) != _without_resume(now):
        held.replace(run / f"config-{step:06d}.yaml")
        beyond = beyond[1:]
    for leg in beyond:
        leg.unlink()


def _is_run_file(text: str) -> bool:
    try:
        return isinstance(found := yaml12.parse(text), dict) and "algorithm" in found
    except yaml.YAMLError:
        return False


def _without_resume(run_file: str) -> list[str]:
    return [line for line in run_file.splitlines() if not line.startswith("resume:")]
