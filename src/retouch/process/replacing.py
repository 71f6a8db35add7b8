"""A file that is written beside the one whose place it takes."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from retouch.process.machine import process_mark


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """A path beside `path`, of a file to be written and moved there; what is left of it at the end is removed.

    Nothing is written through a link, and no device, such as `/dev/null` or `/dev/stdout`, is replaced.

    Raises:
        OSError: of `path`, also where the file beside it cannot be written.
    """
    if path.is_char_device() or path.is_block_device() or (path.is_symlink() and path.is_fifo()):
        raise OSError(errno.EINVAL, "not a file", str(path))
    temporary = path.with_name(f".{path.name[:48]}.{process_mark()}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        yield temporary
    except OSError as error:
        if error.filename in (temporary, str(temporary), os.fsencode(temporary)):
            error.filename = str(path)
            error.is_of_output = True  # type: ignore[attr-defined]
        raise
    finally:
        with suppress(OSError):  # it would take the place of the error before it
            temporary.unlink(missing_ok=True)
