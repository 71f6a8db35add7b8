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
from retouch.data.tables import table_digest
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


def content_of(image: Path | PackedImage | None) -> str:
    """Name of an image as the original of a copy: SHA-256 of a file, the digest of an image in a table; "" of none.
    Votes hold it, and are divided by it: another digest would put further votes on an image into another part."""
    return "" if image is None else image.digest if isinstance(image, PackedImage) else digest(image)


def _contents(image: Path | PackedImage) -> set[str]:
    """The names of an image as an original (`content_of`), in a file of its own or in a table."""
    content, own = (image.read(), {image.digest}) if isinstance(image, PackedImage) else (image.read_bytes(), set())
    return {hashlib.sha256(content).hexdigest(), table_digest(content), *own}


def _length(image: Path | PackedImage) -> int:
    return len(image.read()) if isinstance(image, PackedImage) else image.stat().st_size


def trained_on(evaluation: Dataset, *training: Dataset, with_prompt: bool = False) -> list[ItemFiles]:
    """Items of `evaluation` whose source or target is an image of the training data; for text to image, those whose
    prompt is, in the form in which scorers compare texts and without case, as `retouch data split` compares prompts.
    Only files as long as one of the other side are read, or, where a source is a copy of another file, all of them;
    an image in a table is the same as a file with its bytes.

    Args:
        with_prompt: an image counts only where it is trained on with the same prompt.
    """
    asked = {item.id: images_of(item) for item in evaluation.items}
    # Reading every file of a training set takes minutes. Equal images have equal lengths: only files as long as one
    # of the other side are hashed. Items share images of a table, which are read for their length.
    length_of, contents_of = cache(_length), cache(_contents)
    sizes = {length_of(image) for images in asked.values() for image in images}
    prompts: defaultdict[Path | PackedImage | None, set[str]] = defaultdict(set)
    for data in training:
        for item in data.items:
            for image in images_of(item) or [None]:
                prompts[image].add(_plain(item.prompt))
    of_content: defaultdict[str, set[str]] = defaultdict(set)
    for item in (item for data in training for item in data.items if item.original):
        of_content[item.original].add(_plain(item.prompt))
    # a copy has another length than its original
    of_any_length = bool(of_content) or any(item.original for item in evaluation.items)
    lengths = set[int]()
    for image in filter(None, prompts):
        lengths.add(length := length_of(image))
        for content in contents_of(image) if length in sizes or of_any_length else ():
            of_content[content] |= prompts[image]

    def is_trained_on(item: ItemFiles) -> bool:
        if not asked[item.id]:
            return _plain(item.prompt) in prompts.get(None, ())
        known = [image for image in asked[item.id] if of_any_length or length_of(image) in lengths]
        contents = {item.original}.union(*map(contents_of, known))
        found = [of_content[one] for one in contents if one in of_content]
        return any(_plain(item.prompt) in of for of in found) if with_prompt else bool(found)

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
