"""The data set that a path holds: of a format that recognises it, or images, masks and captions matched by name."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast
from unicodedata import normalize

from retouch.data.base import DataError, DataSection, ItemError, ItemFiles
from retouch.data.formats import FORMATS
from retouch.data.formats.manifest import ManifestData, manifest_item
from retouch.data.lists import SUFFIXES, entries_of, read_text, suffix_of
from retouch.data.remote import local_path
from retouch.files.disk import files_below, on_disk
from retouch.registry import import_plugins_of_environment

IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")

OTHER_IMAGES = (".heic", ".heif", ".avif", ".jxl", ".jp2", ".gif", ".svg", ".psd", ".dng", ".cr2", ".nef", ".arw")
"""Suffixes of images that are listed as unused: not every Pillow reads them, or they hold more than one image."""

CAPTIONS = (".txt", ".caption")

MASKS = ("mask", "masks", "masklabel")
"""Folder names of masks, and the endings of their file names."""

_ROLES = {
    "mask_path": MASKS,
    "target_path": ("target", "targets"),
    "reference_path": ("ref", "refs", "reference", "references"),
    "image_path": ("image", "images", "img", "imgs", "source", "sources", "original", "originals"),
    "prompt": ("caption", "captions", "prompt", "prompts"),
}
"""Key of a manifest -> its folder names, and its endings of file names (photo_mask.png)."""

_ROLE_OF = {word: role for role, words in _ROLES.items() for word in words}

_SIZE = (512, 512)
"""Any size: listing opens no image."""


@dataclass(frozen=True)
class Found:
    """A data set.

    Attributes:
        layout: description of its layout.
        items: the items that it lists.
        format: `data.format`.
        path: `data.path`; None if a manifest has to be written.
        entries: of that manifest, with absolute paths.
        left_out: unused files, each with the reason: images without a mask or a caption, masks and the like without
            an image, and second files of one example and role; of a list, the entries that name no example.
    """

    layout: str
    items: list[ItemFiles]
    format: str
    path: Path | None = None
    entries: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    left_out: list[str] = field(default_factory=list[str])


def recognised(path: Path, size: tuple[int, int]) -> DataSection | None:
    """A section of the first format that recognises the path, those of plug-ins first, or data at a commit; None if no
    format does."""
    import_plugins_of_environment()
    path = local_path(str(path))
    formats = sorted(FORMATS.available().items(), key=lambda pair: FORMATS.is_builtin(pair[0]))
    for _, section in formats:
        if section.recognises(path):
            return section.model_validate({"path": str(path), "resolution": size})
    return None


def expected_paths() -> str:
    """The paths that the formats recognise, for messages."""
    return ", ".join(section.expects for section in FORMATS.available().values() if section.expects)


def data_at(path: Path, size: tuple[int, int], or_else: str = "") -> DataSection:
    """As `recognised`, and the one manifest of a folder.

    Args:
        or_else: what else the caller takes, for the message.

    Raises:
        DataError: no format recognises the path, or it has several manifests.
    """
    path = on_disk(path)
    section = recognised(path, size) or _manifest_in(path, size)
    if section is None:
        missing = "" if path.exists() else "no such file or folder; "
        lists = "; `retouch init` writes a list of these images" if path.is_dir() and _pairs(path).items else ""
        raise DataError(f"{path}: {missing}expected {expected_paths()}{or_else}{lists}")
    return section


def discover(path: Path) -> Found:
    """Recognise a folder or a list file, by its format or by the names of its files.

    Raises:
        DataError: nothing is recognised.
    """
    path = on_disk(path)
    if not path.exists():
        raise DataError(f"FOLDER: given {path}; no such file or folder")
    if not _is_utf8(path):
        raise DataError(f"FOLDER: given {path}, a name that is not UTF-8, which no run file can hold; rename it")
    # By the marks of a format, then by the content of a list, then by names alone: each guesses more than the last.
    section = recognised(path, _SIZE) or _manifest_in(path, _SIZE)
    found = Found("", [], "") if section is None else _as_listed(section)
    if not found.items and path.is_dir():
        found = _pairs(path)
    if not found.items:
        if section is not None and (broken := [item for item in section.items() if isinstance(item, ItemError)]):
            raise DataError(f"FOLDER: given {path}, a list for data.format={section.format}; {broken[0]}")
        raise DataError(
            f"FOLDER: given {path}; expected {expected_paths()}, or images with captions: photo.png, photo.txt and "
            "photo_mask.png, or images/photo.png, captions/photo.txt and masks/photo.png; add what is missing"
        )
    return found


def _manifest_in(path: Path, size: tuple[int, int]) -> ManifestData | None:
    """The one manifest of a folder."""
    files = [file for file in sorted(path.iterdir()) if suffix_of(file) in SUFFIXES] if path.is_dir() else []
    manifests = [file for file in files if _is_manifest(file)]
    if len(manifests) > 1:
        names = ", ".join(file.name for file in manifests)
        raise DataError(f"{path}: several manifests ({names}); give the path of one of them")
    return ManifestData(path=str(manifests[0]), resolution=size) if manifests else None


def _as_listed(section: DataSection) -> Found:
    listed = section.items()
    items = [item for item in listed if isinstance(item, ItemFiles)]
    left_out = [str(item) for item in listed if isinstance(item, ItemError)]
    return Found(section.format, items, section.format, Path(section.path), left_out=left_out)


def _is_manifest(file: Path) -> bool:
    try:
        entries = entries_of(file)
    except DataError:
        return False
    return bool(entries) and isinstance(entries[0], dict) and "prompt" in cast("dict[str, object]", entries[0])


def _pairs(path: Path) -> Found:
    """Images with their masks and captions, by name."""
    groups: dict[tuple[Path, str], dict[str, Path]] = {}
    left_out: list[str] = []
    placed = ((file, *_place(file, path)) for file in _files(path))
    for file, folder, stem, role, of_folder in sorted(placed, key=lambda one: one[-1] is not None):
        unread = suffix_of(file) in OTHER_IMAGES
        if unread or not _is_utf8(file):
            reason = "not read; convert it to PNG or JPEG" if unread else "a name that is not UTF-8; rename it"
            left_out.append(f"{os.path.relpath(file, path)}: {reason}")
            continue
        files = groups.setdefault((folder, stem), {})
        if of_folder is not None and role in files and files[role].parent != file.parent:
            role = of_folder
        first = files.setdefault(role, file)
        if first != file:
            names = (os.path.relpath(each, path) for each in (file, first))
            left_out.append("{}: has the name and role of {}; rename one of them".format(*names))
    named = [files for files in groups.values() if "image_path" in files]
    for files in groups.values():
        pictures = {} if "image_path" in files else {role: file for role, file in files.items() if role != "prompt"}
        for role, file in pictures.items():  # a photograph of a mask, photo_mask.png, has this name, too
            left_out.append(
                f"{os.path.relpath(file, path)}: a {role.removesuffix('_path')} by its name, but it has no image"
            )
    masked = any("mask_path" in files for files in named)
    entries: list[dict[str, str]] = []
    for files in named:
        prompt = " ".join(read_text(files["prompt"]).split()) if "prompt" in files else ""
        missing = [] if prompt else ["caption"]
        missing += ["mask"] if masked and "mask_path" not in files else []
        if missing:
            left_out.append(f"{os.path.relpath(files['image_path'], path)}: no {', no '.join(missing)}")
            continue
        paths = {role: str(file.resolve()) for role, file in files.items() if role != "prompt"}
        entries.append({"prompt": prompt, **paths})
    items = [_item(entry, number) for number, entry in enumerate(entries)]
    return Found("images and captions by name", items, "manifest", entries=entries, left_out=left_out)


def _item(entry: dict[str, str], number: int) -> ItemFiles:
    item = manifest_item(entry, number, Path())
    return replace(item, target="file") if item.target_path else item


def _is_utf8(path: Path) -> bool:
    """Whether the name of a file can be written to a list: archives of other systems have names in other encodings."""
    return os.fsencode(path).decode("utf-8", "replace").encode() == os.fsencode(path)


def _files(folder: Path) -> Iterator[Path]:
    """Images, also those that are not read, and texts that can be captions, except hidden files."""
    for file in sorted(files_below(folder)):
        if file.is_file() and suffix_of(file) in (*IMAGES, *CAPTIONS, *OTHER_IMAGES):
            yield file


def _place(file: Path, top: Path) -> tuple[Path, str, str, str | None]:
    """The folder and the name that the files of one example share, and the role of this file; and the role of its
    folder, where its name is that of an image: masks/1_image.png is a mask beside images/1_image.png, and an image
    beside masks/1_mask.png. Two images of one folder are no image and its mask.

    Args:
        top: the folder that was given, whose own name is no role: images/ may hold masks/.
    """
    stem, folder = file.stem, file.parent
    role = "image_path" if suffix_of(file) in IMAGES else "prompt"
    above = folder.relative_to(top).parts
    # the folder of a role may hold others: img/10_dog/1.png and mask/10_dog/1.png
    place = next((i for i in reversed(range(len(above))) if above[i].lower() in _ROLE_OF), None)
    if place is not None:
        folder = top.joinpath(*above[:place], *above[place + 1 :])
        role = role if role == "prompt" else _ROLE_OF[above[place].lower()]
    ending, of_folder = re.fullmatch(r"(.+)[_.-]([a-z]+)", stem, re.IGNORECASE), role
    if ending is not None and (named := _ROLE_OF.get(ending[2].lower())) is not None:
        # "img" is part of many names, also of masks: 1_img_mask.png belongs to 1_img.png, masks/1_img.png to
        # img/1_img.png.
        is_img = ending[2].lower() == "img"
        stem = ending[1] if is_img else re.sub(r"(?<=.)[_.-]img$", "", ending[1], flags=re.IGNORECASE)
        role = role if role == "prompt" or (is_img and place is not None) else named
    # macOS writes accents as characters of their own: one name may be written in both ways
    other = of_folder if role == "image_path" != of_folder else None
    return Path(normalize("NFC", str(folder))), normalize("NFC", stem), role, other
