"""A list of examples: a JSON list, JSONL with one object a line, or CSV; or a folder with metadata.jsonl or
metadata.csv (Hugging Face imagefolder).

Keys: `prompt`, and optionally `image_path` (what is repainted or edited; none for text to image), `id`, `mask_path`,
`reference_path`, `target_path`, `win_path` and `lose_path`, `text`, and `t5_embedding_path`, which flux_fill reads
instead of encoding the prompt. `image` and `mask`, `file_name` and the `*_file_name` columns of an imagefolder are read
as aliases of the paths; of an imagefolder, `text` is the caption where there is no `prompt`. Other keys are kept as
metadata. Relative paths start from the file's folder or from `data.image_root`.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from retouch.data.dataset import DataError, ItemError, ItemFiles, TargetRole

if TYPE_CHECKING:
    from retouch.data.sections import ManifestData

SUFFIXES = (".json", ".jsonl", ".csv")

METADATA = ("metadata.jsonl", "metadata.csv")
"""Manifest of a folder in the imagefolder layout."""

IMAGE_KEYS = ("image_path", "image", "file_name", "image_file_name")
"""Keys that name the image of an entry; the first that is there counts."""

_CAPTIONED = ("file_name", "image_file_name")
"""Keys of an imagefolder, whose `text` is a caption."""

_KEYS = {
    "image_path": IMAGE_KEYS,
    "mask_path": ("mask_path", "mask", "mask_file_name"),
    **{f"{role}_path": (f"{role}_path", f"{role}_file_name") for role in ("reference", "target", "win", "lose")},
    "t5_embedding_path": ("t5_embedding_path",),
}


def list_items(config: ManifestData) -> list[ItemFiles | ItemError]:
    """The entries of the manifest.

    Raises:
        DataError: no such file, or not JSON or CSV.
    """
    given = Path(config.path).expanduser()
    path = manifest_file(given)
    if path is None:
        raise DataError(
            f"data.path: {given} is a folder without {' or '.join(METADATA)}; give the manifest in it (a .json, .jsonl "
            "or .csv file), or, of a folder with a self_bench.txt, set data.format=self_bench"
        )
    if not path.is_file():
        raise DataError(f"data.path: {path}: no such manifest (a .json, .jsonl or .csv file)")
    root = Path(config.image_root).expanduser() if config.image_root else path.parent
    listed = [_item(entry, position, root) for position, entry in enumerate(entries_of(path))]
    return with_targets(listed, config.target)


def manifest_file(path: Path) -> Path | None:
    """The list itself: of a folder its metadata file, None where it has none."""
    if not path.is_dir():
        return path
    return next((path / name for name in METADATA if (path / name).is_file()), None)


def with_targets(listed: Sequence[ItemFiles | ItemError], target: TargetRole) -> list[ItemFiles | ItemError]:
    """The items with the ground truth that `data.target` says. "auto" takes the files where an entry names one, else
    the source of each item with a mask: without a mask a model would learn to copy what it sees."""
    items = [item for item in listed if isinstance(item, ItemFiles)]
    names_files = any(item.target_path for item in items)

    def role(item: ItemFiles) -> TargetRole:
        if target == "file" or (target == "auto" and names_files):
            return "file" if item.target_path else "none"
        shows_it = item.source_path is not None and (target == "source" or item.mask_path is not None)
        return "source" if target != "none" and shows_it else "none"

    return [item if isinstance(item, ItemError) else _with_role(item, role(item)) for item in listed]


def _with_role(item: ItemFiles, role: TargetRole) -> ItemFiles:
    return replace(item, target=role, target_path=item.target_path if role == "file" else None)


def read_text(path: Path) -> str:
    """A text file.

    Raises:
        DataError: not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 (byte {error.start}); save it as UTF-8") from None


def entries_of(path: Path) -> list[Any]:
    """The entries of a JSON, JSONL or CSV file.

    Raises:
        DataError: not UTF-8, or not what its name says.
    """
    return _csv_entries(path) if path.suffix == ".csv" else json_entries(path)


