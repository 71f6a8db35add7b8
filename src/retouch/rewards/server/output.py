"""The log of a server, and its bounds: lines that repeat, and the output of scorers."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from contextlib import suppress

from retouch.process.console import outlast_readers
from retouch.process.machine import let_threads_sleep, return_memory_regularly
from retouch.process.signals import ignore_notices

_WINDOW_S = 60.0
_REPEATS = 10  # lines of one kind per window
_KINDS = 1000
_BURST = 1024 * 1024  # bytes of output that pass at once
_PER_S = 4 * 1024  # bytes of output that pass in the long run: 350 MB in a day
_TAIL = 8 * 1024  # last bytes that are written after all: a process that ends reports why
_READ = 64 * 1024
_STDERR = 2  # a handle: it is that of the log file, whatever Python does with its stream


def begin_process() -> None:
    """Set up a process of a server: it outlasts the terminal and the readers of its output, logs from INFO on,
    returns freed memory, and its threads sleep while they wait."""
    outlast_readers()
    let_threads_sleep()
    ignore_notices()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    for name in ("retouch", "__main__"):  # the module of a process that was started by `python -m`
        logging.getLogger(name).setLevel(logging.INFO)
    return_memory_regularly()


class FewRepeats(logging.Filter):
    """Passes ten lines of one kind a minute; the next one after that states how many were left out.

    A kind is a place of the code: peers choose the values in a line, and could make each another one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._kinds: OrderedDict[tuple[str, int], tuple[float, int]] = OrderedDict()  # -> begin of its window, lines

    def filter(self, record: logging.LogRecord) -> bool:
        now, kind = time.monotonic(), (record.pathname, record.lineno)
        with self._lock:
            began, lines = self._kinds.get(kind, (now, 0))
            left_out = lines - _REPEATS if now - began >= _WINDOW_S else 0
            began, lines = (now, 1) if now - began >= _WINDOW_S else (began, lines + 1)
            self._kinds[kind] = (began, lines)
            while len(self._kinds) > _KINDS:
                self._kinds.popitem(last=False)
        if left_out > 0:
            record.msg = f"{record.getMessage()} ({left_out} more such lines were left out)"
            record.args = ()
        return lines <= _REPEATS


class Allowance:
    """Bytes that may pass: a burst, then so many a second."""

    def __init__(self) -> None:
        self._left = float(_BURST)
        self._at = time.monotonic()

    def take(self, count: int) -> bool:
        """Whether `count` more bytes may pass; if so, they are counted."""
        now = time.monotonic()
        self._left = min(_BURST, self._left + (now - self._at) * _PER_S)
        self._at = now
        if count > self._left:
            return False
        self._left -= count
        return True


def pass_on(source: int, allowance: Allowance) -> None:
    """Copy the output of a process, of which `source` is the read end of a pipe, to the standard error of this one,
    within an allowance, in a thread. A process whose output nobody read would stop."""
    threading.Thread(target=_pass_on, args=(source, allowance), daemon=True, name="worker-output").start()


def _pass_on(source: int, allowance: Allowance) -> None:
    left_out, tail = 0, b""
    while chunk := os.read(source, _READ):
        if allowance.take(len(chunk)):
            _write(_note(left_out, tail) + chunk)
            left_out, tail = 0, b""
        else:
            left_out += len(chunk)
            tail = (tail + chunk)[-_TAIL:]
    _write(_note(left_out, tail))
    os.close(source)


def _note(left_out: int, tail: bytes) -> bytes:
    if not left_out:
        return b""
    return f"\n[{left_out - len(tail)} bytes of the scorers' output were left out]\n".encode() + tail


def _write(data: bytes) -> None:
    with suppress(OSError, ValueError):  # a full disk, a reader that is gone: the scorer goes on
        while data:
            data = data[os.write(_STDERR, data) :]
