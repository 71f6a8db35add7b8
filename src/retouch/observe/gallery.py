"""The stored images of evaluations for a page, with what was to be written, what was read, and their measures.

They are inside the page while it stays small enough to send; else the page refers to the files of the run, beside which
it lies.
"""

from __future__ import annotations

import base64
import io
import logging
import os
import re
import struct
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from PIL import Image

from retouch.errors import ConfigError
from retouch.files.disk import is_own, read_bounded
from retouch.observe.charts import is_number
from retouch.observe.kept import steps_kept
from retouch.observe.measures import DRIFT, HEADLINE
from retouch.observe.run_dir import read_own_rows

Record = Mapping[str, Any]

logger = logging.getLogger(__name__)

MOST_INSIDE = 7 << 20
"""Bytes of images inside a page, which is then about 10 MB."""

_MOST_SHRUNK = 25_000_000
"""Pixels of the images that are compressed to fit: a second for every few million."""

_MOST_BYTES = 64 << 20
"""Size of one image."""

_DAMAGED = (OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError)
"""Errors of Pillow for a PNG file that is cut off, or whose chunks are broken."""

_PNG = b"\x89PNG\r\n\x1a\n"

_NAME = re.compile(r"\d{5,}\.png")

_SHOWN = re.compile(r"(?:evaluations/step-\d{6,}/\d{5,}|images/step-\d{6,}/(?:evaluation|rollouts))\.png")
"""Images of a run directory that a page refers to, relative to it."""


@dataclass(frozen=True)
class Stored:
    """An evaluation as a column of a gallery.

    Attributes:
        label: such as its step.
        rows: of the images that were kept.
        files: the images, as many.
    """

    label: str
    rows: Sequence[Record]
    files: Sequence[Path]


@dataclass(frozen=True)
class Gallery:
    """For page.js.

    Attributes:
        data: see `gallery`.
        images: addresses by the numbers in `data`.
        beside: they are those of files.
    """

    data: dict[str, Any]
    images: list[str]
    beside: bool


def linked_away(run: Path) -> str:
    """Why the evaluations of a run directory are not shown; "" if they are its own."""
    if not (run / "evaluations").is_symlink():
        return ""
    return "evaluations/ is a link, which no page follows because it may lead anywhere; link the run directory instead"


def stored_of(run: Path, steps: Collection[int]) -> list[Stored]:
    """The evaluations of a run directory with images, oldest first.

    Args:
        steps: of records of evaluations: a run that was killed and resumed may have left files of others.
    """
    found: list[Stored] = []
    for step, folder in steps_kept(run / "evaluations").items():
        if step in steps:
            rows = _rows(run, folder)
            files = [file for file in sorted(folder.glob("*.png")) if _NAME.fullmatch(file.name)]
            kept = [(rows[at], file) for file in files if (at := int(file.stem)) < len(rows) and _is_image(file)]
            if kept:
                found.append(Stored(f"step {step}", [row for row, _ in kept], [file for _, file in kept]))
    return found


def gallery(
    columns: Sequence[Stored],
    page: Path,
    measures: Sequence[str] = (),
    *,
    side_by_side: bool = False,
    inside: bool | None,
) -> Gallery:
    """The images of several evaluations, by example and index.

    Args:
        page: the file that refers to images beside it.
        measures: by which images can be sorted, the most important first; those of the rows if not given.
        side_by_side: one column for each run, instead of one of them at a time.
        inside: whether the images are inside the page; None: while they are small enough.
    """
    names = list(measures) or _measures(columns)
    keys = list(dict.fromkeys((row["example"], row["index"]) for column in columns for row in column.rows))
    places = {key: at for at, key in enumerate(keys)}
    items: list[dict[str, Any]] = [{"example": example, "index": index} for example, index in keys]
    cells: list[list[dict[str, Any] | None]] = []
    files: list[Path] = []
    for column in columns:
        line: list[dict[str, Any] | None] = [None] * len(keys)
        for row, file in zip(column.rows, column.files, strict=True):
            at = places[row["example"], row["index"]]
            items[at] |= {name: str(row[name]) for name in ("text", "prompt") if row.get(name) is not None}
            cell: dict[str, Any] = {"i": len(files), "v": [_finite(row.get(name)) for name in names]}
            line[at] = cell | ({"read": str(row["read"])} if row.get("read") is not None else {})
            files.append(file)
        cells.append(line)
    images, note = _sources(files, page, inside)
    cells = [[cell if cell and images[cell["i"]] else None for cell in line] for line in cells]
    data = {
        "columns": side_by_side,
        "variants": [{"label": column.label} for column in columns],
        "measures": [{"name": name, "lower": name.partition(".")[2] == DRIFT or name == DRIFT} for name in names],
        "items": items,
        "cells": cells,
        "note": note,
    }
    return Gallery(data, images, any(image and not image.startswith("data:") for image in images))


