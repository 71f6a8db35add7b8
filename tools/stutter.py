"""Run a command on a machine that stutters: tests fail that depend on seconds, or on what a thread or signal has done.

    python tools/stutter.py [--seed 1] [--held .3 1.5] [--every 1 2] [--late .3] -- python -m pytest tests/rewards

Every process of the command is held up (SIGSTOP, SIGCONT) for a random time in `--held`, at random intervals in
`--every`; each at moments of its own, so that a client and its server are held up in turn. Under pytest, each new
thread also starts late, and a signal reaches another process late, by up to `--late` seconds. Nothing is left stopped
at the end, also if it is interrupted.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

LATE, SEED = "STUTTER_LATE", "STUTTER_SEED"
"""Environment variables of the command, in which this module is a plug-in of pytest."""

TICK_S = 0.1

Span = tuple[float, float]


@dataclass
class Process:
    """`since` is when it was started, in the kernel's ticks: another process may get its number later."""

    pid: int
    parent: int
    state: str
    since: str


def processes() -> dict[int, Process]:
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                values = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it ended
                continue
            found[int(folder.name)] = Process(int(folder.name), int(values[1]), values[0], values[19])
    return found


@dataclass
class Stutter:
    """Holds up a process and all that descends from it, whoever adopts them later. A process that a test stops while it
    is held up goes on with the others."""

    root: int
    held: Span
    every: Span
    seed: int
    known: dict[int, str] = field(default_factory=dict[int, str])
    draws: dict[int, random.Random] = field(default_factory=dict[int, random.Random])
    due: dict[int, float] = field(default_factory=dict[int, float])
    stopped: set[int] = field(default_factory=set[int])
    times: int = 0

    def tick(self, now: float) -> None:
        """Stop and continue the processes whose time has come."""
        running = processes()
        self._meet(running, now)
        for pid in [pid for pid, due in self.due.items() if due <= now]:
            if pid in self.stopped:
                self._send(pid, signal.SIGCONT)
                self.stopped.discard(pid)
                self.due[pid] = now + self.draws[pid].uniform(*self.every)
            else:
                if running[pid].state not in "TtZ":  # a test that stopped it itself expects that it stays so
                    self._send(pid, signal.SIGSTOP)
                    self.stopped.add(pid)
                    self.times += 1
                self.due[pid] = now + self.draws[pid].uniform(*self.held)

    def release(self) -> None:
        for pid in self.stopped & processes().keys():
            self._send(pid, signal.SIGCONT)
        self.stopped.clear()

    def _meet(self, running: dict[int, Process], now: float) -> None:
        """Forget processes that ended, and find new children of known ones."""
        for pid in [pid for pid, since in self.known.items() if pid not in running or running[pid].since != since]:
            del self.known[pid], self.draws[pid], self.due[pid]
            self.stopped.discard(pid)
        while new := self._unknown(running):
            for pid in sorted(new):
                self.known[pid] = running[pid].since
                self.draws[pid] = random.Random(f"{self.seed} {len(self.draws)} {pid}")
                self.due[pid] = now + self.draws[pid].uniform(0.0, self.every[1])

    def _unknown(self, running: dict[int, Process]) -> set[int]:
        """The root and the children of known processes that are not known yet."""
        family = (p for p in running.values() if p.pid == self.root or p.parent in self.known)
        return {p.pid for p in family if p.pid not in self.known}

    def _send(self, pid: int, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def delay_threads(longest_s: float, seed: int) -> None:
    """Let the threads of this process and of its forks run up to `longest_s` after they were started."""
    start, sleep, draws = threading.Thread.start, time.sleep, random.Random(seed)

    def late(self: threading.Thread) -> None:
        body = self.run

        def run() -> None:
            vars(self).pop("run", None)  # the method of its class again: a thread that refers to itself is not freed
            sleep(draws.uniform(0.0, longest_s))
            body()

        self.run = run
        start(self)

    threading.Thread.start = late


def delay_signals(longest_s: float, seed: int) -> None:
    """Let the signals of this process and of its forks reach other processes up to `longest_s` after they were sent."""
    start, sleep, draws = threading.Thread.start, time.sleep, random.Random(seed)

    def late(send: Callable[[int, int], None], pid: int, number: int) -> None:
        since = started(pid)
        if number == 0 or pid in (os.getpid(), 0) or since is None:
            return send(pid, number)

        def deliver() -> None:
            sleep(draws.uniform(0.0, longest_s))
            if started(pid) == since:
                with suppress(ProcessLookupError, PermissionError):
                    send(pid, number)

        start(threading.Thread(target=deliver))
        return None

    os.kill, os.killpg = partial(late, os.kill), partial(late, os.killpg)


def started(pid: int) -> str | None:
    """When a process was started, in the kernel's ticks; None if it ended or never was."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return None


def run(command: Sequence[str], held: Span, every: Span, late_s: float, seed: int) -> int:
    """Returns the exit code of the command."""
    root = str(Path(__file__).resolve().parents[1])
    env = {
        **os.environ,
        LATE: str(late_s),
        SEED: str(seed),
        "PYTEST_PLUGINS": ",".join(filter(None, [os.environ.get("PYTEST_PLUGINS"), "tools.stutter"])),
        "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), root])),
    }
    child = subprocess.Popen(command, env=env)
    stutter = Stutter(child.pid, held, every, seed)
    try:
        while child.poll() is None:
            stutter.tick(time.monotonic())
            time.sleep(TICK_S)
    except KeyboardInterrupt:
        child.terminate()
    finally:
        stutter.release()
        child.wait()
    print(f"stutter: {stutter.times} times a process was held up", file=sys.stderr)
    return child.returncode


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--held", type=float, nargs=2, default=(0.3, 1.5), metavar="S", help="seconds of one stop")
    parser.add_argument("--every", type=float, nargs=2, default=(1.0, 2.0), metavar="S", help="seconds between stops")
    parser.add_argument("--late", type=float, default=0.3, metavar="S", help="longest delay of a thread or signal")
    parser.add_argument("command", nargs="+", help="after --")
    given = parser.parse_args(arguments)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return run(given.command, tuple(given.held), tuple(given.every), given.late, given.seed)
    finally:
        signal.signal(signal.SIGTERM, before)


if LATE in os.environ:
    delay_signals(float(os.environ[LATE]), int(os.environ[SEED]))
    delay_threads(float(os.environ[LATE]), int(os.environ[SEED]))

if __name__ == "__main__":
    sys.exit(main())
