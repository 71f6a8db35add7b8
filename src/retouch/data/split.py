"""Divide a data set into train and held-out halves that share no picture (or no text)."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Literal, get_args

from retouch.data.dataset import DataError, ItemError, ItemFiles, list_items
from retouch.data.formats.manifest import csv_rows, json_entries, manifest_file, read_text
from retouch.data.identity import digest
from retouch.data.overlap import files, pictures_of
from retouch.data.sampler import derive_seed
from retouch.data.sections import (
    ManifestData,
    PromptsData,
    SelfBenchData,
)
from retouch.data.validate import data_at
from retouch.imaging import normalize_text

By = Literal["picture", "text"]

_PARTS = 10**6


def split(path: Path, share: float, by: str = "picture", seed: int = 0) -> dict[Path, int]:
    """Write `NAME_train` and `NAME_held_out` beside the list of a self_bench folder, a manifest (of an imagefolder its
    metadata file) or a file of prompts -> the two files with their numbers of items. No picture is copied.

    An item's side follows from what it shows and the seed alone: order and other items do not matter, except that items
    with a picture (by the bytes of the file) or a text in common are on one side.

    Args:
        share: of what differs, that is held out; of few items only roughly.
        by: what the halves must not have in common: "picture" or "text" (the prompt, where an item names no text).

    Raises:
        DataError: a list that is not there or has broken lines, files that exist, or a half that would be empty.
    """
    if not 0 < share < 1:
        raise DataError(f"--share: given {share}; the held-out share lies between 0 and 1, like 0.1")
    if by not in get_args(By):
        raise DataError(f"--by: given {by!r}; allowed: {', '.join(get_args(By))}")
    listing, lines, items = _listed(path)
    held_out = sides([_keys(item, by) for item in items], share, seed)
    if all(held_out) or not any(held_out):
        which = "train" if all(held_out) else "held-out"
        raise DataError(
            f"{path}: of {len(items)} items none is in the {which} half; set another --share or --seed, or add items"
        )
    written: dict[Path, int] = {}
    for name, side in (("train", False), ("held_out", True)):
        out = listing.with_name(f"{listing.stem}_{name}{listing.suffix}")
        if out.exists():
            raise DataError(f"{out} exists; delete it, or rename it")
        written[out] = held_out.count(side)
    for out, side in zip(written, (False, True), strict=True):
        chosen = [line for line, held in zip(lines, held_out, strict=True) if held is side]
        out.write_text(_text(chosen, listing), encoding="utf-8")
    return written


def sides(keys: Sequence[Sequence[Hashable]], share: float, seed: int) -> list[bool]:
    """For each item, whether it is held out; items that have a key in common, over others as well, are on one side."""
    parent = {key: key for own in keys for key in own}

    def root(key: Hashable) -> Hashable:
        while parent[key] != key:
            parent[key] = parent[parent[key]]
            key = parent[key]
        return key

    for own in keys:
        for key in own[1:]:
            first, second = sorted((root(own[0]), root(key)), key=str)
            parent[second] = first  # the smallest key stands for all, whatever the order
    return [derive_seed("split", seed, str(root(own[0]))) % _PARTS < share * _PARTS for own in keys]


def _keys(item: ItemFiles, by: str) -> list[str]:
    pictures = files(pictures_of(item))
    if by == "picture" and pictures:
        return [digest(path) for path in pictures]
    text = item.metadata.get("text") if by == "text" else None
    return [normalize_text(text if isinstance(text, str) else item.prompt, case_sensitive=False)]


def _listed(path: Path) -> tuple[Path, list[str], list[ItemFiles]]:
    """The list file, its lines (of JSON, an entry each) and their items.

    Raises:
        DataError: none that can be divided, broken lines, or pictures that are not there.
    """
    section = data_at(path, (512, 512))
    if isinstance(section, SelfBenchData):
        listing = path / section.list_file
    elif isinstance(section, ManifestData | PromptsData):
        listing = manifest_file(path) or path
    else:
        raise DataError(f"{path}: {section.format} is for evaluation; divide a self_bench folder or a manifest")
    listed = list_items(section)
    items = [item for item in listed if isinstance(item, ItemFiles)]
    broken = [str(item) for item in listed if isinstance(item, ItemError)]
    broken += [f"item {i.id}: {p}: no such file" for i in items for p in files(pictures_of(i)) if not p.is_file()]
    if broken:
        raise DataError(
            f"{path}: {broken[0]} (and {len(broken) - 1} more problems); `retouch data validate` lists them"
        )
    if listing.suffix == ".csv":
        return listing, [_csv_line(row) for row in csv_rows(listing)[1:]], items
    if listing.suffix in (".json", ".jsonl"):
        return listing, [json.dumps(entry, ensure_ascii=False) for entry in json_entries(listing)], items
    return listing, [line for line in read_text(listing).split("\n") if line.strip()], items


def _text(lines: Sequence[str], listing: Path) -> str:
    if listing.suffix == ".json":
        return "[\n" + ",\n".join(lines) + "\n]\n"
    if listing.suffix == ".csv":
        lines = [_csv_line(csv_rows(listing)[0]), *lines]
    return "".join(f"{line}\n" for line in lines)


def _csv_line(cells: Sequence[str]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="").writerow(cells)
    return out.getvalue()
