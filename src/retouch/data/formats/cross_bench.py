"""Calligrapher's cross benchmark: a text in the style of another item.

Each line of `cross_bench.txt` is `{int}-{ref_id[,ref_id]}-{text}` (split on the first two hyphens, UTF-8), in a folder
of the self_bench layout: source and mask are those of the first number, the reference is `test{ref_id}_ref.png`. There
is an item for each reference of a line, and no target: nobody has painted it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from retouch.data.dataset import ItemError, ItemFiles
from retouch.data.formats.self_bench import listed_lines

if TYPE_CHECKING:
    from retouch.data.sections import CrossBenchData

PATTERN = "{number}-{reference[,reference]}-{text}"


def list_items(config: CrossBenchData) -> list[ItemFiles | ItemError]:
    """The items of the list file, numbered from 0 in its order; `metadata` has the numbers of item and reference.

    Raises:
        DataError: no folder, no list file, or not UTF-8.
    """
    folder, name = Path(config.path).expanduser(), Path(config.list_file).name
    items: list[ItemFiles | ItemError] = []
    for number, line in listed_lines(folder, config.list_file, PATTERN):
        where = f"{name} line {number}"
        head, references, text = (*line.split("-", 2), "", "")[:3]
        others = [other.strip() for other in references.split(",")]
        if not head.strip().isdecimal() or not all(other.isdecimal() for other in others):
            items.append(ItemError(where, f"{line!r} is not {PATTERN}"))
        elif not text.strip():
            items.append(ItemError(where, f"the text of item {head.strip()} is empty; write what the mask shall say"))
        else:
            items += [_item(folder, config, len(items) + i, int(head), int(o), text) for i, o in enumerate(others)]
    return items


def _item(folder: Path, config: CrossBenchData, number: int, item: int, other: int, text: str) -> ItemFiles:
    text = text.strip()
    return ItemFiles(
        id=number,
        prompt=config.prompt_template.replace("{text}", text),
        source_path=folder / f"test{item}_source.png",
        mask_path=folder / f"test{item}_mask.png",
        reference_path=folder / f"test{other}_ref.png",
        reference_mask_path=folder / f"test{other}_mask.png",
        metadata={"text": text, "item": item, "reference_item": other},
    )
