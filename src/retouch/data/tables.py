"""Rows of parquet, arrow and JSONL files, and of data sets on the hub, as the formats of published protocols read them.

pyarrow and datasets (extra `vlm`) are imported when a file or the hub needs them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from retouch.data.base import DataError
from retouch.data.lists import entries_of, fields_of, require_file, suffix_of
from retouch.data.remote import import_library, local_path, of_the_hub, pinned
from retouch.files.disk import files_below, is_file, on_disk
from retouch.files.hub import hub_problem, require_hub
from retouch.imaging.reading import PackedImage

KINDS = (".parquet", ".arrow", ".jsonl")

IMAGE_COLUMNS = frozenset({"image", "input_image", "input_image_raw"})
"""Columns of images in the data sets of the formats."""


@dataclass(frozen=True)
class Table:
    """Rows by position, read on access.

    Attributes:
        name: of the file within its folder, or of the split.
        folder: start of relative image paths; None: there are none.
    """

    name: str
    size: int
    row: Callable[[int], Mapping[str, Any]]
    folder: Path | None = None

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return (self.row(i) for i in range(self.size))


def tables_of(path: str) -> list[Table]:
    """The tables of a file or of a folder, at any depth and behind links, sorted by name; no hidden ones.

    Raises:
        DataError: nothing there, or a file that cannot be read.
    """
    root = local_path(path)
    if not root.exists():
        raise DataError(f"data.path: {path}: no such folder, and not the id of a data set of the hub (owner/name)")
    found = [root] if root.is_file() else (file for file in files_below(root) if not _is_cache(file))
    # only tables are sorted: a million images may lie beside them
    files = sorted(file for file in found if suffix_of(file) in KINDS)
    if not files:
        raise DataError(f"data.path: {path} holds no {', '.join(KINDS)} file")
    return [_table(file, str(file.relative_to(root.parent if root.is_file() else root))) for file in files]


def _is_cache(file: Path) -> bool:
    """Whether the library datasets wrote a file beside its tables, with rows of `map` and `filter`."""
    return file.name.startswith("cache-") and suffix_of(file) == ".arrow"


def hub_table(path: str, split: str, config: str | None = None) -> Table:
    """A split of a data set on the hub, images as bytes.

    Raises:
        ConfigError: a data set that is not on this machine, without a hub.
        DataError: datasets is not installed, or there is no such data set or split.
    """
    datasets = _hub_library(path)
    of = _revision(path)
    found = of_the_hub(
        lambda: datasets.load_dataset(hub_repository(path), config, split=split, **of),
        f"{path} ({config or split}) cannot be loaded",
    )
    for column in IMAGE_COLUMNS & {*found.column_names}:
        found = found.cast_column(column, datasets.Image(decode=False))
    return Table(f"{config or split}", len(found), found.__getitem__)


def hub_configurations(path: str) -> list[str] | None:
    """Names of the configurations of a data set on the hub; None without a hub, where the library lists only
    "default", whichever were downloaded.

    Raises:
        ConfigError: a data set that is not on this machine, without a hub.
        DataError: datasets is not installed, or there is no such data set.
    """
    datasets = _hub_library(path)
    if hub_problem() is not None:
        return None
    of = _revision(path)
    return of_the_hub(
        lambda: list(datasets.get_dataset_config_names(hub_repository(path), **of)),
        f"{path}: its configurations cannot be listed",
    )


def hub_repository(path: str) -> str:
    """OWNER/NAME of a data set on the hub, given as that or at a commit."""
    data = pinned(path)
    return path if data is None else data.repository


def _revision(path: str) -> dict[str, str]:
    """The argument of the library for data at a commit."""
    data = pinned(path)
    return {} if data is None else {"revision": data.commit}


def _hub_library(path: str) -> Any:
    datasets = import_library("datasets", path)
    require_hub("data.path", hub_repository(path), "datasets")
    return datasets


def image_of(table: Table, position: int, row: Mapping[str, Any], column: str = "image") -> Path | PackedImage:
    """The image of a row: its column, or `file_name` as in an imagefolder.

    Raises:
        DataError: there is none.
    """
    value = row.get(column, row.get("file_name"))
    if isinstance(value, Mapping):
        value = cast("Mapping[str, Any]", value)
        if isinstance(value.get("bytes"), bytes):
            read = partial(_bytes_of, table, position, column)
            return PackedImage(f"{table.name} row {position} ({column})", read, table_digest(value["bytes"]))
        value = value.get("path")
    if isinstance(value, str) and value and table.folder is not None:
        return on_disk(table.folder / value)
    raise DataError(f"no image under {column} (bytes, or a path) or file_name")


def content_digest(source: Path | PackedImage | str) -> str:
    """Digest of an image's bytes, or of a text. A missing file counts by its name: opening it reports it later."""
    if isinstance(source, PackedImage):
        return source.digest
    if isinstance(source, Path) and is_file(source):
        return table_digest(source.read_bytes())
    return table_digest(str(source).encode())


def in_part(digest: str, part: str, held_out_share: float) -> bool:
    """Whether content with this digest belongs to `part`: a function of the digest alone; no other option moves an item
    to the other part."""
    held_out = int(digest[:16], 16) < held_out_share * 2**64
    return part == "all" or held_out == (part == "held_out")


def table_digest(content: bytes) -> str:
    """Digest of an image in a table."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _bytes_of(table: Table, position: int, column: str) -> bytes:
    return table.row(position)[column]["bytes"]


def _table(file: Path, name: str) -> Table:
    require_file(file)
    if suffix_of(file) == ".jsonl":
        rows = [_fields(file, number, entry) for number, entry in enumerate(entries_of(file))]
        return Table(name, len(rows), rows.__getitem__, file.parent)
    pa = import_library("pyarrow", str(file))
    try:
        if suffix_of(file) == ".parquet":
            content: Any = import_library("pyarrow.parquet", str(file)).read_table(file, memory_map=True)
        else:  # the library datasets writes a stream
            content = pa.ipc.open_stream(pa.memory_map(str(file))).read_all()
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{file}: not a {file.suffix[1:]} file: {error}") from None
    return Table(name, content.num_rows, lambda i: content.slice(i, 1).to_pylist()[0], file.parent)


def _fields(file: Path, number: int, entry: Any) -> Mapping[str, Any]:
    try:
        return fields_of(entry)
    except DataError as error:
        raise DataError(f"{file} entry {number}: {error}") from None
