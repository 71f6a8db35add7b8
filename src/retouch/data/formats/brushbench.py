"""BrushBench (BrushNet, arXiv 2403.06976): pictures with a caption and the outline of what it names.

`mapping_file.json` has an object for each picture: `image` (a path beside it), `caption`, `inpainting_mask` and
`outpainting_mask`. A mask is a list of numbers, start and length of one run of repainted pixels after the other, in the
512 x 512 pixels of the picture row by row, of which the first is 1.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from PIL import Image

from retouch.data.dataset import DataError, ItemError, ItemFiles
from retouch.data.formats.manifest import read_text
from retouch.imaging import PackedPicture, Pixels

if TYPE_CHECKING:
    from retouch.data.sections import BrushBenchData

MAPPING = "mapping_file.json"

SIDE = 512
"""Of every picture and mask, in pixels."""

_KEYS = {"inside": "inpainting_mask", "outside": "outpainting_mask"}


def list_items(config: BrushBenchData) -> list[ItemFiles | ItemError]:
    """The items of the mapping file; their ids are its keys where these are numbers, else their places in it.

    Raises:
        DataError: no folder, no mapping file, or one that is no JSON object.
    """
    folder = Path(config.path).expanduser()
    mapping = folder / MAPPING
    if not folder.is_dir():
        raise DataError(f"data.path: {folder}: no such folder")
    if not mapping.is_file():
        raise DataError(f"data.path: {folder} has no {MAPPING}, which names pictures, captions and masks")
    try:
        entries: object = json.loads(read_text(mapping))
    except json.JSONDecodeError as error:
        raise DataError(f"{mapping}: not valid JSON: {error.msg} (line {error.lineno})") from None
    if not isinstance(entries, dict):
        raise DataError(f"{mapping}: holds no object of pictures; is it BrushBench's?")
    named = cast("dict[str, object]", entries)
    numbered = all(key.isdecimal() for key in named)
    return [
        _item(folder, key, int(key) if numbered else place, entry, _KEYS[config.region])
        for place, (key, entry) in enumerate(named.items())
    ]


def _item(folder: Path, key: str, number: int, entry: object, mask_key: str) -> ItemFiles | ItemError:
    where = f"{MAPPING} {key}"
    fields = cast("Mapping[str, object]", entry) if isinstance(entry, dict) else {}
    image, caption = fields.get("image"), fields.get("caption")
    if not isinstance(image, str) or not image or not isinstance(caption, str):
        return ItemError(where, "has no image or no caption; both are texts")
    runs = _runs(fields.get(mask_key))
    if isinstance(runs, str):
        return ItemError(where, f"{mask_key} {runs}")
    return ItemFiles(
        id=number,
        prompt=caption,
        source_path=folder / image,
        mask_path=PackedPicture(
            f"{folder / MAPPING} {key} {mask_key}", partial(_png, runs), hashlib.sha256(runs.tobytes()).hexdigest()
        ),
        target="source",
        metadata={"image": image},
    )


def _runs(numbers: object) -> np.ndarray[Any, np.dtype[np.int64]] | str:
    """[N, 2] start, from 0, and length of each run; or what is wrong with the list."""
    if (
        not isinstance(numbers, list)
        or len(numbers) % 2
        or not all(type(n) is int for n in cast("list[object]", numbers))
    ):
        return "is no list of pairs of whole numbers: start and length of every run"
    given = cast("list[int]", numbers)
    for start, length in zip(given[::2], given[1::2], strict=True):
        if start < 1 or length < 1 or start - 1 + length > SIDE * SIDE:
            return f"has a run of {length} pixels from {start} on, which do not lie in 1 to {SIDE * SIDE}"
    return np.array(given, np.int64).reshape(-1, 2) - (1, 0)


def mask_of(runs: np.ndarray[Any, np.dtype[np.int64]]) -> Pixels:
    """[512, 512]: 255 in the runs, else 0."""
    flat = np.zeros(SIDE * SIDE, np.uint8)
    for start, length in runs:
        flat[start : start + length] = 255
    return flat.reshape(SIDE, SIDE)


def _png(runs: np.ndarray[Any, np.dtype[np.int64]]) -> bytes:
    out = io.BytesIO()
    Image.fromarray(mask_of(runs)).save(out, "PNG", compress_level=1)
    return out.getvalue()
