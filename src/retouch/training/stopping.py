"""Reasons to stop a run, decided by all processes together."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from retouch.process.plain_text import continue_command
from retouch.process.signals import ENDING, NOTICES, is_free

logger = logging.getLogger(__name__)

SAME_REQUEST_S = 1.0
"""Signals that follow the first within so many seconds belong to it: Ctrl-C reaches every process of a terminal, and
torchrun and accelerate pass it on to the same processes."""

CONTINUE = "continue with resume=auto"
"""End of the message of a run that stopped and can be continued; `continuing` names its run file."""


class Stop(NamedTuple):
    """A stop that was requested. `exit_code` is 0 where nothing is wrong."""

    reason: str
    exit_code: int
    next_step: str = CONTINUE

    def message(self, step: int, run: Path) -> str:
        """The end of a run that stopped, with the whole command that continues it."""
        return f"{self.reason} at step {step}; {continuing(run, self.next_step)}"


def continuing(run: Path, next_step: str = CONTINUE) -> str:
    """A text with the whole command in the place of its `resume=auto`; the command of several processes is their
    launcher's."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return next_step
    return next_step.replace("resume=auto", continue_command(run))


class StopRequests:
    """A signal, an alarm, a plateau, or the end of `training.max_minutes`.

    Args:
        max_minutes: None for no limit.
        any_rank: whether a flag is set on any process; a collective.
        where: the next place at which a run can stop, for the log.
        on_plateau: whether evaluations may set `plateau`.

    Attributes:
        alarm, plateau: a reason to stop that the first process found.
    """

    def __init__(
        self, max_minutes: float | None, any_rank: Callable[[bool], bool], where: str, *, on_plateau: bool = False
    ) -> None:
        self._max_minutes, self._any_rank, self._where = max_minutes, any_rank, where
        self._on_plateau = on_plateau
        self._started = time.monotonic()
        self._signal: str | None = None
        self._requested_at: float | None = None
        self.alarm: str | None = None
        self.plateau: str | None = None

    @contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Inside, SIGINT, SIGTERM, SIGHUP (unless nohup ignores it) and `NOTICES` (unless the program has a handler of
        its own) request a stop. SIGINT, SIGTERM or SIGHUP that follows another of these three later than
        `SAME_REQUEST_S` raises KeyboardInterrupt."""
        heard = [signal.SIGINT, *(n for n in ENDING if _may_take(n))]
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
        # Each question is a collective, and every process asks the same ones in this order until one is answered: which
        # of them are asked may depend on options alone, never on what one process has heard.
        if self._any_rank(self._signal is not None):
            return Stop(f"received {self._signal or 'a signal on another process'}", 3)
        if self._any_rank(self.alarm is not None):
            return Stop(self.alarm or "an alarm on the first process", 3, f"correct the cause, then {CONTINUE}")
        if self._on_plateau and self._any_rank(self.plateau is not None):
            return Stop(
                self.plateau or "a plateau on the first process", 0, f"{CONTINUE} training.stop_on_plateau=false"
            )
        limit = self._max_minutes
        if limit is not None and self._any_rank(time.monotonic() - self._started > 60 * limit):
            return Stop(f"training.max_minutes = {limit:g} reached", 0)
        return None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number not in NOTICES:
            now = time.monotonic()
            if self._requested_at is None:
                self._requested_at = now
            elif now - self._requested_at >= SAME_REQUEST_S:
                raise KeyboardInterrupt  # the second request: leave now; the last checkpoint stands
        if self._signal is None:
            self._signal = signal.Signals(number).name
            again = "SIGTERM twice" if number in NOTICES else "it again"
            logger.warning("%s: stopping at %s; send %s to leave at once", self._signal, self._where, again)


def _may_take(number: int) -> bool:
    handler = signal.getsignal(number)
    return is_free(number, handler) if number in NOTICES else handler != signal.SIG_IGN
