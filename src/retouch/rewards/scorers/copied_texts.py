"""Texts that the user copied from a published repository; Python files are parsed, never run."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path

from retouch.errors import ConfigError
from retouch.files.disk import expanded

MOST_CHARACTERS = 1_000_000


def copied_text(reward: str, prompts: str, slots: Sequence[str], source: str) -> str:
    """The first text of the user's copy with every slot in it: that of a text file, or a string constant of a Python
    file.

    Args:
        source: names the published file in messages.

    Raises:
        ConfigError: no such file, or no such text.
    """
    where, path = f"reward {reward!r}: prompts: given {prompts!r}", expanded(prompts)
    if not path.is_file():
        raise ConfigError(f"{where}, which is no file; set it to your copy of {source}")
    try:
        nodes = ast.walk(parsed_file(path)) if path.suffix == ".py" else [ast.Constant(path.read_text("utf-8"))]
    except ValueError as error:
        raise ConfigError(f"{where}, which cannot be read: {error}; give {source}") from None
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    found = next((text for text in texts if all(slot in text for slot in slots)), None)
    if found is None:
        raise ConfigError(f"{where}, which has no text with {' and '.join(slots)}; give {source}")
    return found


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
