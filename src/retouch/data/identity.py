"""Identity of an item by its content, independent of file names; and whether two data sets share images."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from retouch.data.base import ItemFiles
from retouch.files.disk import is_file
from retouch.imaging.lines import folded
from retouch.imaging.reading import PackedImage

if TYPE_CHECKING:
    from retouch.data.dataset import Dataset


def files_of(item: ItemFiles) -> dict[str, Path | PackedImage]:
    """The files of an item, by field."""
    named = {name: value for name in _fields(type(item)) if isinstance(value := getattr(item, name), _FILE)}
    return named | {f"more_path_{i}": path for i, path in enumerate(item.more_paths)}


_FILE = (Path, PackedImage)


@cache
def _fields(kind: type[ItemFiles]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind) if field.name.endswith("_path"))


def item_key(item: ItemFiles) -> int:
    """63-bit hash of a model's input: id, prompt, roles of the images, and the bytes of the files. It excludes fields
    that only rewards and curricula read (metadata, difficulty)."""
    # a target that is the source adds no pixels; "none" is what checkpoints of manifests without targets hold
    target = "none" if item.target == "source" else item.target
    told: dict[str, str | int | None] = {"id": item.id, "prompt": item.prompt, "target": target}
    for name, file in files_of(item).items():
        if isinstance(file, PackedImage):
            told[name] = file.digest
        else:
            told[name] = digest(file) if is_file(file) else None  # a reference's mask may be missing
    key = hashlib.blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=8).digest()
    return int.from_bytes(key, "big") >> 1


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def trained_on(evaluation: Dataset, *training: Dataset, with_prompt: bool = False) -> list[ItemFiles]:
    """Items of `evaluation` whose source or target is an image of the training data; for text to image, those whose
    prompt is, in the form in which scorers compare texts and without case, as `retouch data split` compares prompts.
    Only files as long as one of the other side are read; images inside tables have digests, and are compared with such
    images alone.

    Args:
        with_prompt: an image counts only where it is trained on with the same prompt.
    """
    asked = {item.id: images_of(item) for item in evaluation.items}
    # Reading every file of a training set takes minutes. Equal images have equal lengths: only files as long as one
    # of the other side are hashed.
    sizes = {path.stat().st_size for images in asked.values() for path in paths(images)}
    prompts: defaultdict[Path | PackedImage | None, set[str]] = defaultdict(set)
    for data in training:
        for item in data.items:
            for image in images_of(item) or [None]:
                prompts[image].add(_plain(item.prompt))
    of_file: defaultdict[str, set[str]] = defaultdict(set)
    lengths = set[int]()
    for path in paths(prompts):
        lengths.add(length := path.stat().st_size)
        if length in sizes:
            of_file[digest(path)] |= prompts[path]

    def prompts_with(image: Path | PackedImage) -> set[str] | None:
        """Prompts of an image of the training data; None if it is none."""
        if isinstance(image, PackedImage):
            return prompts.get(image)
        return of_file.get(digest(image)) if image.stat().st_size in lengths else None

    def is_trained_on(item: ItemFiles) -> bool:
        if not asked[item.id]:
            return _plain(item.prompt) in prompts.get(None, ())
        found = [known for known in map(prompts_with, asked[item.id]) if known is not None]
        return any(_plain(item.prompt) in known for known in found) if with_prompt else bool(found)

    return [item for item in evaluation.items if is_trained_on(item)]


def _plain(prompt: str) -> str:
    return folded(prompt, case_sensitive=False)


def images_of(item: ItemFiles) -> list[Path | PackedImage]:
    """The images that a model may memorise: not masks, references and further source
    images, which many items may share."""
    return [p for p in (item.source_path, item.target_path, item.win_path, item.lose_path) if p is not None]


def paths(images: Iterable[Path | PackedImage | None]) -> list[Path]:
    """The images that are files of their own."""
    return [image for image in images if isinstance(image, Path)]
