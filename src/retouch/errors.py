"""Every error that a user can cause, with the exit code of the command line.

Exit codes: 1 the run failed, 2 wrong usage, run file or input files, 3 stopped on purpose and resumable. The message is
complete: what was given, what is expected, what to set. The command line prints it without a traceback.
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from retouch.process.plain_text import printable


class RetouchError(Exception):
    """Base class: catch it to catch all of them. A message longer than `MOST_CHARACTERS`, as of a value of that length
    that it quotes, is cut in the middle; control characters are escaped."""

    exit_code: int = 1

    def __init__(self, *given: object) -> None:
        super().__init__(*(printable(_shortened(one)) if isinstance(one, str) else one for one in given))


@cache
def log_once(log: logging.Logger, message: str, *given: object) -> None:
    """Log a warning, from the caller's line, where this process has not logged it about the same values yet."""
    log.warning(message, *given, stacklevel=2)  # a server's log counts lines by their place; `cache` adds no frame


LONG_S = 3.0
"""Seconds after which a wait is logged."""


@contextmanager
def logging_long(log: logging.Logger, work: str) -> Iterator[None]:
    """Log what the block does or waits for, once, if it takes longer than `LONG_S`; in the first process of a run."""
    timer = threading.Timer(LONG_S, log.info, ("%s", work))
    timer.daemon = True
    if os.environ.get("RANK", "0") == "0":
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


MOST_CHARACTERS = 8000
"""Characters of a message."""


def _shortened(message: str) -> str:
    if len(message) <= MOST_CHARACTERS:
        return message
    head, tail = MOST_CHARACTERS * 3 // 4, MOST_CHARACTERS // 4
    return f"{message[:head]} [...] {message[-tail:]}"


def shown(value: object, most: int = 80) -> str:
    """The start of a foreign value, for a message."""
    text = repr(value)
    return text if len(text) <= most else text[:most] + "..."


def first_line(error: BaseException) -> str:
    """The first line of a foreign error, without a full stop or colon at its end; its type if it has no text."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(". :")


def why_unreadable(error: Exception) -> str | None:
    """The problem of a model's files, from an error of the library that loads them, which may raise anything on damaged
    ones; None for an error of another cause: a missing package, too little memory, or a message of this package."""
    if isinstance(error, RetouchError | ImportError | MemoryError):
        return None
    if isinstance(error, RuntimeError) and "memory" in str(error):
        return None
    if isinstance(error, pickle.UnpicklingError):
        return (
            "a file of weights is damaged, or a pickle of more than tensors, which could run any program; use a copy "
            "with safetensors files"
        )
    told = first_line(error)
    if isinstance(error, OSError | ValueError | RuntimeError) or told == type(error).__name__:
        return told
    return f"{type(error).__name__}: {told}"


class InputError(RetouchError, ValueError):
    """Base class of options and files that cannot be used."""

    exit_code = 2


class ConfigError(InputError):
    """A run file, an option or a combination that cannot work."""


class DataError(InputError):
    """A dataset that cannot be used."""


class ImageProblem(InputError):
    """An image or mask that cannot be used."""


class ModelFilesError(InputError):
    """Model files that are missing or differ from what the run file names."""


class AdapterFileError(InputError):
    """A file that is no adapter, or an incomplete one."""


class DamagedFile(InputError):
    """A file that `torch.load` cannot read."""


class RefusedFile(DamagedFile):
    """A pickle of more than tensors and plain values: it could run any program."""


class CheckpointError(InputError):
    """A checkpoint that is missing, incomplete, damaged or of another model."""


class FontsMissing(RetouchError, RuntimeError):
    """The font packages are not installed."""

    exit_code = 2


class ResponseTooLong(InputError):
    """A completion with more tokens than the diffusion transformer takes."""


class RewardOutage(RetouchError, RuntimeError):
    """No reward server answers."""

    exit_code = 3


class FailureRateExceeded(RetouchError, RuntimeError):
    """Too many rewards failed."""

    exit_code = 3


class Diverged(RetouchError, RuntimeError):
    """A loss or gradient contains NaN or Inf. The weights are those of the last step."""


class OutOfMemory(RetouchError, RuntimeError):
    """The device has too little memory, and a smaller micro-batch does not help."""


def is_device_full(error: BaseException) -> bool:
    """Whether it is torch's error of a device without free memory; torch need not be imported for it."""
    return type(error).__name__ == "OutOfMemoryError"


@contextmanager
def installed(what: str = "this reward", extra: str = "train") -> Iterator[None]:
    """Inside, a library that is not installed is a ConfigError with the command that installs it."""
    try:
        yield
    except ImportError as error:
        extra = "train" if error.name == "torch" else extra
        needed = error.name or f"another version ({first_line(error)})"  # libraries that check their own have no name
        raise ConfigError(f'{what} needs {needed}: pip install "retouch[{extra}]"') from None


@contextmanager
def fitting(what: str, remedies: str) -> Iterator[None]:
    """Inside, memory of the device that ends is an error of one line.

    Args:
        what: that takes it, behind "out of memory".
        remedies: options to set, behind "set".

    Raises:
        OutOfMemory: it ended.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_device_full(error):
            raise
        raise OutOfMemory(f"out of memory {what} ({first_line(error)}); set {remedies}") from error


class Stopped(RetouchError):
    """A run that stopped on purpose, with a checkpoint to resume from.

    Attributes:
        code: exit code: 3, or 0 if the time limit of the run file was reached.
    """

    def __init__(self, reason: str, code: int) -> None:
        super().__init__(reason)
        self.exit_code = self.code = code


OWN = ("retouch", "retouch_bench", "retouch_glyphs")
"""Packages of this distribution."""

_FOLDERS = tuple(f"{Path(__file__).parents[1] / name}{os.sep}" for name in OWN)
_STANDARD_LIBRARY = str(Path(os.__file__).parent)


def code_place(error: BaseException) -> str:
    """ ", at FILE:LINE" of the last custom line that raised an error, outside this package, the standard library and
    installed packages; "" if there is none. For messages in one line, which have no traceback."""
    custom = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_custom(frame.filename)]
    return f", at {Path(custom[-1].filename).name}:{custom[-1].lineno}" if custom else ""


def is_own(module: str) -> bool:
    """Whether a module is of this distribution."""
    return module.partition(".")[0] in OWN


def _is_custom(file: str) -> bool:
    is_installed = not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)
    return not is_installed and not file.startswith((*_FOLDERS, _STANDARD_LIBRARY + os.sep, "<"))
