"""GenEval (arXiv 2310.11513): a JSONL file of prompts with what their images must show."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

from retouch.data.base import DataError, DataSection, ItemError, ItemFiles, item_or_error
from retouch.data.lists import entries_of, fields_of, require_text_keys, suffix_of
from retouch.data.remote import local_path
from retouch.files.disk import file_in

LIST = "evaluation_metadata.jsonl"

_KEYS = {"tag", "include", "prompt"}


class GenEvalData(DataSection):
    """GenEval (arXiv 2310.11513): `evaluation_metadata.jsonl`, or a folder that holds it; or another file of its
    layout, like the training prompts of Flow-GRPO: `{"tag", "include", "exclude"?, "prompt"}` in each line."""

    format: Literal["geneval"] = "geneval"

    @classmethod
    def recognises(cls, path: Path) -> bool:
        path = path / LIST if path.is_dir() else path
        entries = entries_of(path) if suffix_of(path) == ".jsonl" and path.is_file() else []
        return bool(entries) and all(isinstance(entry, dict) and entry.keys() >= _KEYS for entry in entries)

    def listing(self) -> Path:
        return file_in(local_path(self.path), LIST)

    def list_items(self) -> list[ItemFiles | ItemError]:
        """The items in the order of the file; the number of the line is the id."""
        path = self.listing()
        if not path.is_file():
            raise DataError(f"data.path: {path}: no such file; set the {LIST} of GenEval, or its folder")
        return [item_or_error(f"{path.name} line {i + 1}", _item, entry, i) for i, entry in enumerate(entries_of(path))]


def _item(entry: Any, position: int) -> ItemFiles:
    fields = fields_of(entry)
    require_text_keys(fields, "prompt")
    tag = fields.get("tag")
    if not isinstance(tag, str):
        raise DataError(f"tag is {tag!r}; it must be a string")
    clauses = {name: fields.get(name, []) for name in ("include", "exclude")}
    for name, given in clauses.items():
        if not isinstance(given, list) or not all(isinstance(clause, dict) for clause in cast("list[Any]", given)):
            raise DataError(f"{name} must be a list of objects with class and count")
    kept: Mapping[str, Any] = {name: given for name, given in clauses.items() if name in fields}
    return ItemFiles(id=position, prompt=fields["prompt"], metadata={"tag": tag, **kept})
