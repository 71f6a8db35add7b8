"""Reasons to stop a run, decided by all processes together."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple

logger = logging.getLogger(__name__)

ENDING = (signal.SIGTERM, signal.SIGHUP)
"""Signals of a scheduler, and of a terminal that is closed."""


SAME_REQUEST_S = 1.0
"""Signals that follow the first within so many seconds belong to it: Ctrl-C reaches every process of a terminal, and
torchrun and accelerate pass it on to the same processes."""

CONTINUE = "continue with resume=auto"
"""End of the message of a run that stopped and can be continued."""

interrupted: list[int] = []
"""Signals that raised KeyboardInterrupt in this command. A library may have made another error of it, such as a file
that cannot be read."""


def interrupt_on_signals() -> None:
    """From here on, a signal that would end the process raises KeyboardInterrupt: exit code 3, and temporary files are
    deleted. Only the main thread of a process can set this."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        interrupted.append(number)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGINT, *ENDING):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, interrupt)


class Stop(NamedTuple):
    """A stop that was requested. `exit_code` is 0 where nothing is wrong."""

    reason: str
    exit_code: int
    next_step: str = CONTINUE

    def message(self, step: int) -> str:
        return f"{self.reason} at step {step}; {self.next_step}"


class StopRequests:
    """A signal, an alarm, or the end of `training.max_minutes`.

    Args:
        max_minutes: None for no limit.
        any_rank: whether a flag is set on any process; a collective.
        where: the next place at which a run can stop, for the log.
    """

    def __init__(self, max_minutes: float | None, any_rank: Callable[[bool], bool], where: str) -> None:
        self._max_minutes, self._any_rank, self._where = max_minutes, any_rank, where
        self._started = time.monotonic()
        self._signal: str | None = None
        self._signalled_at = 0.0
        self.alarm: str | None = None

    @contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Inside, SIGINT, SIGTERM and SIGHUP (unless nohup ignores it) request a stop; one that follows later than
        `SAME_REQUEST_S` raises KeyboardInterrupt."""
        heard = [signal.SIGINT, *(n for n in ENDING if signal.getsignal(n) != signal.SIG_IGN)]
        before = {number: signal.signal(number, self._on_signal) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @property
    def heard(self) -> bool:
        """Whether this process got a signal; others may not have."""
        return self._signal is not None

    def asked(self) -> Stop | None:
        """The same on every process; None to continue. Each request may have reached some processes only."""
        if self._any_rank(self._signal is not None):
            return Stop(f"received {self._signal or 'a signal on another process'}", 3)
        if self._any_rank(self.alarm is not None):
            return Stop(self.alarm or "an alarm on the first process", 3, f"correct the cause, then {CONTINUE}")
        limit = self._max_minutes
        if limit is not None and self._any_rank(time.monotonic() - self._started > 60 * limit):
            return Stop(f"training.max_minutes = {limit:g} reached", 0)
        return None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None:
            if time.monotonic() - self._signalled_at < SAME_REQUEST_S:
                return
            raise KeyboardInterrupt  # the second request: leave now; the last checkpoint stands
        self._signal, self._signalled_at = signal.Signals(number).name, time.monotonic()
        logger.warning("%s: stopping at %s; send it again to leave at once", self._signal, self._where)