def image_inside(image: Image.Image | bytes) -> str:
    """An image, or the content of a PNG file, as an address inside a page."""
    if isinstance(image, bytes):
        return _address("png", image)
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return _address("png", stream.getvalue())


def shown_file(run: Path, place: str) -> bytes | None:
    """The content of an image of a run directory, by its place in it; None for anything that no page refers to."""
    if not _SHOWN.fullmatch(place) or not is_own(run, run / place, _MOST_BYTES) or not _is_image(run / place):
        return None
    with suppress(OSError):  # deleted meanwhile
        return read_bounded(run / place, _MOST_BYTES)
    return None


def _sources(files: Sequence[Path], page: Path, inside: bool | None) -> tuple[list[str], str]:
    """Addresses of images, "" of a damaged one that is left out, and a sentence on what they are."""
    sizes = sum(file.stat().st_size for file in files)
    if inside or (inside is None and sizes <= MOST_INSIDE):
        return [_address("png", read_bounded(file, _MOST_BYTES)) for file in files], ""
    if inside is None and (small := _shrunk(files)) is not None:
        return small, "Compressed with losses (WebP) to fit into the page; the files of the run are not."
    folder = page.resolve().parent
    note = "The images are the files of the run, beside this page: it shows them only there." if inside is None else ""
    return [quote(os.path.relpath(file.resolve(), folder)) for file in files], note


def _shrunk(files: Sequence[Path]) -> list[str] | None:
    """The images as WebP if they then fit into a page."""
    left, images, pixels = MOST_INSIDE, list[str](), 0
    for file in files:
        try:
            with Image.open(file, formats=("PNG",)) as image:
                pixels += image.width * image.height
                if pixels > _MOST_SHRUNK:
                    return None
                stream = io.BytesIO()
                image.convert("RGB").save(stream, "WEBP", quality=85, method=2)
        except _DAMAGED as error:
            logger.warning("%s: damaged (%s); the page leaves it out", file, error)
            images.append("")
            continue
        left -= stream.tell()
        if left < 0:
            return None
        images.append(_address("webp", stream.getvalue()))
    return images


def _rows(run: Path, folder: Path) -> list[Record]:
    """The rows of an evaluation; none where the file is damaged, or in another place: a page must show the rest."""
    try:
        rows: list[Record] = [*read_own_rows(run, folder / "rows.jsonl")]
    except ConfigError:
        return []
    return rows if all(type(row.get(key)) is int for row in rows for key in ("example", "index")) else []


def _measures(columns: Sequence[Stored]) -> list[str]:
    """Numbers of the rows: those of a verdict first, parts of a reward last."""
    rows = (row for column in columns for row in column.rows)
    names = dict.fromkeys(name for row in rows for name, value in row.items() if isinstance(value, float))
    first = [name for name in HEADLINE if name in names]
    return [
        *first,
        *sorted((name for name in names if name not in first), key=lambda name: ("." in name, name == DRIFT)),
    ]


def _finite(value: object) -> float | None:
    return float(f"{value:.4g}") if is_number(value) and abs(value) < float("inf") else None  # type: ignore[arg-type]


def _is_image(file: Path) -> bool:
    """Whether it is a PNG file of its folder: a run directory may come from anybody, and a link may lead to any file of
    this machine."""
    try:
        if file.is_symlink() or not file.is_file() or file.stat().st_size > _MOST_BYTES:
            return False
        with file.open("rb") as stream:
            return stream.read(len(_PNG)) == _PNG
    except OSError:
        return False


def _address(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