def json_entries(path: Path) -> list[Any]:
    """A JSON list, or JSONL with an object a line.

    Raises:
        DataError: not UTF-8, or not JSON.
    """
    text = read_text(path)
    try:
        if text.lstrip().startswith("["):
            return cast("list[Any]", json.loads(text))
    except json.JSONDecodeError as error:
        raise DataError(f"{path}: not valid JSON: {error.msg} (line {error.lineno})") from None
    entries: list[Any] = []
    for number, line in enumerate(text.split("\n"), 1):  # splitlines() would cut at U+2028, which JSON strings may hold
        if line.strip():
            try:
                entries.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{path} line {number}: not valid JSON: {error.msg}; write one object a line, or one JSON list "
                    "of them"
                ) from None
    return entries


def csv_rows(path: Path) -> list[list[str]]:
    """Every row of a CSV file, the header first; blank lines are left out.

    Raises:
        DataError: not UTF-8, not CSV, or a row with more cells than the header.
    """
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    rows: list[list[str]] = []
    try:
        for row in reader:
            if rows and len(row) > len(rows[0]):
                raise DataError(
                    f"{path} line {reader.line_num}: {len(row)} cells, but the header names {len(rows[0])}; put a cell "
                    "with a comma in double quotes"
                )
            if row:
                rows.append(row)
    except csv.Error as error:
        raise DataError(f"{path} line {reader.line_num}: not valid CSV: {error}") from None
    return rows


def _csv_entries(path: Path) -> list[dict[str, Any]]:
    """Without the empty cells; `id` as a number where it is one."""
    header, *rows = csv_rows(path) or [[]]
    entries = [{key: cell for key, cell in zip(header, row, strict=False) if cell} for row in rows]
    return [{k: int(v) if k == "id" and v.isdecimal() else v for k, v in entry.items()} for entry in entries]


def _item(entry: Any, position: int, root: Path) -> ItemFiles | ItemError:
    where = f"entry {position}"
    if not isinstance(entry, dict):
        return ItemError(where, f"{entry!r} is not an object")
    entry = cast("dict[str, Any]", entry)
    used = {role: _first(entry, keys) for role, keys in _KEYS.items()}
    captioned = not entry.get("prompt") and used["image_path"] in _CAPTIONED
    prompt_key = "text" if captioned else "prompt"
    if not entry.get(prompt_key):
        return ItemError(where, "prompt missing or empty; each entry needs one")
    if entry.get(used["mask_path"]) and not entry.get(used["image_path"]):
        return ItemError(
            where, "mask_path without image_path; name the picture that it is the mask of, or leave it out"
        )
    texts = (*used.values(), "prompt", "text")
    wrong = [key for key in texts if key in entry and not isinstance(entry[key], str | None)]
    if wrong:
        return ItemError(where, f"{wrong[0]} is {entry[wrong[0]]!r}; it must be a string")
    number = entry.get("id", position)
    if not isinstance(number, int) or isinstance(number, bool):
        return ItemError(where, f"id is {number!r}; it must be an integer")
    paths = {role: root / entry[key] if entry.get(key) else None for role, key in used.items()}
    known = {*used.values(), "prompt", prompt_key, "id"}
    return ItemFiles(
        id=number,
        prompt=entry[prompt_key],
        source_path=paths["image_path"],
        mask_path=paths["mask_path"],
        reference_path=paths["reference_path"],
        target_path=paths["target_path"],
        win_path=paths["win_path"],
        lose_path=paths["lose_path"],
        embedding_path=paths["t5_embedding_path"],
        metadata={key: value for key, value in entry.items() if key not in known},
    )


def _first(entry: Mapping[str, Any], keys: Sequence[str]) -> str:
    """The first of the keys that an entry has a value under; of none, the first."""
    return next((key for key in keys if entry.get(key)), keys[0])
