"""A list of examples: a JSON list, JSONL with one object a line, or CSV; or a folder with metadata.jsonl or
metadata.csv (Hugging Face imagefolder).

Keys: `prompt`, and optionally `image_path` (what is repainted or edited; none for text to image), `more_images` (a list
of further source images, for models that read several), `id`, `mask_path`, `reference_path`, `target_path`, `win_path`
and `lose_path`, `text`, and `t5_embedding_path`, which the FLUX.1 families
read instead of encoding the prompt. `image` and
`mask`, `file_name` and the `*_file_name` columns of an imagefolder are read as aliases of the paths; in an imagefolder,
`text` is the caption if there is no `prompt`. Several texts of one image are a list under `text` or `texts`, or a list
of `{"text", "polygon"?}` or `{"text", "box"?}` under `lines`, in pixels of the image. Other keys are kept as metadata.
Relative paths start from the file's folder or from `data.image_root`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

from retouch.data.base import DataError, ImageSection, ItemError, ItemFiles, TargetRole, item_or_error
from retouch.data.lists import (
    EDITED_KEYS,
    OTHER_KEYS,
    PATH_KEYS,
    SUFFIXES,
    TEXT_KEYS,
    entries_of,
    fields_of,
    id_of,
    keys_in_place_of,
    lines_mask,
    near_keys,
    suffix_of,
    text_fields,
)
from retouch.data.remote import local_path
from retouch.files.disk import is_file, on_disk
from retouch.imaging.lines import parse_lines
from retouch.imaging.reading import PackedImage

METADATA = ("metadata.jsonl", "metadata.csv")
"""Manifest of a folder in the imagefolder layout."""

_CAPTIONED = ("file_name", "image_file_name")
"""Keys of an imagefolder, whose `text` is a caption."""

_MORE = "more_images"
"""Key of the source images beside the one that is edited."""


class ManifestData(ImageSection):
    """A JSON list, JSONL or CSV file of `{"prompt", "image_path"?, "more_images"?, "mask_path"?, "target_path"?,
    "reference_path"?, "win_path"? and "lose_path"?, ...}`, or a folder with metadata.jsonl or metadata.csv
    (imagefolder); without image_path for text to image, without mask_path to edit the whole image."""

    FREE_IN_EPOCH: ClassVar[Set[str]] = {"target", "image_root"}

    format: Literal["manifest"] = "manifest"
    target: Literal["auto", "file", "source", "none"] = "auto"
    """Ground truth of supervised steps. "file": target_path of each entry. "source": the image itself. "auto":
    target_path if any entry names one, else the image of each entry with a mask. "none": no example has one."""
    mask_lines: bool = True
    """The mask of an entry without one is the polygons of its `lines`. False: no mask, and the polygons only mark where
    a text is read."""
    image_root: str | None = None
    """Folder that relative paths start from; null is the manifest's own."""

    expects: ClassVar[str] = f"a manifest ({', '.join(SUFFIXES)}), an imagefolder ({' or '.join(METADATA)})"

    @classmethod
    def recognises(cls, path: Path) -> bool:
        file = _manifest_file(path)
        return file is not None and suffix_of(file) in SUFFIXES

    def has_list(self) -> bool:
        """And in a folder a list: "", of an empty variable, is the working directory."""
        return super().has_list() and self.listing() is not None

    def listing(self) -> Path | None:
        return _manifest_file(local_path(self.path))

    def given_images(self) -> frozenset[str]:
        return frozenset({"target", "win", "lose"})

    def list_items(self) -> list[ItemFiles | ItemError]:
        path = self.listing()
        if path is None:
            raise DataError(
                f"data.path: {local_path(self.path)} is a folder without {' or '.join(METADATA)}; give the "
                "manifest in it (a .json, .jsonl or .csv file), or, for a folder with a self_bench.txt, set "
                "data.format=self_bench"
            )
        if not path.is_file():
            raise DataError(f"data.path: {path}: no such manifest (a .json, .jsonl or .csv file)")
        root = local_path(self.image_root, "data.image_root") if self.image_root else path.parent
        make = partial(manifest_item, root=root, mask_lines=self.mask_lines)
        listed = [item_or_error(f"entry {i}", make, entry, i) for i, entry in enumerate(entries_of(path))]
        return _with_targets(listed, self.target)


def _manifest_file(path: Path) -> Path | None:
    """The list itself: in a folder its metadata file, None if there is none."""
    if not path.is_dir():
        return path
    return next((path / name for name in METADATA if (path / name).is_file()), None)


