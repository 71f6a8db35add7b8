"""Calligrapher's benchmark layout: a list file and numbered picture triplets in one folder.

Each line of `self_bench.txt` is `{int}-{text}` (split on the first hyphen, UTF-8). Item N has `test{N}_source.png`,
`test{N}_mask.png` and optionally `test{N}_ref.png`. The reference has two meanings in the wild, told apart by its size:
a crop (the mask box of the source: a style picture; the text is already in the source, which is the target) or a
full-size ground truth.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from retouch.data.dataset import DataError, ItemError, ItemFiles

if TYPE_CHECKING:
    from retouch.data.sections import SelfBenchData


def list_items(config: SelfBenchData) -> list[ItemFiles | ItemError]:
    """The items of the list file.

    Raises:
        DataError: no folder, no list file, or not UTF-8.
    """
    folder, listing = Path(config.path).expanduser(), Path(config.list_file)
    return [
        _item(folder, config, f"{listing.name} line {number}", line)
        for number, line in listed_lines(folder, config.list_file, "{number}-{text}")
    ]


def listed_lines(folder: Path, list_file: str, pattern: str) -> list[tuple[int, str]]:
    """(number from 1, line) of the lines of a list that are not blank.

    Raises:
        DataError: no folder, no list file, or not UTF-8.
    """
    listing = folder / list_file
    if not folder.is_dir():
        raise DataError(f"data.path: {folder}: no such folder")
    if not listing.is_file():
        raise DataError(f"data.path: {folder} has no {list_file}; each of its lines is {pattern}")
    try:
        lines = listing.read_text(encoding="utf-8-sig").split("\n")  # splitlines() would cut at U+2028 too
    except UnicodeDecodeError as error:
        raise DataError(f"{listing}: not UTF-8 (byte {error.start}); save it as UTF-8") from None
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _item(folder: Path, config: SelfBenchData, where: str, line: str) -> ItemFiles | ItemError:
    head, hyphen, text = line.partition("-")
    if not hyphen or not head.strip().isdecimal():
        return ItemError(where, f"{line!r} is not {{number}}-{{text}}")
    if not text.strip():
        return ItemError(where, f"the text of item {head.strip()} is empty; write what the mask shall say")
    text, n = text.strip(), int(head)
    reference = folder / f"test{n}_ref.png"
    return ItemFiles(
        id=n,
        prompt=config.prompt_template.replace("{text}", text),
        source_path=folder / f"test{n}_source.png",
        mask_path=folder / f"test{n}_mask.png",
        reference_path=reference if reference.is_file() else None,
        target=config.target,
        metadata={"text": text},
    )
