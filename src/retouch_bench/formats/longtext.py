"""LongText-Bench (arXiv 2507.22058, hub X-Omni/LongText-Bench): prompts with several long texts.

`text_prompts.jsonl` (English) and `text_prompts_zh.jsonl`: `prompt`, `text` (a list), `prompt_id`, `category`,
`length`. Ids have gaps. In most English prompts the texts do not stand literally.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

from retouch.data.base import DataError, DataSection, ItemError, ItemFiles, item_or_error
from retouch.data.lists import entries_of, fields_of, require_text_keys, text_fields
from retouch.data.remote import local_path
from retouch.files.disk import file_in

FILES = {"en": "text_prompts.jsonl", "zh": "text_prompts_zh.jsonl"}
"""Language -> file in the published folder."""


class LongTextData(DataSection):
    """LongText-Bench (arXiv 2507.22058): the folder of `text_prompts.jsonl` and `text_prompts_zh.jsonl`, or one of the
    two files."""

    format: Literal["longtext"] = "longtext"
    language: Literal["en", "zh"] = "en"
    """File of the folder: English or Chinese."""

    has_texts: ClassVar[bool] = True

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return any((path / name).is_file() for name in FILES.values()) or path.name in FILES.values()

    def listing(self) -> Path:
        file = file_in(local_path(self.path), FILES[self.language])
        of = next((language for language, name in FILES.items() if name == file.name), self.language)
        if of != self.language:  # another language is counted in other units
            raise DataError(
                f"data.language: given {self.language!r}, but {file} is the list of {of!r}; set language={of}"
            )
        return file

    def list_items(self) -> list[ItemFiles | ItemError]:
        file = self.listing()
        if not file.is_file():
            raise DataError(f"data.path: {file}: no such file of prompts; download X-Omni/LongText-Bench")
        return [item_or_error(f"entry {i}", self._item, entry) for i, entry in enumerate(entries_of(file))]

    def _item(self, given: Any) -> ItemFiles:
        entry = fields_of(given)
        number = entry.get("prompt_id")
        if not isinstance(number, int) or isinstance(number, bool):
            raise DataError(f"prompt_id is {number!r}; it must be an integer")
        require_text_keys(entry, "prompt", remedy="; each entry needs one")
        texts = text_fields({"text": entry.get("text")})
        if not texts:
            raise DataError("text missing; each entry needs a list of texts")
        about = {name: entry[name] for name in ("category", "length") if name in entry}
        about |= {"language": self.language, "key": f"{number:04d}"}
        return ItemFiles(number, entry["prompt"], metadata=texts | about)
