"""A data format: a tab-separated file with the columns image, mask, caption and, if there are target texts, text."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import ClassVar, Literal

from retouch.data.base import DataError, ImageSection, ItemError, ItemFiles, item_or_error

COLUMNS = {"image", "mask", "caption"}


class CaptionsTsvData(ImageSection):
    """Rows of a tab-separated file; paths are relative to it. The image is the source and the ground truth."""

    format: Literal["captions_tsv"] = "captions_tsv"
    delimiter: str = "\t"
    """Between the columns."""

    expects: ClassVar[str] = "a .tsv of image, mask, caption"

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return path.suffix == ".tsv" and path.is_file()

    def listing(self) -> Path:
        return Path(self.path).expanduser()

    def list_items(self) -> list[ItemFiles | ItemError]:
        path = self.listing()
        try:
            with path.open(encoding="utf-8", newline="") as file:
                rows = list(csv.DictReader(file, delimiter=self.delimiter))
        except OSError as error:
            raise DataError(f"data.path: {path}: {error.strerror}; set a .tsv file") from None
        return [item_or_error(f"row {number}", _item, number, row, path.parent) for number, row in enumerate(rows, 1)]


def _item(number: int, row: dict[str, str], folder: Path) -> ItemFiles:
    missing = sorted(name for name in COLUMNS if not row.get(name))
    if missing:
        raise DataError(f"{', '.join(missing)} missing or empty")
    return ItemFiles(
        id=number,
        prompt=row["caption"],
        source_path=folder / row["image"],
        mask_path=folder / row["mask"],
        target="source",
        metadata={"text": row["text"]} if row.get("text") else {},
    )
