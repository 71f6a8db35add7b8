"""CVTG-2K (TextCrafter, arXiv 2503.23461): prompts with two to five texts.

`CVTG/{2,3,4,5}.json` and `CVTG-Style/{2,3,4,5}.json`, the number of texts in each; an object with `data_list`: `index`,
`prompt`, `carrier_list`, `sentence_list` (the texts).
"""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import Any, ClassVar, Literal

from retouch.data.base import DataError, DataSection, ItemError, ItemFiles, item_or_error
from retouch.data.lists import data_list_of, fields_of, text_fields
from retouch.data.remote import local_path

_STYLES = ("CVTG", "CVTG-Style")
_COUNTS = (2, 3, 4, 5)


class CvtgData(DataSection):
    """CVTG-2K (TextCrafter): the folder with `CVTG` and `CVTG-Style`."""

    FREE_IN_EPOCH: ClassVar[Set[str]] = {"part"}

    format: Literal["cvtg"] = "cvtg"
    part: Literal["all", "CVTG", "CVTG-Style"] = "all"
    """Folder to read: plain prompts, prompts with styles, or both."""

    has_texts: ClassVar[bool] = True
    marks: ClassVar[tuple[str, ...]] = tuple(f"{style}/2.json" for style in _STYLES)

    def list_items(self) -> list[ItemFiles | ItemError]:
        folder = local_path(self.path)
        found: list[ItemFiles | ItemError] = []
        for style in _STYLES if self.part == "all" else (self.part,):
            for count in _COUNTS:
                found += self._file(folder / style / f"{count}.json", f"{style}/{count}", len(found))
        return found

    def _file(self, file: Path, part: str, first: int) -> list[ItemFiles | ItemError]:
        if not file.is_file():
            raise DataError(f"data.path: {file}: no such file; CVTG-2K has {part}.json")
        entries = enumerate(data_list_of(file))
        return [item_or_error(f"{part} {i}", self._item, entry, first + i, part) for i, entry in entries]

    def _item(self, given: Any, number: int, part: str) -> ItemFiles:
        entry = fields_of(given)
        index, prompt = entry.get("index"), entry.get("prompt")
        if not isinstance(index, int) or isinstance(index, bool) or not isinstance(prompt, str) or not prompt.strip():
            raise DataError("has no index or no prompt")
        texts = text_fields({"texts": entry.get("sentence_list")})
        if not texts:
            raise DataError("sentence_list missing; each entry needs its texts")
        return ItemFiles(number, prompt, metadata=texts | {"key": f"{part}/{index}", "part": part})
