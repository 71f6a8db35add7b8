"""Help texts and shell completion, of every command."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer.main

from retouch.cli import app
from tests.command_line import Outcome, retouch


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every group and command with its path."""
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*path, name))


COMMANDS = dict(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_breaks_lines_where_the_terminal_ends(path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags and lists show no type of Python, and a sentence of the source is one line on a wide terminal."""
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.setenv("TERMINAL_WIDTH", "1000")
    shown = retouch(*path, "--help").out
    assert "<bool>" not in shown and "list[" not in shown
    said = COMMANDS[path].help or ""
    first = " ".join(said.partition("\n\n")[0].split())
    assert first in shown


def completed(words: str, monkeypatch: pytest.MonkeyPatch) -> Outcome:
    monkeypatch.setenv("_RETOUCH_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split(" ")) - 1))
    return retouch()


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("retouch ch", ["check"]),
        ("retouch reward s", ["serve", "score"]),
        ("retouch train run.yaml --qu", ["--quiet"]),
    ],
)
def test_a_shell_completes_commands_and_options(typed: str, found: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert completed(typed, monkeypatch).out.split() == found
