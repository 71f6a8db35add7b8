"""Options that several commands share, and how their values are read."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from retouch.errors import ConfigError
from retouch.process.plain_text import PrintableFormatter

RunFile = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="Run file, or example:NAME of a published one.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[key=value ...]", help="Values by dotted key.")]
Trust = Annotated[
    bool, typer.Option("--trust", help="Use the code and the hosts that a run file in a run directory names.")
]
Json = Annotated[bool, typer.Option("--json", help="JSON output.")]


Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only warnings and errors on standard error.")]


def start_logging(verbose: bool = False, quiet: bool = False) -> None:
    """Send log lines to standard error.

    Args:
        quiet: only warnings and errors, and no progress bar; log.txt of a run is not affected.
    """
    handler = _handler()
    handler.addFilter(lambda record: not getattr(record, "in_bar", False))  # the progress bar shows these
    handler.setLevel(logging.WARNING if quiet else logging.NOTSET)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("retouch").setLevel(logging.DEBUG if verbose else logging.INFO)


class _StandardError(logging.StreamHandler[Any]):
    """Writes to what standard error is at each record: a program may have put another stream there."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def _handler() -> logging.Handler:
    """Log lines for a terminal, or, in a file or a pipe, one line for each record, which nothing breaks."""
    from rich.console import Console
    from rich.logging import RichHandler

    console = Console(stderr=True)
    if console.is_terminal:
        rich = RichHandler(console=console, show_path=False, log_time_format="%H:%M:%S", markup=False)
        rich.setFormatter(PrintableFormatter("%(message)s"))
        return rich
    handler = _StandardError()
    handler.setFormatter(PrintableFormatter("%(asctime)s %(levelname)-8s %(message)s", "%H:%M:%S"))
    return handler


def note_loading(family: str) -> None:
    """Log that torch is imported, which takes seconds, and a model is loaded."""
    logging.getLogger(__name__).info("loading torch, then %s", family)


_MOST_SIDE = 8192
"""Pixels, those of the largest image that a reward server takes."""


def parse_size(text: str, option: str) -> tuple[int, int]:
    """(height, width) of "512" or "32x64".

    Raises:
        ConfigError: neither form.
    """
    parts = text.lower().split("x")
    if len(parts) not in (1, 2) or not all(is_count(part, _MOST_SIDE) for part in parts):
        raise ConfigError(
            f"{option}: given {text[:80]!r}; write a side like 512, or HEIGHTxWIDTH like 32x64, of at most {_MOST_SIDE}"
        )
    return int(parts[0]), int(parts[-1])


def is_count(text: str, most: int) -> bool:
    """Whether a text is a number from 1 to `most`."""
    return text.isdecimal() and len(text) <= len(str(most)) and 1 <= int(text) <= most
