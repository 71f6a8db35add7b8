"""Image grids: one row per example, one column per variant, with labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

_NO_CHARACTER = "\uffff"
_GAP = 6
_LABEL = 15
_MIN_SIDE = 96  # smaller images are enlarged to this height by nearest neighbour
_MAX_SIDE = 320


def grid(
    rows: Sequence[Sequence[tuple[NDArray[np.uint8] | Image.Image, str]]], header: Sequence[str] = ()
) -> Image.Image:
    """An image of `rows` of (image, label), scaled to a readable size.

    Args:
        header: a title for each column.
    """
    images = [[_readable(image) for image, _ in row] for row in rows]
    if not images or not images[0]:
        raise ValueError("a grid needs at least one image")
    width = max(image.width for row in images for image in row)
    height = max(image.height for row in images for image in row)
    columns = max(len(row) for row in images)
    top = _LABEL + _GAP if header else 0
    size = (columns * (width + _GAP) + _GAP, top + len(rows) * (height + _LABEL + _GAP) + _GAP)
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(size=12)
    for column, title in enumerate(header):
        draw.text((_GAP + column * (width + _GAP), 4), _clip(title, width, font), fill="black", font=font)
    for r, row in enumerate(rows):
        for c, (_, label) in enumerate(row):
            left, upper = _GAP + c * (width + _GAP), top + _GAP + r * (height + _LABEL + _GAP)
            sheet.paste(images[r][c], (left, upper))
            draw.text((left, upper + height + 1), _clip(label, width, font), fill="#333333", font=font)
    return sheet


def _readable(image: NDArray[np.uint8] | Image.Image) -> Image.Image:
    shown = (Image.fromarray(image) if isinstance(image, np.ndarray) else image).convert("RGB")
    if shown.height < _MIN_SIDE:
        factor = -(-_MIN_SIDE // shown.height)
        return shown.resize((shown.width * factor, shown.height * factor), Image.Resampling.NEAREST)
    if max(shown.size) > _MAX_SIDE:
        shown.thumbnail((_MAX_SIDE, _MAX_SIDE))
    return shown


def _clip(text: str, width: int, font: ImageFont.ImageFont | ImageFont.FreeTypeFont) -> str:
    """The text cut to `width` pixels, with "?" for characters missing in the font (OCR reads Chinese in noise)."""
    unknown = _shape(_NO_CHARACTER, font)
    text = "".join("?" if _shape(c, font) == unknown else c for c in " ".join(text.split()))
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "…") > width:
        text = text[:-1]
    return text + "…"


def _shape(character: str, font: ImageFont.ImageFont | ImageFont.FreeTypeFont) -> bytes:
    mask: Any = font.getmask(character)
    return bytes(mask)
