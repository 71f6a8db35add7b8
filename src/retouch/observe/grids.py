"""Picture grids: rows of examples, columns of what was made of them, labels in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

_NO_CHARACTER = "\uffff"
_GAP = 6
_LABEL = 15
_MIN_SIDE = 96  # small pictures are enlarged to this height, nearest neighbour, to be seen at all
_MAX_SIDE = 320


def grid(
    rows: Sequence[Sequence[tuple[NDArray[np.uint8] | Image.Image, str]]], header: Sequence[str] = ()
) -> Image.Image:
    """A picture of `rows` of (image, label), all images of one size after scaling to a readable one.

    Args:
        header: a title for each column.
    """
    images = [[_picture(image) for image, _ in row] for row in rows]
    if not images or not images[0]:
        raise ValueError("a grid needs at least one picture")
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


def _picture(image: NDArray[np.uint8] | Image.Image) -> Image.Image:
    picture = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    picture = picture.convert("RGB")
    if picture.height < _MIN_SIDE:
        factor = -(-_MIN_SIDE // picture.height)
        return picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)
    if max(picture.size) > _MAX_SIDE:
        picture.thumbnail((_MAX_SIDE, _MAX_SIDE))
    return picture


def _clip(text: str, width: int, font: ImageFont.ImageFont | ImageFont.FreeTypeFont) -> str:
    """One line no wider than `width`; "?" for characters that the font does not have (OCR finds Chinese in noise)."""
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
