"""The status of a run, as far as its directory shows it: running, ended, or killed."""

from __future__ import annotations

import fcntl
import os
import platform
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retouch.files import plain_json
from retouch.files.disk import is_own, read_bounded
from retouch.observe.bar import Pace, shown_left
from retouch.observe.run_dir import MOST_TEXT
from retouch.process.plain_text import continue_command

Record = Mapping[str, Any]

_WORDS = {
    "running": "Running",
    "finished": "Finished",
    "stopped": "Stopped",
    "killed": "Killed",
    "failed": "Failed",
    "elsewhere": "No end recorded",
}


@dataclass(frozen=True)
class Status:
    """For the template of the same name.

    Attributes:
        state: running, finished, stopped, failed (an event of another name), killed, or elsewhere (no end is recorded,
            and the process may be one of another machine).
        updated: time in seconds when metrics.jsonl changed last, which a copy or a resumed start does as well (records
            have no time); None without a record.
        left: time to the end of the phase of a run that is running.
        share: of the optimizer steps that are done.
        commands: what each of them does, and the command.
    """

    state: str
    text: str
    updated: float | None
    left: str
    share: float | None
    commands: Sequence[tuple[str, str]]

    @property
    def word(self) -> str:
        return _WORDS[self.state]

    @property
    def when(self) -> str:
        return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(self.updated))


def status_of(run: Path, config: Record, records: Sequence[Record], *, live: bool) -> Status:
    """The status of a run directory now.

    Args:
        live: it is kept up to date; a page that is not must not claim later that the run is running.
    """
    metrics = run / "metrics.jsonl"
    last = next((record for record in reversed(records) if record.get("event") != "alarm"), {})
    step = last.get("step", 0)
    steps = config["training"]["max_steps"]
    state, text = _state(run, last)
    return Status(
        state,
        f"step {step} of {steps}{text}{' when this page was written' if state == 'running' and not live else ''}",
        metrics.stat().st_mtime if records and metrics.is_file() else None,
        time_left(records, config) if state == "running" else "",
        min(1.0, step / steps) if steps else None,
        [] if live and state == "running" else _commands(run, state),
    )


def _state(run: Path, last: Record) -> tuple[str, str]:
    """The state, and what a sentence adds to the step."""
    # The lock comes before the records: a killed run leaves no event, and a resumed one has that of its former end.
    holder, host = lock_holder(run)
    event = last.get("event")
    if holder == "other" or (holder == "own" and event is None):
        return "running", ""
    if event is not None:
        state = event if event in ("finished", "stopped") else "failed"
        named = "" if state == event else f": {event}"
        return state, f"{named}{': ' + str(last['reason']) if 'reason' in last else ''}"
    if host == platform.node():
        return "killed", ": no process holds the run any more, and it recorded no end"
    where = (
        "it ran on another machine, whose processes are not visible here; it may still be running there"
        if host is not None
        else "the machine that it ran on is not recorded: it may still be running on another one"
    )
    return "elsewhere", f": {where}"


def lock_holder(run: Path) -> tuple[str, str | None]:
    """The holder of the lock of a run, "own" (this process), "other" or "", and the host of its last holder, if known.
    The lock is shared for an instant, which `RunLock.take` waits for."""
    place = run / ".lock"
    try:
        descriptor = os.open(place, os.O_RDONLY | os.O_NONBLOCK | getattr(os, "O_NOFOLLOW", 0))
    except OSError:
        return "", None
    with os.fdopen(descriptor, encoding="utf-8", errors="replace") as file:
        number, host = [*file.read(4096).split("\n"), "", ""][:2]
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            own = (number, host) == (str(os.getpid()), platform.node())  # containers have the same pids
            return ("own" if own else "other"), host or None
        except OSError:  # a file system without locks
            return "", None
    return "", host or None


def time_left(records: Sequence[Record], config: Record) -> str:
    """The time to the end of the phase of the last step, as the bar of a terminal estimates it; "" before the first
    step of a phase."""
    train = [record for record in records if record["kind"] == "train" and {"time", "phase"} <= record.keys()]
    if not train:
        return ""
    last, supervised = config["training"]["max_steps"], config["algorithm"].get("sft_steps") or 0
    pace = Pace({"warmup": supervised, "sft": last, "rl": last}, config["training"].get("eval_every") or 0)
    for record in [*(one for one in records if one["kind"] == "eval"), *train]:
        pace.see(record)
    step, phase = train[-1]["step"], train[-1]["phase"]
    if phase == "warmup" and step >= supervised:
        phase = "rl"  # no step of which was taken
    seconds = pace.left(phase, step)
    return "" if seconds is None else shown_left(seconds, phase)


def _commands(run: Path, state: str) -> list[tuple[str, str]]:
    if state == "running":
        return [("Follow it:", f"retouch watch {shlex.quote(str(run))}")]
    if state in ("finished", "elsewhere"):  # two processes must not write to one run
        return []
    processes = _processes(run)
    if processes > 1:  # the command of a launcher is not known
        return [(f"Continue it under its launcher, on {processes} processes:", f"-m {continue_command(run)}")]
    return [("Continue it:", continue_command(run))]


def _processes(run: Path) -> int:
    """Number of processes that a run was started on last, by its environment.json; 1 where that does not have it."""
    environment = run / "environment.json"
    try:
        found: Any = (
            plain_json.loads(read_bounded(environment, MOST_TEXT)) if is_own(run, environment, MOST_TEXT) else {}
        )
        return found["processes"] if type(found["processes"]) is int else 1
    except (OSError, ValueError, TypeError, KeyError):
        return 1
