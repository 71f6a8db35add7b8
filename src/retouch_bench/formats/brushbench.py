"""BrushBench (BrushNet, arXiv 2403.06976): images with a caption and the outline of what the caption names.

`mapping_file.json` has an object for each image: `image` (a path beside it), `caption`, `inpainting_mask` and
`outpainting_mask`. A mask is a list of numbers: start and length of each run of masked pixels, in row-major order of
the 512 x 512 pixels, counted from 1.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence, Set
from dataclasses import replace
from functools import partial
from random import Random
from typing import Annotated, Any, ClassVar, Literal, cast

import numpy as np
from PIL import Image
from pydantic import Field

from retouch.data.base import DataError, ImageSection, ItemError, ItemFiles, item_or_error
from retouch.data.lists import is_number, parsed, read_text
from retouch.data.remote import local_path
from retouch.files.disk import on_disk
from retouch.imaging.masks import Pixels
from retouch.imaging.reading import PackedImage

MAPPING = "mapping_file.json"

OTHERS = "other_prompts"

SIDE = 512
"""Side of every image and mask, in pixels."""

Runs = np.ndarray[Any, np.dtype[np.int64]]
"""[N, 2]: start, from 0, and length of each run of masked pixels."""


class BrushBenchData(ImageSection):
    """BrushBench (arXiv 2403.06976): a folder with the images and `mapping_file.json`, which has the caption and two
    masks of each image."""

    FREE_IN_EPOCH: ClassVar[Set[str]] = {"region"}

    format: Literal["brushbench"] = "brushbench"
    region: Literal["inside", "outside"] = "inside"
    """Region to repaint: "inside", the object of the caption (`inpainting_mask`); "outside", everything around it
    (`outpainting_mask`)."""

    distractors: Annotated[int, Field(ge=0, le=1000)] = 0
    """Captions of other images in each item's `metadata.other_prompts`, which `clip_r_precision` compares with; 99 are
    usual. They are sampled by the id of the image."""

    expects: ClassVar[str] = f"a {MAPPING}"
    marks: ClassVar[tuple[str, ...]] = (MAPPING,)

    def list_items(self) -> list[ItemFiles | ItemError]:
        """The items of the mapping file; an id is the key if all keys are numbers, else the position."""
        folder = local_path(self.path)
        mapping = folder / MAPPING
        if folder.is_file():
            raise DataError(f"data.path: {folder} is a file; give the folder, or set data.format=manifest for a list")
        if not folder.is_dir():
            raise DataError(f"data.path: {folder}: no such folder")
        if not mapping.is_file():
            raise DataError(f"data.path: {folder} has no {MAPPING}, which names images, captions and masks")
        entries = parsed(read_text(mapping), str(mapping))
        if not isinstance(entries, dict):
            raise DataError(f"{mapping}: holds no object of images; is it BrushBench's?")
        named = cast("dict[str, object]", entries)
        numbered = all(map(is_number, named))
        found = [
            item_or_error(f"{MAPPING} {key}", self._item, key, int(key) if numbered else position, entry)
            for position, (key, entry) in enumerate(named.items())
        ]
        return _with_distractors(found, self.distractors) if self.distractors else found

    def _item(self, key: str, number: int, entry: object) -> ItemFiles:
        fields = cast("dict[str, object]", entry) if isinstance(entry, dict) else {}
        image, caption = fields.get("image"), fields.get("caption")
        if not isinstance(image, str) or not image or not isinstance(caption, str):
            raise DataError("has no image or no caption; both are texts")
        folder = local_path(self.path)
        mask_key = {"inside": "inpainting_mask", "outside": "outpainting_mask"}[self.region]
        runs = _runs(fields.get(mask_key), mask_key)
        digest = hashlib.sha256(runs.tobytes()).hexdigest()
        return ItemFiles(
            id=number,
            prompt=caption,
            source_path=on_disk(folder / image),
            mask_path=PackedImage(f"{folder / MAPPING} {key} {mask_key}", partial(_png, runs), digest),
            target="source",
            metadata={"image": image},
        )


def _with_distractors(found: Sequence[ItemFiles | ItemError], count: int) -> list[ItemFiles | ItemError]:
    """The items with captions of others in their metadata, none of them equal to their own."""
    captions = list(dict.fromkeys(item.prompt for item in found if isinstance(item, ItemFiles)))

    def drawn(item: ItemFiles) -> list[str]:
        others = [caption for caption in captions if caption != item.prompt]
        return Random(f"{item.id}").sample(others, min(count, len(others)))

    return [
        item if isinstance(item, ItemError) else replace(item, metadata=dict(item.metadata) | {OTHERS: drawn(item)})
        for item in found
    ]


def _runs(given: object, key: str) -> Runs:
    numbers = cast("list[Any]", given) if isinstance(given, list) else []
    if not isinstance(given, list) or len(numbers) % 2 or not all(type(n) is int for n in numbers):
        raise DataError(f"{key} is no list of pairs of whole numbers: start and length of every run")
    for start, length in zip(numbers[::2], numbers[1::2], strict=True):
        if start < 1 or length < 1 or start - 1 + length > SIDE * SIDE:
            raise DataError(
                f"{key} has a run of {length} pixels from {start} on, which do not lie in 1 to {SIDE * SIDE}"
            )
    return np.array(numbers, np.int64).reshape(-1, 2) - (1, 0)


def mask_of(runs: Runs) -> Pixels:
    """[512, 512]: 255 in the runs, else 0."""
    flat = np.zeros(SIDE * SIDE, np.uint8)
    for start, length in runs:
        flat[start : start + length] = 255
    return flat.reshape(SIDE, SIDE)


def _png(runs: Runs) -> bytes:
    out = io.BytesIO()
    Image.fromarray(mask_of(runs)).save(out, "PNG", compress_level=1)
    return out.getvalue()
