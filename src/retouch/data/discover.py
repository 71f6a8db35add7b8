"""What a folder of images holds: a layout that retouch reads as it stands, or images, masks and captions that belong
together by their names."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from retouch.data.dataset import DataError, ItemFiles, list_items
from retouch.data.formats.brushbench import MAPPING
from retouch.data.formats.manifest import METADATA, SUFFIXES, entries_of, manifest_file, read_text
from retouch.data.sections import (
    Data,
    ManifestData,
)
from retouch.data.validate import data_at

IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")

_ROLES = {
    "mask_path": ("mask", "masks"),
    "target_path": ("target", "targets"),
    "reference_path": ("ref", "refs", "reference", "references"),
    "image_path": ("image", "images", "source", "sources", "original", "originals"),
    "prompt": ("caption", "captions", "prompt", "prompts"),
}
"""Key of a manifest -> names of folders, and endings of file names (photo_mask.png), that mean it."""

_ROLE_OF = {word: role for role, words in _ROLES.items() for word in words}

_SIZE = (512, 512)
"""What listing takes without opening an image."""


@dataclass(frozen=True)
class Found:
    """A data set.

    Attributes:
        what: its layout, for people.
        items: what it lists.
        format: `data.format`.
        path: `data.path`; None where a manifest has to be written.
        entries: of that manifest, with absolute paths.
        left_out: files that are not used, each with the reason: images that lack a mask or a caption, and second files
            of one example and role.
    """

    what: str
    items: list[ItemFiles]
    format: str
    path: Path | None = None
    entries: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    left_out: list[str] = field(default_factory=list[str])


def discover(path: Path) -> Found:
    """Recognise a folder (or a list file) by the first layout that fits.

    Raises:
        DataError: none does, with the layouts that would.
    """
    if not path.exists():
        raise DataError(f"FOLDER: given {path}; no such file or folder")
    for recognise in RECOGNISED:
        found = recognise(path)
        if found is not None and found.items:
            return found
    raise DataError(
        f"FOLDER: given {path}; expected a self_bench.txt, a {MAPPING}, a manifest ({', '.join(SUFFIXES)}), an "
        f"imagefolder ({' or '.join(METADATA)}), or images with captions: photo.png, photo.txt and photo_mask.png, or "
        "images/photo.png, captions/photo.txt and masks/photo.png; add what is missing"
    )


def _listed(path: Path) -> Found | None:
    """A list file itself, or a folder whose list has a name of its own."""
    lists = ("self_bench.txt", "cross_bench.txt", MAPPING)
    if path.is_dir() and not any((path / name).is_file() for name in lists) and manifest_file(path) is None:
        return None
    return _as_it_stands(data_at(path, _SIZE))


def _manifest(path: Path) -> Found | None:
    """A folder with one manifest."""
    files = [file for file in sorted(path.iterdir()) if file.suffix in SUFFIXES] if path.is_dir() else []
    manifests = [file for file in files if _is_manifest(file)]
    if len(manifests) > 1:
        names = ", ".join(file.name for file in manifests)
        raise DataError(f"FOLDER: given {path}, which has several manifests ({names}); give the path of one of them")
    return _as_it_stands(ManifestData(path=str(manifests[0]), resolution=_SIZE)) if manifests else None


def _pairs(path: Path) -> Found | None:
    """Images with their masks and captions by name."""
    if not path.is_dir():
        return None
    groups: dict[tuple[Path, str], dict[str, Path]] = {}
    left_out: list[str] = []
    for file in _files(path):
        folder, stem, role = _place(file)
        first = groups.setdefault((folder, stem), {}).setdefault(role, file)
        if first != file:
            names = (os.path.relpath(each, path) for each in (file, first))
            left_out.append("{}: has the name and role of {}; rename one of them".format(*names))
    named = [files for files in groups.values() if "image_path" in files]
    masked = any("mask_path" in files for files in named)
    entries: list[dict[str, str]] = []
    for files in named:
        missing = [] if "prompt" in files else ["caption"]
        missing += ["mask"] if masked and "mask_path" not in files else []
        if missing:
            left_out.append(f"{os.path.relpath(files['image_path'], path)}: no {', no '.join(missing)}")
            continue
        prompt = " ".join(read_text(files["prompt"]).split())
        paths = {role: str(file.resolve()) for role, file in files.items() if role != "prompt"}
        entries.append({"prompt": prompt, **paths})
    items = [_item(number, entry) for number, entry in enumerate(entries)]
    return Found("images and captions by name", items, "manifest", entries=entries, left_out=left_out)


RECOGNISED: tuple[Callable[[Path], Found | None], ...] = (_listed, _manifest, _pairs)
"""Layouts in the order in which they are tried."""


def _as_it_stands(section: Data) -> Found:
    items = [item for item in list_items(section) if isinstance(item, ItemFiles)]
    return Found(section.format, items, section.format, Path(section.path))


def _is_manifest(file: Path) -> bool:
    try:
        entries = entries_of(file)
    except DataError:
        return False
    first: object = entries[0] if entries else None
    return isinstance(first, dict) and "prompt" in cast("dict[str, Any]", first)


def _files(folder: Path) -> Iterator[Path]:
    """Images, and texts that can be their captions, hidden ones left out."""
    for file in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
        if file.is_file() and not hidden and file.suffix.lower() in (*IMAGES, ".txt"):
            yield file


def _place(file: Path) -> tuple[Path, str, str]:
    """The folder and the name that files of one example share, and the role of this one."""
    stem, folder = file.stem, file.parent
    role = "image_path" if file.suffix.lower() in IMAGES else "prompt"
    of_folder = _ROLE_OF.get(folder.name.lower())
    if of_folder is not None:
        folder = folder.parent
        role = role if role == "prompt" else of_folder
    ending = re.fullmatch(r"(.+)[_.-]([a-z]+)", stem, re.IGNORECASE)
    if ending is not None and _ROLE_OF.get(ending[2].lower()) is not None:
        stem = ending[1]
        role = role if role == "prompt" else _ROLE_OF[ending[2].lower()]
    return folder, stem, role


def _item(number: int, entry: dict[str, str]) -> ItemFiles:
    def path(key: str) -> Path | None:
        return Path(entry[key]) if key in entry else None

    return ItemFiles(
        id=number,
        prompt=entry["prompt"],
        source_path=path("image_path"),
        mask_path=path("mask_path"),
        reference_path=path("reference_path"),
        target_path=path("target_path"),
        target="file" if "target_path" in entry else "none",
    )
