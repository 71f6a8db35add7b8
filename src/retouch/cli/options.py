"""Options that several commands share, and how their values are read."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from retouch.errors import ConfigError
from retouch.process.plain_text import PrintableFormatter

RunFile = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="Run file, or example:NAME of a published one.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[key=value ...]", help="Values by dotted key.")]
Trust = Annotated[
    bool, typer.Option("--trust", help="Use the code and the hosts that a run file in a run directory names.")
]
Json = Annotated[bool, typer.Option("--json", help="JSON output.")]


def start_logging(verbose: bool = False) -> None:
    """Send log lines to standard error."""
    from rich.console import Console
    from rich.logging import RichHandler

    handler = RichHandler(console=Console(stderr=True), show_path=False, log_time_format="%H:%M:%S", markup=False)
    handler.addFilter(lambda record: not getattr(record, "in_bar", False))  # the progress bar shows these
    handler.setFormatter(PrintableFormatter("%(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("retouch").setLevel(logging.DEBUG if verbose else logging.INFO)


_MOST_SIDE = 8192
"""Pixels, those of the largest image that a reward server takes."""


def parse_size(text: str, option: str) -> tuple[int, int]:
    """(height, width) of "512" or "32x64".

    Raises:
        ConfigError: neither form.
    """
    parts = text.lower().split("x")
    if len(parts) not in (1, 2) or not all(map(_is_side, parts)):
        raise ConfigError(
            f"{option}: given {text[:80]!r}; write a side like 512, or HEIGHTxWIDTH like 32x64, of at most {_MOST_SIDE}"
        )
    return int(parts[0]), int(parts[-1])


def _is_side(text: str) -> bool:
    return text.isdecimal() and len(text) <= len(str(_MOST_SIDE)) and 1 <= int(text) <= _MOST_SIDE
