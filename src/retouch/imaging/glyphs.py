"""Render words with fonts installed by pip, and measure how much an image looks like its word.

The fonts are those of the `font-*` packages (SIL OFL 1.1 and Apache-2.0), not the system's. `glyph_correlation` is a
measure independent of OCR: it compares ink with ink, which a texture that fools a recogniser does not fool.
"""

from __future__ import annotations

import importlib
import logging
import unicodedata
from functools import cache, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont, features

from retouch.errors import FontsMissing
from retouch.imaging.lines import folded
from retouch.imaging.masks import Box, mask_box

logger = logging.getLogger(__name__)

FONTS = {
    "HankenGroteskBold": "font_hanken_grotesk",
    "CaladeaBold": "font_caladea",
    "FredokaOne": "font_fredoka_one",
    "ManropeExtraBold": "font_manrope",
}
"""Font name -> module of its package. Grotesque, serif, rounded, geometric; all read well at 16 px."""

_CANVAS = (64, 24)  # width, height at which ink is compared

_NO_CHARACTER = "\uffff"
"""In no font: its glyph is the one that stands for missing characters."""

_LEADING = 1.2
"""Distance of two lines of a text, in sizes of the font."""

Ink = NDArray[np.float64]


def font_path(name: str) -> str:
    """File of a font of `FONTS`.

    Raises:
        FontsMissing: with the command that installs it.
    """
    try:
        return str(getattr(importlib.import_module(FONTS[name]), name))
    except ImportError:
        raise FontsMissing(f'font {name} is not installed: pip install "retouch[train]"') from None


@cache
def layout() -> ImageFont.Layout:
    """How letters are placed: by Raqm, with a warning where Pillow does not find the library that Raqm needs. Pillow
    then spaces letters differently, without an error."""
    if features.check("raqm"):
        return ImageFont.Layout.RAQM
    logger.warning(
        "Pillow does not find FriBiDi: letters are spaced differently in rendered texts, glyph_correlation does not "
        "compare with that of other machines; install it (apt-get install libfribidi0)"
    )
    return ImageFont.Layout.BASIC


@lru_cache(maxsize=512)
def font(name: str, size: int) -> ImageFont.FreeTypeFont:
    """A font at a size in pixels."""
    return ImageFont.truetype(font_path(name), size, layout_engine=layout())


def fit_font(text: str, name: str, width: int, height: int, largest: int = 200) -> ImageFont.FreeTypeFont:
    """The font at the largest size at which `text` fits into width x height pixels (at least size 4)."""
    low, high = 4, largest
    while low < high:
        middle = (low + high + 1) // 2
        left, top, right, bottom = font(name, middle).getbbox(text)
        if right - left <= width and bottom - top <= height:
            low = middle
        else:
            high = middle - 1
    return font(name, low)


def write_spaced(picture: Image.Image, word: str, name: str, box: Box, ink: tuple[int, int, int] | int) -> None:
    """Write `word` across `box` with evenly spaced letters, as large as they fit."""
    left, top, right, bottom = box
    pitch = 0.88 * (right - left) / len(word)
    start = (left + right - pitch * len(word)) / 2
    face = fit_font("H", name, round(pitch * 0.94), round((bottom - top) * 0.72))
    _, cap_top, _, cap_bottom = face.getbbox("H")
    draw = ImageDraw.Draw(picture)
    for i, letter in enumerate(word):
        x0, _, x1, _ = face.getbbox(letter)
        x = start + pitch * (i + 0.5) - (x0 + x1) / 2
        draw.text((round(x), round((top + bottom - cap_top - cap_bottom) / 2)), letter, font=face, fill=ink)


def glyph_correlation(image: NDArray[np.uint8], mask: NDArray[np.uint8], text: str) -> float | None:
    """Highest normalised correlation, in [-1, 1], of the ink inside the mask with a rendering of `text` in one of
    `FONTS` that has all of its letters, tight or evenly spaced, both cropped to their ink and scaled to one canvas.

    A text is rendered as it is typed and as the scorers compare it (`lines.folded`), one with line breaks in its lines
    and in one. 0 if the mask holds no ink or the text is blank; None if no font has all letters: it would be compared
    with boxes. Independent of colour, place and size.
    """
    layouts = _layouts(text)
    if not layouts:
        return 0.0
    shown = [(lines, name) for lines in layouts for name in FONTS if has_letters(name, "".join(lines))]
    if not shown:
        return None
    left, top, right, bottom = mask_box(mask)
    ink = ink_of(image[top:bottom, left:right])
    if ink is None:
        return 0.0
    return max(correlation(ink, rendered_ink(*one, spaced)) for one in shown for spaced in (False, True))


