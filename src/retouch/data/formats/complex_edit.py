"""Complex-Edit (arXiv 2504.13143): an image, and instructions that put 1 to 8 atomic edits together.

Columns of the hub's data set: `image`, and `edit` with `compound`, a list of 8 objects with `compound_instruction`; the
instruction of complexity C is the C-th. Its splits are test_real and test_syn; there is none to train on, which is why
`data.part` holds out images, by their bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

from pydantic import field_validator

from retouch.data.base import DataError, DataSection, ItemError, ItemFiles, ProtocolData, item_or_error
from retouch.data.tables import Table, content_digest, hub_table, image_of, in_part, tables_of
from retouch.errors import shown
from retouch.files import plain_json
from retouch.imaging.fitting import Fit
from retouch.imaging.reading import PackedImage

MOST_COMPLEX = 8
"""Atomic edits that an instruction puts together at most."""

_FIRST = {"real": 0, "syn": 1_000_000}
"""Number of the first image of a type: ids do not depend on what is chosen. An id is 10 x number + complexity."""


class ComplexEditData(ProtocolData):
    """Complex-Edit (arXiv 2504.13143): one example for every image and complexity. A folder holds parquet, arrow or
    JSONL files with the columns of the hub's data set, and "real" or "syn" in their names."""

    FREE_IN_EPOCH: ClassVar[Set[str]] = {"complexity", "image_type"}

    format: Literal["complex_edit"] = "complex_edit"
    complexity: str = "8"
    """How many atomic edits an instruction puts together: "8", "1-8" or "1,3,5"."""
    image_type: Literal["real", "syn", "all"] = "real"
    """Photographs, synthetic images, or both."""
    fit: Fit = "crop"
    """"crop" scales to cover and cuts out the middle; "stretch" ignores the aspect ratio."""

    has_images: ClassVar[frozenset[str]] = frozenset({"source"})
    choices: ClassVar[tuple[str, ...]] = ("image_type",)

    @field_validator("complexity", mode="before")
    @classmethod
    def _is_complexity(cls, value: object) -> object:
        text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
        return ",".join(map(str, complexities(text))) if isinstance(text, str) else text

    @property
    def types(self) -> list[str]:
        """Image types that are chosen."""
        return [name for name in _FIRST if self.image_type in (name, "all")]

    def overlaps(self, other: DataSection) -> bool:
        return isinstance(other, ComplexEditData) and bool({*self.types} & {*other.types})

    def list_items(self) -> list[ItemFiles | ItemError]:
        """An item for every image and chosen complexity, image by image."""
        items: list[ItemFiles | ItemError] = []
        for image_type in self.types:
            rows = ((table, position, row) for table in self._tables(image_type) for position, row in enumerate(table))
            for number, (table, position, row) in enumerate(rows):
                items += self._items(table, position, row, image_type, number)
        return self.require_items(items)

    def _tables(self, image_type: str) -> list[Table]:
        if self.hub_id is not None:
            return [hub_table(self.path, f"test_{image_type}")]
        found = [t for t in tables_of(self.path) if re.search(rf"(?<![a-z]){image_type}(?![a-z])", t.name.lower())]
        if not found:
            raise DataError(
                f"data.path: {self.path} holds no file of image_type {image_type}; its name, or that of its folder, "
                f"must contain {image_type}, like test_{image_type}.parquet"
            )
        return found

    def _items(
        self, table: Table, position: int, row: Mapping[str, Any], image_type: str, number: int
    ) -> Iterator[ItemFiles | ItemError]:
        """The items of one image; none if it belongs to the other part."""
        where = f"{table.name} row {position}"
        try:
            image = image_of(table, position, row)
        except DataError as error:
            yield ItemError(where, str(error))
            return
        if not in_part(content_digest(image), self.part, self.held_out_share):
            return
        about = {"image": f"{image_type}/{number:04d}", "image_type": image_type}
        make = partial(_item, image, _instructions(row.get("edit")), _FIRST[image_type] + number, about)
        for complexity in complexities(self.complexity):
            yield item_or_error(where, make, complexity)


def complexities(value: str) -> tuple[int, ...]:
    """ "8", "1-8" or "1,3,5" as ascending numbers.

    Raises:
        ValueError: anything else.
    """
    found: set[int] = set()
    for piece in value.split(","):
        low, dash, high = (part.strip() for part in piece.partition("-"))
        numbers = all(part.isdecimal() and len(part) < 3 for part in ((low, high) if dash else (low,)))
        found.update(range(int(low), int(high or low) + 1) if numbers else [0])
    if not found or not found <= set(range(1, MOST_COMPLEX + 1)):
        raise ValueError(f'given {shown(value)}; write numbers from 1 to {MOST_COMPLEX}, like "8", "1-8" or "1,3,5"')
    return tuple(sorted(found))


def _item(
    image: Path | PackedImage, instructions: list[str], number: int, about: Mapping[str, Any], complexity: int
) -> ItemFiles:
    if len(instructions) < complexity or not instructions[complexity - 1].strip():
        raise DataError(f"edit.compound has no instruction of complexity {complexity}")
    return ItemFiles(
        id=10 * number + complexity,
        prompt=instructions[complexity - 1],
        source_path=image,
        metadata={**about, "complexity": complexity},
        difficulty=float(complexity),
    )


def _instructions(edit: object) -> list[str]:
    """Instructions by complexity from 1; "" for what is no text. `compound` is a list of objects or, in some versions
    of datasets, an object of lists."""
    if isinstance(edit, str):
        try:
            edit = plain_json.loads(edit)
        except ValueError:
            return []
    compound: object = cast("Mapping[str, Any]", edit).get("compound") if isinstance(edit, Mapping) else None
    if isinstance(compound, Mapping):
        compound = cast("Mapping[str, Any]", compound).get("compound_instruction")
    entries = cast("list[Any]", compound) if isinstance(compound, list) else []
    texts = [entry.get("compound_instruction") if isinstance(entry, Mapping) else entry for entry in entries]
    return [text if isinstance(text, str) else "" for text in texts]
