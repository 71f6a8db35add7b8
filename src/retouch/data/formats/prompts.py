"""Prompts for text to image, without images: a text file with one prompt in each line, JSON or JSONL of objects, CSV,
or a parquet or arrow table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

from retouch.config.base import Text
from retouch.data.base import DataError, DataSection, ItemError, ItemFiles, item_or_error
from retouch.data.lists import (
    PATH_KEYS,
    SUFFIXES,
    TEXT_KEYS,
    entries_of,
    fields_of,
    id_of,
    lines_of,
    require_text_keys,
    suffix_of,
    text_fields,
)
from retouch.data.remote import local_path
from retouch.data.tables import tables_of

_JSON = (".json", ".jsonl")
_TABLES = (".parquet", ".arrow")
_OF_MANIFESTS = {key for keys in PATH_KEYS.values() for key in keys}


class PromptsData(DataSection):
    """Prompts of text to image, without images: a text file with one in each line, or JSON, JSONL, CSV, parquet or
    arrow of `{"prompt", "text"?, "id"?, ...}`, where `text` is one text or a list of lines; other keys are kept as
    metadata."""

    format: Literal["prompts"] = "prompts"
    prompt_key: Text = "prompt"
    """Key of an entry, or column of a table, that holds the prompt (in many published sets: caption)."""

    expects: ClassVar[str] = "a .txt of prompts"

    @classmethod
    def recognises(cls, path: Path) -> bool:
        if path.is_dir() or suffix_of(path) == ".txt":
            return not path.is_dir()
        entries = entries_of(path) if path.is_file() and suffix_of(path) in _JSON else []
        objects = [entry for entry in entries if isinstance(entry, dict)]
        return bool(objects) and all("prompt" in o and o.keys().isdisjoint(_OF_MANIFESTS) for o in objects)

    def listing(self) -> Path | None:
        path = local_path(self.path)
        return None if suffix_of(path) in _TABLES else path

    def list_items(self) -> list[ItemFiles | ItemError]:
        path = local_path(self.path)
        if not path.is_file():
            raise DataError(
                f"data.path: {path}: no such file of prompts (.txt with one a line, .json, .jsonl, .csv, .parquet "
                "or .arrow)"
            )
        if suffix_of(path) in (*SUFFIXES, *_TABLES):
            entries = entries_of(path) if suffix_of(path) in SUFFIXES else _rows(path)
            return [item_or_error(f"entry {i}", self._item, entry, i) for i, entry in enumerate(entries)]
        lines = lines_of(path)
        if lines and all("\t" in line.strip() for _, line in lines):
            raise DataError(
                f"data.path: {path}: each line has a tab, as in a table; give a .tsv with a header that names the "
                f"column {self.prompt_key!r}"
            )
        return [ItemFiles(id=number - 1, prompt=line.strip()) for number, line in lines]

    def _item(self, given: Any, position: int) -> ItemFiles:
        entry, key = fields_of(given), self.prompt_key
        require_text_keys(entry, key, remedy="; each entry needs one")
        others = {name: value for name, value in entry.items() if name != key}
        metadata = {name: value for name, value in others.items() if name not in ("id", *TEXT_KEYS)}
        return ItemFiles(id=id_of(entry, position), prompt=entry[key], metadata=metadata | text_fields(others))


def _rows(path: Path) -> list[dict[str, Any]]:
    """The texts, numbers, lists and objects of each row; images and other binary columns, and ids that are no integers,
    are left out."""
    return [_plain(row) for table in tables_of(str(path)) for row in table]


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in row.items() if value is not None and _is_json(value)}
    return {name: value for name, value in kept.items() if name != "id" or isinstance(value, int)}


def _is_json(value: object) -> bool:
    """Whether a value can be written as JSON: it has no bytes, times or infinite numbers."""
    if isinstance(value, list | dict):
        inner = cast("list[object] | dict[str, object]", value)
        return all(map(_is_json, inner.values() if isinstance(inner, dict) else inner))
    return value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
