"""Texts of a Python file that the user copied from a published repository: parsed, never run."""

from __future__ import annotations

import ast
from pathlib import Path

MOST_CHARACTERS = 1_000_000


def constants_of(path: Path) -> list[str]:
    """String constants of a Python file. Raises as `parsed_file`."""
    nodes = ast.walk(parsed_file(path))
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def parsed_file(path: Path) -> ast.Module:
    """The syntax tree of a file.

    Raises:
        OSError: no such file, or not a file.
        ValueError: not Python in UTF-8.
    """
    with path.open(encoding="utf-8") as stream:  # bounded: a device has no end
        source = stream.read(MOST_CHARACTERS + 1)
    if len(source) > MOST_CHARACTERS:
        raise ValueError(f"over {MOST_CHARACTERS} characters")
    try:
        return ast.parse(source)
    except SyntaxError as error:
        raise ValueError(str(error)) from None
    except (RecursionError, MemoryError):
        raise ValueError("nested too deep") from None
