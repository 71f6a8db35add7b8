"""Complex-Edit (arXiv 2504.13143): a picture, and instructions that put 1 to 8 atomic edits together.

Columns of the hub's data set: `image`, and `edit` with `compound`, a list of 8 objects with `compound_instruction`; the
instruction of complexity C is the C-th. Its splits are test_real and test_syn; there is none to train on, so that
`data.part` holds out pictures, by their bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from retouch.data.dataset import DataError, ItemError, ItemFiles
from retouch.data.formats.tables import Table, content_digest, hub_table, in_part, picture_of, tables_of
from retouch.data.sections import complexities
from retouch.hub import is_hub_id

if TYPE_CHECKING:
    from retouch.data.sections import ComplexEditData

_TYPES = ("real", "syn")
_FIRST = {"real": 0, "syn": 1_000_000}
"""Number of the first picture of a type: ids stay the same whatever is chosen. An id is 10 x number + complexity."""


def list_items(config: ComplexEditData) -> list[ItemFiles | ItemError]:
    """An item for every picture and complexity asked for, picture by picture.

    Raises:
        DataError: no such data set, or nothing of it is chosen.
    """
    types = _TYPES if config.image_type == "all" else (config.image_type,)
    items: list[ItemFiles | ItemError] = []
    for image_type in types:
        number = _FIRST[image_type]
        for table in _tables(config.path, image_type):
            for position, row in enumerate(table):
                items += _items(config, table, position, row, image_type, number)
                number += 1
    if not items:
        raise DataError(
            f"data.path: {config.path} has nothing with image_type {config.image_type} and part {config.part} "
            f"(held_out_share {config.held_out_share:g}); choose others, or add data"
        )
    return items


def _tables(path: str, image_type: str) -> list[Table]:
    if is_hub_id(path):
        return [hub_table(path, f"test_{image_type}")]
    found = [t for t in tables_of(path) if re.search(rf"(?<![a-z]){image_type}(?![a-z])", t.name.lower())]
    if not found:
        raise DataError(
            f"data.path: {path} holds no file of image_type {image_type}; its name, or that of its folder, must say "
            f"{image_type}, like test_{image_type}.parquet"
        )
    return found


def _items(
    config: ComplexEditData, table: Table, position: int, row: Mapping[str, Any], image_type: str, number: int
) -> list[ItemFiles | ItemError]:
    """Those of one picture; none where it belongs to the other part."""
    where = f"{table.name} row {position}"
    picture = picture_of(table, position, row)
    if isinstance(picture, str):
        return [ItemError(where, picture.removeprefix(f"{where}: "))]
    if not in_part(content_digest(picture), config.part, config.held_out_share):
        return []
    instructions = _instructions(row.get("edit"))
    items: list[ItemFiles | ItemError] = []
    for complexity in complexities(config.complexity):
        if len(instructions) < complexity or not instructions[complexity - 1].strip():
            items.append(ItemError(where, f"edit.compound has no instruction of complexity {complexity}"))
            continue
        about = {"image": f"{image_type}/{number - _FIRST[image_type]:04d}", "image_type": image_type}
        items.append(
            ItemFiles(
                id=10 * number + complexity,
                prompt=instructions[complexity - 1],
                source_path=picture,
                metadata={**about, "complexity": complexity},
                difficulty=float(complexity),
            )
        )
    return items


def _instructions(edit: object) -> list[str]:
    """By complexity from 1; "" for what is no text. `compound` may be a list of objects or, as some versions of
    datasets give it, an object of lists."""
    if isinstance(edit, str):
        try:
            edit = json.loads(edit)
        except ValueError:
            return []
    compound: object = cast("Mapping[str, Any]", edit).get("compound") if isinstance(edit, Mapping) else None
    if isinstance(compound, Mapping):
        compound = cast("Mapping[str, Any]", compound).get("compound_instruction")
    if not isinstance(compound, list):
        return []
    texts = [
        one.get("compound_instruction") if isinstance(one, Mapping) else one for one in cast("list[Any]", compound)
    ]
    return [text if isinstance(text, str) else "" for text in texts]
