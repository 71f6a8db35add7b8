"""The outputs of a benchmark: the images that it requires, their official names, and their files. No torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from retouch.benchmarks.base import Benchmark
from retouch.data.base import ItemFiles
from retouch.data.buckets import batches_of_one_shape
from retouch.data.identity import item_key
from retouch.errors import ConfigError, DataError
from retouch.imaging.reading import PackedImage

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
"""Suffixes under which an output is found; its official one comes first."""


_LONGEST_NAME = 240
"""Bytes of a file name: 255 on the usual file systems, less the ending of a temporary file."""

_MOST_DIGITS = 9


@dataclass(frozen=True)
class Output:
    """One image that a benchmark requires.

    Attributes:
        key: see `ImageRow`.
        position: of its item in the list of items.
        index: number of the image among those of its item.
        file: official name, relative to the folder of outputs.
    """

    item: ItemFiles
    key: str
    position: int
    index: int
    file: str

    @property
    def own_file(self) -> str:
        """Name of a sample of this package: the official one as PNG, which loses nothing."""
        return str(Path(self.file).with_suffix(".png"))


@dataclass(frozen=True)
class Shard:
    """Share `index` (from 0) of `count` of the work."""

    index: int = 0
    count: int = 1

    def __str__(self) -> str:
        return f"{self.index + 1}/{self.count}"

    @classmethod
    def parse(cls, text: str) -> Shard:
        """The shard of "1/4", which is the first of four.

        Raises:
            ConfigError: another form.
        """
        index, slash, count = text.partition("/")
        digits = all(number.isdecimal() and len(number) <= _MOST_DIGITS for number in (index, count))
        if slash and digits and 1 <= int(index) <= int(count):
            return cls(int(index) - 1, int(count))
        raise ConfigError(f"--shard: given {text!r}; write I/N with I from 1 to N, like 1/4")


def outputs_of(benchmark: Benchmark, items: Sequence[ItemFiles]) -> list[Output]:
    """All outputs, item by item.

    Raises:
        ConfigError: two outputs have one name, which is a fault of the benchmark's class.
        DataError: a name in the data set that is no name of a file, or leads out of the folder of outputs.
    """
    keys = dict[Path | PackedImage, str]()

    def key_of(item: ItemFiles) -> str:
        own = benchmark.key(item)
        return own if item.source_path is None else keys.setdefault(item.source_path, own)

    found = [
        Output(item, key_of(item), position, index, _inside(benchmark.file_name(item, index), item))
        for position, item in enumerate(items)
        for index in range(benchmark.count)
    ]
    names = {output.own_file for output in found}
    if len(names) < len(found):
        raise ConfigError(f"{benchmark.name}: two outputs have one file name; file_name must give each its own")
    return found


def _inside(file: str, item: ItemFiles) -> str:
    """The name, if it stays in its folder."""
    parts = PurePosixPath(file).parts
    unusable = not parts or file.startswith("/") or ".." in parts or file.endswith("/") or "\0" in file
    if unusable or any(len(part.encode()) > _LONGEST_NAME for part in parts):
        raise DataError(
            f"{item.where}: its output would be named {file[:80]!r}; names in a data set must be relative, without "
            f"'..', and of at most {_LONGEST_NAME} bytes"
        )
    return file


def own(outputs: Sequence[Output], shard: Shard, chunk: int, shapes: Sequence[Hashable] = ()) -> list[list[Output]]:
    """The chunks of outputs of a shard. The chunks of all shards are those of one process: an image does not depend on
    the number of shards.

    Args:
        shapes: of every output, of which a chunk has one; none: all have one.
    """
    chunks = batches_of_one_shape(shapes or [None] * len(outputs), chunk)
    return [[outputs[place] for place in rows] for rows in chunks[shard.index :: shard.count]]


def find_file(folder: Path, file: str) -> Path | None:
    """The file of an output in a folder, with any suffix of `SUFFIXES`; None if it is missing."""
    name = folder / file
    exact = [name] if name.is_file() else []
    others = (name.with_suffix(suffix) for suffix in SUFFIXES)
    return next(iter([*exact, *(other for other in others if other.is_file())]), None)


def unused_files(folder: Path, outputs: Sequence[Output]) -> list[Path]:
    """Images of a folder that are no output."""
    used = {find_file(folder, output.file) for output in outputs}
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path not in used)


def item_digest(item: ItemFiles) -> str:
    """Hash of everything that an item passes to models and scorers: prompt, metadata, the bytes of its files."""
    told = json.dumps([item_key(item), item.metadata], sort_keys=True, default=str)
    return hashlib.blake2b(told.encode(), digest_size=16).hexdigest()


def image_key(item: ItemFiles) -> str:
    """Identity of everything that a model reads of an item; samples of this package carry it."""
    return f"{item_key(item):016x}"
