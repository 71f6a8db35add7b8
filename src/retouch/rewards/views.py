"""The view of an image that a reward gets: the composite, or a crop to the mask box.

Views are made before an image is sent: they are the same for local and remote scorers, and only the crop is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from retouch.imaging.lines import parse_lines, placed
from retouch.imaging.masks import MASK_THRESHOLD, Box, mask_box, paste_back, widen
from retouch.rewards.protocol import RewardItem, malformed


@dataclass(frozen=True)
class View:
    """The part of an item's images that a scorer receives.

    Attributes:
        paste_back: the composite instead of the raw sample.
        crop: only the mask box of sample, mask and source; the reference stays whole.
        margin: widens the box by this fraction of its sides.
        least: minimum side of the box in pixels, limited by the image size.
    """

    paste_back: bool = False
    crop: bool = False
    margin: float = 0.0
    least: int = 0


def viewed(item: RewardItem, view: View) -> RewardItem:
    """The item as the view shows it. An item whose images do not fit together is unchanged; its scorers report it."""
    if (view.paste_back or view.crop) and malformed(item):
        return item
    if view.paste_back:
        item = paste(item)
    return cropped(item, view.margin, view.least) if view.crop else item


def paste(item: RewardItem) -> RewardItem:
    """The item with the composite as its image; unchanged without a source and a mask of the image's size."""
    if item.source is None or item.mask is None or not can_be_pasted(item):
        return item
    return replace(item, image=paste_back(item.source, item.image, item.mask))


def can_be_pasted(item: RewardItem) -> bool:
    """Whether the item has a source and a mask of the image's size."""
    if item.source is None or item.mask is None or malformed(item):
        return False
    return item.source.shape == item.image.shape and item.mask.shape == item.image.shape[:2]


def cropped(item: RewardItem, margin: float, least: int) -> RewardItem:
    """Image, mask and source within the mask box; unchanged without a mask of the image's size."""
    box = view_box(item, margin, least)
    if box is None:
        return item
    left, top, right, bottom = box
    mask, source = (None if p is None else p[top:bottom, left:right] for p in (item.mask, item.source))
    return replace(
        item,
        image=item.image[top:bottom, left:right],
        mask=mask,
        source=source,
        metadata=_shifted(item.metadata, left, top),
    )


def view_box(item: RewardItem, margin: float, least: int) -> Box | None:
    """The widened mask box in the item's image; None without a mask of the image's size."""
    size = item.image.shape[:2]
    if item.mask is None or item.mask.shape != size or not (item.mask >= MASK_THRESHOLD).any():
        return None
    if item.source is not None and item.source.shape[:2] != size:
        return None
    return at_least(widen(mask_box(item.mask), margin, size[1], size[0]), least, size[1], size[0])


def _shifted(metadata: Mapping[str, Any], left: int, top: int) -> Mapping[str, Any]:
    """The metadata with the places of its lines in pixels of the crop; unchanged where they cannot be read."""
    try:
        lines = placed(parse_lines(metadata["lines"]), (1.0, 1.0), (float(left), float(top)))
    except (KeyError, ValueError):
        return metadata
    return {**metadata, "lines": [line.json() for line in lines]}


def at_least(box: Box, least: int, width: int, height: int) -> Box:
    """The box with sides of at least `least` pixels, around its centre as far as the image allows."""
    left, right = _side(box[0], box[2], least, width)
    top, bottom = _side(box[1], box[3], least, height)
    return left, top, right, bottom


def _side(start: int, end: int, least: int, length: int) -> tuple[int, int]:
    size = min(max(end - start, least), length)
    start = min(max(0, start - (size - (end - start)) // 2), length - size)
    return start, start + size
