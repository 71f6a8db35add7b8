"""Errors of the file system that whoever runs a command can mend, as one line."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS)
_IN_THE_WAY = (errno.ENOTDIR, errno.EEXIST, errno.EISDIR)

_OS_ERROR = re.compile(r"serializing: .*\(os error (\d+)\)")  # how safetensors says it
_CUT_OFF = re.compile(r"inline_container\.cc.*(unexpected pos|write)", re.DOTALL)  # how torch says it


@contextmanager
def writing(place: Path | str) -> Iterator[None]:
    """Name the place in failures to write that do not say where they happened, and make OSErrors of those that torch
    and safetensors raise.

    Raises:
        OSError: with the number and the path of what could not be written.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL and error.filename is None:
            error.filename = str(place)
        raise
    except Exception as error:
        if type(error).__name__ == "SafetensorError" and (told := _OS_ERROR.search(str(error))):
            number = int(told[1])
            raise OSError(number, os.strerror(number), str(place)) from error
        if isinstance(error, RuntimeError) and _CUT_OFF.search(str(error)):
            raise OSError(errno.ENOSPC, "writing was cut off, as on a full disk", str(place)) from error
        raise


def file_problem(error: OSError) -> str | None:
    """What is wrong with which path, and what to do; None for an error that is not the disk's."""
    path = None if error.filename is None else str(error.filename)
    where = "" if path is None else f"{path}: "
    reason = (error.strerror or "").lower()
    if error.errno in _FULL:
        return f"{where}{reason}; free space, or set logging.dir or --out to another disk"
    if path is None:
        return None
    if error.errno in _CLOSED:
        return f"{where}{reason}; permit it, or set logging.dir or --out to a folder that can be written"
    if error.errno in _IN_THE_WAY and (error.errno == errno.ENOTDIR or Path(path).is_file()):
        return f"{where}a file is where a folder should be; set logging.dir or --out to a folder"
    return None
