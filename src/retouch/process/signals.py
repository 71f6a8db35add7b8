"""The signals that end a command, and a run after a checkpoint."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that schedulers send to every process of a job some time before they end it (`sbatch --signal=USR1@300`):
SIGTERM follows, and is no second request."""

ENDING = (signal.SIGTERM, signal.SIGHUP, *NOTICES)
"""Signals of a scheduler, and of a terminal that is closed."""

interrupted: list[int] = []
"""Signals that raised KeyboardInterrupt in this command. A library may have made another error of it, such as a file
that cannot be read."""


def interrupt_on_signals() -> None:
    """From here on, a signal that would end the process raises KeyboardInterrupt: exit code 3, and temporary files are
    deleted. Only the main thread of a process can set this."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGINT, *ENDING):
        if is_free(number, signal.getsignal(number)):
            signal.signal(number, _interrupt)


def is_free(number: int, handler: Any) -> bool:
    """Whether a handler is a default, and no choice of the program or the user. `scripts/launch.sh` ignores `NOTICES`
    for the sake of torch's launcher, whose processes inherit that; nohup ignores SIGHUP for good."""
    defaults = (signal.SIG_DFL, signal.default_int_handler, _interrupt)
    return handler in defaults or (number in NOTICES and handler == signal.SIG_IGN)


def ignore_notices() -> None:
    """In a process that its parent ends: the parent decides what follows from a notice."""
    for number in NOTICES:
        signal.signal(number, signal.SIG_IGN)


def leave_to_parent(number: int) -> None:
    """In a process that its parent ends: a signal that a scheduler sends to every process of a job changes nothing, and
    what this process starts, or forks, is ended by it as before."""
    own = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() != own:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(number, handle)  # ignored, it would be for programs that this process starts, too


def _interrupt(number: int, frame: FrameType | None) -> None:
    interrupted.append(number)
    raise KeyboardInterrupt
