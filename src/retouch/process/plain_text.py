"""Text of files and other programs on a terminal and in logs: without the control characters that change a terminal,
and without halves of surrogate pairs, which cannot be written."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Sequence
from pathlib import Path

_ESCAPED = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
_ESCAPED |= {code: f"\\u{code:04x}" for code in range(0xD800, 0xE000)}  # of names that are not UTF-8


def printable(text: str) -> str:
    """A text with escapes in place of control characters other than tabs and line breaks, and of halves of pairs."""
    return text.translate(_ESCAPED)


class PrintableFormatter(logging.Formatter):
    """Formats records as `printable` text."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def count_of(number: int, one: str, several: str | None = None) -> str:
    """A number of things in words: "1 image", "1,200 images"; `several` for another plural than that with s."""
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def some_of(parts: Sequence[str], most: int = 8) -> str:
    """The first few parts for a message, with spaces between."""
    return " ".join([*parts[:most], *(["…"] if len(parts) > most else [])])


def continue_command(run: Path) -> str:
    """The command that continues a run, as a shell takes it."""
    return f"retouch train {shlex.quote(str(run / 'config.yaml'))} resume=auto"
