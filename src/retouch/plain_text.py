"""Text of files and other programs on a terminal and in logs: without the control characters that change a terminal."""

from __future__ import annotations

import logging

_ESCAPED = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """A text with escapes in place of control characters other than tabs and line breaks."""
    return text.translate(_ESCAPED)


class PrintableFormatter(logging.Formatter):
    """Formats records as `printable` text."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))