def _layouts(text: str) -> list[tuple[str, ...]]:
    """The lines of a text and, with several, the one line of them, each as typed and as compared; none of a blank
    text."""
    found = dict[tuple[str, ...], None]()
    for written in (_with_ink, folded):
        lines = [line for line in map(written, text.splitlines()) if line.strip()]
        if len(lines) > 1:
            lines = [line.strip() for line in lines]
        if lines:
            found |= {tuple(lines): None, (" ".join(lines),): None}
    return list(found)


def _with_ink(text: str) -> str:
    """A text in composed characters (NFC), without control and format characters, which have no ink, and with spaces
    for other white space, of which a font has no glyph."""
    composed = unicodedata.normalize("NFC", text)
    shown = (" " if c.isspace() else c for c in composed if c.isspace() or unicodedata.category(c) not in ("Cc", "Cf"))
    return "".join(shown)


@lru_cache(maxsize=4096)
def has_letters(name: str, text: str) -> bool:
    """Whether a font of `FONTS` has a glyph for every character of a text with ink."""
    face = font(name, 24)
    missing = _shape(_NO_CHARACTER, face)
    return all(_shape(character, face) != missing for character in set(_with_ink(text)) if not character.isspace())


def _shape(character: str, face: ImageFont.FreeTypeFont) -> tuple[object, bytes]:
    mask: Any = face.getmask(character)
    return mask.size, bytes(mask)


def ink_of(crop: NDArray[np.uint8]) -> Ink | None:
    """Ink of a word on an even ground, cropped and scaled to the canvas; None without ink.

    Ink is the distance in colour from the ground, whose colour is the median of the crop's border.
    """
    distance = contrast(crop.astype(np.float64))
    box = _ink_box(distance)
    if box is None:
        return None
    left, top, right, bottom = box
    cut = distance[top:bottom, left:right]
    scaled = Image.fromarray(cut.astype(np.float32)).resize(_CANVAS, Image.Resampling.BILINEAR)
    return np.asarray(scaled, np.float64)


def ink_box(crop: NDArray[np.uint8]) -> Box | None:
    """Box of the ink of a crop [h, w, 3]: pixels with more than half of the greatest contrast to the ground; None
    without ink."""
    return _ink_box(contrast(crop.astype(np.float64)))


def _ink_box(distance: Ink) -> Box | None:
    strongest = float(distance.max())
    if not strongest:
        return None
    rows, columns = np.nonzero(distance > strongest / 2)
    return int(columns.min()), int(rows.min()), int(columns.max()) + 1, int(rows.max()) + 1


@lru_cache(maxsize=4096)
def rendered_ink(lines: tuple[str, ...], name: str, spaced: bool) -> Ink:
    """Ink of the lines of a text in a font, on the canvas; tight ones are centred and of one size."""
    page = Image.new("RGB", (32 * max(map(len, lines)) + 16, 64 * len(lines)), "white")
    face = min((fit_font(line, name, page.width - 16, 40) for line in lines), key=lambda fitting: fitting.size)
    widths = [face.getlength(line) for line in lines]
    for row, line in enumerate(lines):
        if spaced:
            write_spaced(page, line, name, (8, 64 * row + 8, page.width - 8, 64 * row + 56), 0)
        else:
            place = round((max(widths) - widths[row]) / 2), round(row * _LEADING * face.size)
            ImageDraw.Draw(page).text((8 + place[0], 8 + place[1]), line, font=face, fill="black")
    found = ink_of(np.asarray(page))
    return np.zeros(_CANVAS[::-1]) if found is None else found


def contrast(pixels: NDArray[np.float64]) -> Ink:
    """Distance in colour from the ground, [h, w] in [0, 255]; all 0 if nothing stands out."""
    distance = np.abs(pixels - ground_colour(pixels)).mean(axis=2)
    return distance if distance.max() >= 24 else np.zeros_like(distance)


def ground_colour(pixels: NDArray[np.float64]) -> NDArray[np.float64]:
    """The median of the border."""
    border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    return np.median(border, axis=0)


def correlation(a: Ink, b: Ink) -> float:
    """Normalised correlation of two inks, in [-1, 1]; 0 if one is even."""
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a**2).sum() * (b**2).sum()))
    return float((a * b).sum()) / scale if scale > 0 else 0.0
