"""Standard output and standard error that outlast their readers.

`retouch train ... | head`, a `tee` that is killed, a closed terminal, a full disk behind the console: every library
that writes there raises its own error, or ends the process. A failed write is dropped here, below all of them, and
the program goes on.
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class LastingFile(io.FileIO):
    """A file descriptor; what cannot be written to it is dropped.

    Attributes:
        before: the stream that it stands in for, which would close the descriptor if nobody held it.
        problem: error of the first write that failed.
    """

    before: Any = None
    problem: OSError | None = None

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            while (
                written := super().write(data)
            ) is None:  # another program made the pipe non-blocking, and it is full
                select.select([], [self], [])
        except OSError as error:
            self.problem = self.problem or error
            return memoryview(data).nbytes
        return written


def outlast_readers() -> None:
    """From here on, no write to standard output or standard error fails; a character that their encoding has not is
    escaped. Streams of other kinds (a notebook's, a
    test's) stay. A closed descriptor is opened on the null device, or the next file to be opened would receive what
    libraries print."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    for name, number in (("stdout", 1), ("stderr", 2)):
        before = getattr(sys, name)
        if before is None:
            before = open(number, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        if (lasting := _lasting(before, number)) is not None:
            setattr(sys, name, lasting)


@contextmanager
def outlasting_readers() -> Iterator[None]:
    """`outlast_readers` within it."""
    before = sys.stdout, sys.stderr
    outlast_readers()
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


def output_problem(name: str) -> OSError | None:
    """The error of the first write to "stdout" or "stderr" that was dropped; None if all was written."""
    file = _file(getattr(sys, name))
    return file.problem if isinstance(file, LastingFile) else None


def results_problem() -> str | None:
    """Why results on standard output are lost, for a message; None also if a reader ended because it had enough."""
    problem = output_problem("stdout")
    if problem is None or problem.errno == errno.EPIPE:
        return None
    return f"standard output: {(problem.strerror or str(problem)).lower()}; write it to another file or disk"


def _lasting(before: Any, number: int) -> io.TextIOWrapper | None:
    """A stream like another one on the same descriptor, whose writes do not fail; None if that is none of a file."""
    file = _file(before)
    if type(file) is not io.FileIO or file.fileno() != number:
        return None
    with suppress(OSError):
        before.flush()
    lasting = LastingFile(number, "w", closefd=False)
    lasting.before = before
    # A prompt may hold a character that the encoding of a terminal (cp1252, ASCII) has not, and a file name half of a
    # surrogate pair. The latter alone is written as it came under `surrogateescape`.
    names_alone = before.errors == "surrogateescape" and not before.encoding.lower().startswith("utf")
    return io.TextIOWrapper(
        io.BufferedWriter(lasting),
        encoding=before.encoding,
        errors="backslashreplace" if names_alone or before.errors == "strict" else before.errors,
        line_buffering=before.line_buffering or before.write_through,
        write_through=before.write_through,
    )


def _file(stream: Any) -> Any:
    """The raw file below the buffer of a text stream; None for another kind of stream."""
    buffer = getattr(stream, "buffer", None)
    return getattr(buffer, "raw", buffer)