def manifest_item(given: Any, position: int, root: Path, *, mask_lines: bool = True) -> ItemFiles:
    """The item of an entry; relative paths start from `root`.

    Args:
        mask_lines: as the option of `ManifestData`.

    Raises:
        DataError: an entry that names no item.
    """
    entry = fields_of(given)
    used = {role: _first(entry, keys) for role, keys in PATH_KEYS.items()}
    captioned = not entry.get("prompt") and used["image_path"] in _CAPTIONED
    prompt_key = "text" if captioned else "prompt"
    if not entry.get(prompt_key):
        raise DataError(f"prompt missing or empty; each entry needs one{keys_in_place_of(['prompt'], entry)}")
    absent = [role for role, key in used.items() if not entry.get(key)]
    near = near_keys(entry, (key for role in absent for key in PATH_KEYS[role]))
    near |= {key: role for role in absent for key in OTHER_KEYS.get(role, ()) if key in entry}
    if meant := next((key for key in near if _names_file(root, entry[key])), None):  # another value is metadata
        raise DataError(f"the key {meant!r} is not read; rename it to {near[meant]!r}")
    edited = next((key for key in EDITED_KEYS if key in entry and _names_file(root, entry[key])), None)
    if edited is not None and not entry.get(used["target_path"]):  # beside a target, the image is the one to edit
        image = used["image_path"]
        raise DataError(
            f"the key {edited!r} is not read; if {image!r} is the result of the edit, rename {edited!r} to "
            f"'image_path' and {image!r} to 'target_path', else leave {edited!r} out"
        )
    if entry.get(used["mask_path"]) and not entry.get(used["image_path"]):
        raise DataError("mask_path without image_path; name the image that the mask belongs to, or leave it out")
    texts = (*used.values(), prompt_key)
    wrong = [key for key in texts if key in entry and not isinstance(entry[key], str | None)]
    if wrong:
        raise DataError(f"{wrong[0]} is {entry[wrong[0]]!r}; it must be a string")
    paths = {role: on_disk(root / entry[key]) if entry.get(key) else None for role, key in used.items()}
    written = text_fields({key: value for key, value in entry.items() if key != prompt_key})
    known = {*used.values(), "prompt", prompt_key, "id", _MORE, *TEXT_KEYS}
    mask: Path | PackedImage | None = paths["mask_path"]
    if mask is None and paths["image_path"] is not None and mask_lines and "lines" in written:
        mask = lines_mask(paths["image_path"], parse_lines(written["lines"]))
    return ItemFiles(
        id=id_of(entry, position),
        prompt=entry[prompt_key],
        source_path=paths["image_path"],
        mask_path=mask,
        reference_path=paths["reference_path"],
        target_path=paths["target_path"],
        win_path=paths["win_path"],
        lose_path=paths["lose_path"],
        embedding_path=paths["t5_embedding_path"],
        metadata={key: value for key, value in entry.items() if key not in known} | written,
        more_paths=tuple(on_disk(root / name) for name in _more_images(entry, paths["image_path"])),
        mask_is_made=mask is not paths["mask_path"],
    )


def _with_targets(listed: Sequence[ItemFiles | ItemError], target: TargetRole) -> list[ItemFiles | ItemError]:
    """The items with the ground truth that `data.target` chooses. "auto" takes the files if an entry names one, else
    the source of each item with a mask: without a mask a model would learn to copy its input."""
    items = [item for item in listed if isinstance(item, ItemFiles)]
    names_files = any(item.target_path for item in items)

    def with_role(item: ItemFiles) -> ItemFiles:
        # Decided for the whole list: where some items name a file, the source of another is its input, and not what it
        # shall become.
        role: TargetRole = "none"
        if target == "file" or (target == "auto" and names_files):
            role = "file" if item.target_path else "none"
        elif target != "none" and item.source_path and (target == "source" or item.mask_path):
            role = "source"
        return replace(item, target=role, target_path=item.target_path if role == "file" else None)

    return [item if isinstance(item, ItemError) else with_role(item) for item in listed]


def _more_images(entry: Mapping[str, Any], image: Path | None) -> list[str]:
    """Names of the source images beside the one that is edited; a cell of a CSV file holds one."""
    given = entry.get(_MORE) or []
    names: list[Any] = [given] if isinstance(given, str) else given
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise DataError(f"{_MORE} is {given!r}; it must be a list of paths")
    if names and image is None:
        raise DataError(f"{_MORE} without image_path; name the image that is edited as image_path")
    return names


def _names_file(root: Path, value: object) -> bool:
    """Whether a value of an entry is the path of a file, or a list that begins with one."""
    first = cast("list[object]", value)[0] if isinstance(value, list) and value else value
    return isinstance(first, str) and is_file(on_disk(root / first))


def _first(entry: Mapping[str, Any], keys: Sequence[str]) -> str:
    """The first of the keys that an entry has a value under; if there is none, the first key."""
    for key in keys:  # a loop is fast: a list may have a million entries, each with all these keys
        if entry.get(key):
            return key
    return keys[0]
