"""Divide a data set into a training and a held-out list that share no image (or no text)."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

from retouch.data.base import DataError, ItemError, ItemFiles
from retouch.data.discover import data_at
from retouch.data.identity import digest, images_of, paths
from retouch.data.lists import TABLES, csv_rows, entries_of, lines_of, separator_of, suffix_of
from retouch.data.remote import names_a_commit
from retouch.data.sampler import derive_seed
from retouch.files.disk import is_file, write_whole
from retouch.imaging.lines import folded

BY = ("image", "picture", "text")
"""Content that the two lists must not share; "picture" is a former name of "image"."""

_PARTS = 10**6


def split(path: Path, share: float, by: str = "image", seed: int = 0) -> dict[Path, int]:
    """Write `NAME_train` and `NAME_held_out` beside the list of a data set -> the two files with their numbers of
    items. No image is copied.

    The side of an item follows from its content and the seed alone, not from order or other items, except that items
    with an image (by the bytes of the file, or of that of which it is a copy) or a text in common are on one side.

    Args:
        share: of the distinct contents, that is held out; approximate for few items.
        by: the content that the lists must not share: "image" or "text" (the prompt, if an item has no text).

    Raises:
        DataError: no list, broken items, files that exist, or an empty part.
    """
    if not 0 < share < 1:
        raise DataError(f"--share: given {share}; the held-out share lies between 0 and 1, like 0.1")
    if by not in BY:
        raise DataError(f"--by: given {by!r}; allowed: image, text")
    listing, header, lines, items = _listed(path)
    held_out = sides([_keys(item, by) for item in items], share, seed)
    if all(held_out) or not any(held_out):
        which = "train" if all(held_out) else "held-out"
        raise DataError(
            f"{path}: of {len(items)} items none is in the {which} part; set another --share or --seed, or add items"
        )
    # Both names are checked before either file is written: one list of two would look like a split.
    written: dict[Path, int] = {}
    parts = parts_of(listing)
    for out, side in parts.items():
        if out.exists():
            raise DataError(f"{out} exists; delete it, or rename it")
        written[out] = held_out.count(side)
    for out, side in parts.items():
        chosen = [line for line, held in zip(lines, held_out, strict=True) if held is side]
        as_list = "[\n" + ",\n".join(chosen) + "\n]\n"
        text = as_list if suffix_of(listing) == ".json" else "".join(f"{line}\n" for line in [*header, *chosen])
        write_whole(out, text)
    return written


def parts_of(listing: Path) -> dict[Path, bool]:
    """The two lists that a list is divided into, each with whether it is held out."""
    names = {"train": False, "held_out": True}
    return {listing.with_name(f"{listing.stem}_{name}{listing.suffix}"): side for name, side in names.items()}


def sides(keys: Sequence[Sequence[Hashable]], share: float, seed: int) -> list[bool]:
    """Whether each item is held out; items that are connected by common keys are on one side."""
    parent = {key: key for own in keys for key in own}

    def root(key: Hashable) -> Hashable:
        while parent[key] != key:
            parent[key] = parent[parent[key]]
            key = parent[key]
        return key

    for own in keys:
        for key in own[1:]:
            first, second = sorted((root(own[0]), root(key)), key=str)
            parent[second] = first  # the smallest key is the root, for any order of items
    return [derive_seed("split", seed, str(root(own[0]))) % _PARTS < share * _PARTS for own in keys]


def _keys(item: ItemFiles, by: str) -> list[str]:
    images = paths(images_of(item))
    if by != "text" and images:
        return [*map(digest, images), *filter(None, [item.original])]
    text = item.metadata.get("text") if by == "text" else None
    return [folded(text if isinstance(text, str) and text.strip() else item.prompt, case_sensitive=False)]


def _listed(path: Path) -> tuple[Path, list[str], list[str], list[ItemFiles]]:
    """The list file, its header, its lines (for JSON, an entry each) and their items."""
    if names_a_commit(str(path)):
        raise DataError(f"{path}: a download, beside which nothing is written; copy the list to a folder first")
    section = data_at(path, (512, 512))
    listing = section.listing()
    if listing is None:
        raise DataError(f"{path}: {section.format} is for evaluation; divide a self_bench folder or a manifest")
    divisible = section.divisible()
    listed = section.items() if divisible is None else [item for _, item in divisible]
    items = [item for item in listed if isinstance(item, ItemFiles)]
    broken = [str(item) for item in listed if isinstance(item, ItemError)]
    broken += [f"{i.where}: {p}: no such file" for i in items for p in paths(images_of(i)) if not is_file(p)]
    if broken:
        raise DataError(
            f"{path}: {broken[0]} (and {len(broken) - 1} more problems); `retouch data validate` lists them"
        )
    if not is_file(listing):
        raise DataError(
            f"{listing}: no such file; {type(section).__name__}.listing must return the file that lists the items, or "
            "None"
        )
    if suffix_of(listing) in TABLES:
        header, *rows = (_csv_line(row, separator_of(listing)) for row in csv_rows(listing))
        return listing, [header], rows, items
    if suffix_of(listing) in (".json", ".jsonl"):
        entries = _entries_of(listing) if divisible is None else [entry for entry, _ in divisible]
        if len(entries) != len(items):
            raise DataError(
                f"{listing}: holds no list with an entry for each of {len(items)} items of format {section.format}; "
                "divide a self_bench folder or a manifest"
            )
        return listing, [], [json.dumps(entry, ensure_ascii=False) for entry in entries], items
    lines = [line for _, line in lines_of(listing)]
    extra = len(lines) - len(items)
    if extra not in (0, 1):
        raise DataError(
            f"{listing}: given {len(lines)} lines for {len(items)} items of format {section.format}; expected a line "
            f"for each item, and at most one more, the header; correct {type(section).__name__}.listing"
        )
    return listing, lines[:extra], lines[extra:], items  # the formats of the package have no header


def _entries_of(listing: Path) -> list[Any]:
    """The entries of a list; none of an object with an item under each key."""
    try:
        return entries_of(listing)
    except DataError:
        return []


def _csv_line(cells: Sequence[str], separator: str) -> str:
    """The row that `csv_rows` reads as these cells, without the end of its line."""
    out = io.StringIO()
    # the writer puts a cell with the characters that end a line in quotes, and must know them
    csv.writer(out, lineterminator="\r\n", delimiter=separator).writerow(cells)
    return out.getvalue().removesuffix("\r\n")
