"""Help texts and shell completion, of every command."""

from __future__ import annotations

import ast
import inspect
import textwrap
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


@pytest.mark.parametrize("path", [path for path, one in COMMANDS.items() if one.callback], ids=" ".join)
def test_errors_of_files_name_an_option_of_the_command(path: tuple[str, ...]) -> None:
    """`writing` names `--out` where it is given no other option or argument."""
    source = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(COMMANDS[path].callback))))
    calls = [c for c in ast.walk(source) if isinstance(c, ast.Call) and isinstance(c.func, ast.Name)]
    named = [ast.literal_eval(c.args[1]) if c.args[1:] else "--out" for c in calls if c.func.id == "writing"]  # type: ignore[attr-defined]
    known = {"logging.dir", *(name for one in COMMANDS[path].params for name in (*one.opts, one.name.upper()))}
    assert {name for text in named for name in text.split(" and ")} <= known


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
