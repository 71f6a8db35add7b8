"""Prompts for text to image, without pictures: a text file with one a line, or JSON or JSONL of objects with `prompt`,
and optionally `id`, `text` (what shall be read); other keys are kept as metadata.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from retouch.data.dataset import DataError, ItemError, ItemFiles
from retouch.data.formats.manifest import json_entries, read_text

if TYPE_CHECKING:
    from retouch.data.sections import PromptsData


def list_items(config: PromptsData) -> list[ItemFiles | ItemError]:
    """The prompts of the file.

    Raises:
        DataError: no such file, or not JSON where its name says so.
    """
    path = Path(config.path).expanduser()
    if not path.is_file():
        raise DataError(f"data.path: {path}: no such file of prompts (.txt with one a line, .json or .jsonl)")
    if path.suffix in (".json", ".jsonl"):
        return [_item(entry, position) for position, entry in enumerate(json_entries(path))]
    lines = [line.strip() for line in read_text(path).split("\n")]
    return [ItemFiles(id=n, prompt=line) for n, line in enumerate(lines) if line]


def _item(entry: Any, position: int) -> ItemFiles | ItemError:
    where = f"entry {position}"
    if not isinstance(entry, dict):
        return ItemError(where, f"{entry!r} is not an object")
    entry = cast("dict[str, Any]", entry)
    prompt, number = entry.get("prompt"), entry.get("id", position)
    if not isinstance(prompt, str) or not prompt.strip():
        return ItemError(where, "prompt missing or empty; each entry needs one")
    if not isinstance(entry.get("text"), str | None):
        return ItemError(where, f"text is {entry['text']!r}; it must be a string")
    if not isinstance(number, int) or isinstance(number, bool):
        return ItemError(where, f"id is {number!r}; it must be an integer")
    metadata = {key: value for key, value in entry.items() if key not in ("prompt", "id")}
    return ItemFiles(id=number, prompt=prompt, metadata=metadata)
