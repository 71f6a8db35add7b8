"""A JSON list, or JSONL with one object a line: `prompt`, and optionally `image_path` (what is repainted or edited;
none for text to image), `id`, `mask_path`, `reference_path`, `target_path`, `win_path` and `lose_path`, `text`, and
`t5_embedding_path`, which flux_fill reads instead of encoding the prompt; other keys are kept as metadata. Relative
paths start from the manifest's folder or from `data.image_root`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from retouch.data.dataset import DataError, ItemError, ItemFiles

if TYPE_CHECKING:
    from retouch.config.data_sections import ManifestData

_PATHS = ("image_path", "mask_path", "reference_path", "target_path", "win_path", "lose_path", "t5_embedding_path")


def list_items(config: ManifestData) -> list[ItemFiles | ItemError]:
    """The objects of the manifest.

    Raises:
        DataError: no such file, or not JSON.
    """
    path = Path(config.path).expanduser()
    if path.is_dir():
        raise DataError(
            f"data.path: {path} is a folder; give the manifest in it (a .json or .jsonl file), or, of a folder with a "
            "self_bench.txt, set data.format=self_bench"
        )
    if not path.is_file():
        raise DataError(f"data.path: {path}: no such manifest (a .json or .jsonl file)")
    root = Path(config.image_root).expanduser() if config.image_root else path.parent
    return [_item(entry, position, root) for position, entry in enumerate(json_entries(path))]


def read_text(path: Path) -> str:
    """A text file.

    Raises:
        DataError: not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 (byte {error.start}); save it as UTF-8") from None


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


def _item(entry: Any, position: int, root: Path) -> ItemFiles | ItemError:
    where = f"entry {position}"
    if not isinstance(entry, dict):
        return ItemError(where, f"{entry!r} is not an object")
    entry = cast("dict[str, Any]", entry)
    if not entry.get("prompt"):
        return ItemError(where, "prompt missing or empty; each entry needs one")
    if entry.get("mask_path") and not entry.get("image_path"):
        return ItemError(
            where, "mask_path without image_path; name the picture that it is the mask of, or leave it out"
        )
    wrong = [key for key in (*_PATHS, "prompt", "text") if key in entry and not isinstance(entry[key], str | None)]
    if wrong:
        return ItemError(where, f"{wrong[0]} is {entry[wrong[0]]!r}; it must be a string")
    number = entry.get("id", position)
    if not isinstance(number, int) or isinstance(number, bool):
        return ItemError(where, f"id is {number!r}; it must be an integer")
    paths = {key: root / entry[key] if entry.get(key) else None for key in _PATHS}
    known = {*_PATHS, "prompt", "id"}
    return ItemFiles(
        id=number,
        prompt=entry["prompt"],
        source_path=paths["image_path"],
        mask_path=paths["mask_path"],
        reference_path=paths["reference_path"],
        target_path=paths["target_path"],
        win_path=paths["win_path"],
        lose_path=paths["lose_path"],
        embedding_path=paths["t5_embedding_path"],
        target="file" if paths["target_path"] else "none",
        metadata={key: value for key, value in entry.items() if key not in known},
    )
