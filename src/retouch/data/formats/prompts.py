"""Prompts for text to image, without images: a text file with one prompt in each line, or JSON or JSONL of objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

from retouch.data.base import DataError, DataSection, ItemError, ItemFiles, item_or_error
from retouch.data.lists import PATH_KEYS, TEXT_KEYS, entries_of, fields_of, id_of, lines_of, require_texts, text_fields
from retouch.disk import expanded

_JSON = (".json", ".jsonl")
_OF_MANIFESTS = {key for keys in PATH_KEYS.values() for key in keys}


class PromptsData(DataSection):
    """Prompts of text to image, without images: a text file with one in each line, or JSON or JSONL of
    `{"prompt", "text"?, "id"?, ...}`, where `text` is one text or a list of lines; other keys are kept as
    metadata."""

    format: Literal["prompts"] = "prompts"

    expects: ClassVar[str] = "a .txt of prompts"

    @classmethod
    def recognises(cls, path: Path) -> bool:
        if path.is_dir() or path.suffix == ".txt":
            return not path.is_dir()
        entries = entries_of(path) if path.is_file() and path.suffix in _JSON else []
        objects = [entry for entry in entries if isinstance(entry, dict)]
        return bool(objects) and all("prompt" in o and o.keys().isdisjoint(_OF_MANIFESTS) for o in objects)

    def listing(self) -> Path:
        return expanded(self.path)

    def list_items(self) -> list[ItemFiles | ItemError]:
        path = self.listing()
        if not path.is_file():
            raise DataError(f"data.path: {path}: no such file of prompts (.txt with one a line, .json or .jsonl)")
        if path.suffix in _JSON:
            return [item_or_error(f"entry {i}", _item, entry, i) for i, entry in enumerate(entries_of(path))]
        return [ItemFiles(id=number - 1, prompt=line.strip()) for number, line in lines_of(path)]


def _item(given: Any, position: int) -> ItemFiles:
    entry = fields_of(given)
    require_texts(entry, "prompt", remedy="; each entry needs one")
    metadata = {key: value for key, value in entry.items() if key not in ("prompt", "id", *TEXT_KEYS)}
    return ItemFiles(id=id_of(entry, position), prompt=entry["prompt"], metadata=metadata | text_fields(entry))
