"""Lines of text with their places: the `lines` of an example. No torch.

In a data set a line is `{"text", "polygon"?}` or `{"text", "box"?}` in pixels of the source image; in an example its
polygon is in pixels of the example, because the data set scales and crops both together.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

from PIL import Image, ImageDraw

from retouch.errors import shown

Point = tuple[float, float]
Bounds = tuple[float, float, float, float]
"""left, top, right, bottom."""

MOST_LINES = 64
"""Lines of one example; more are an error, because comparing them would stall a run."""

_FARTHEST = 1_000_000
"""Largest coordinate in pixels: beyond any image that can be read."""

BETWEEN_LINES = " / "
"""Between the lines of one example in grids and reports."""

_UNSPACED = (
    (0x0E00, 0x109F), (0x1780, 0x17FF), (0x1950, 0x19FF), (0x1A20, 0x1AAF), (0xA980, 0xA9FF), (0xAA60, 0xAADF),
    (0x2E80, 0x2FDF), (0x3001, 0x312F), (0x31A0, 0x33FF), (0x3400, 0x4DBF), (0x4E00, 0xA4CF), (0xF900, 0xFAFF),
    (0xFE30, 0xFE4F), (0xFF65, 0xFF9F), (0x1B000, 0x1B16F), (0x20000, 0x3FFFF),
)  # fmt: skip
"""Code points of scripts that write no spaces between words, and of their punctuation: Thai, Lao, Tibetan, Burmese,
Khmer and their relatives; ideographs, kana, bopomofo and Yi."""

_ALIKE = str.maketrans(
    dict.fromkeys("‘’‛′`´ʹʻʼʽ", "'")
    | dict.fromkeys("“”„‟″", '"')
    | dict.fromkeys("‐‑‒–—―−", "-")
    | dict.fromkeys("•‧∙⋅・", "·")
    | {"〜": "~", "‚": ",", "《": "«", "》": "»"}
    | dict.fromkeys(map(chr, (*range(0x180B, 0x180E), *range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0))), "")
)
"""Typographic variants -> the character as which they are compared: readers have one of them and not the others.
Variation selectors choose the form of the character before them, and none is read."""


@dataclass(frozen=True)
class TextLine:
    """One line to write.

    Attributes:
        polygon: corners (x, y) in pixels; None: anywhere in the image.
    """

    text: str
    polygon: tuple[Point, ...] | None = None

    @property
    def bounds(self) -> Bounds | None:
        """The smallest upright box around the polygon."""
        if self.polygon is None:
            return None
        xs, ys = zip(*self.polygon, strict=True)
        return min(xs), min(ys), max(xs), max(ys)

    def json(self) -> dict[str, Any]:
        """The line as JSON values."""
        return {"text": self.text} | ({} if self.polygon is None else {"polygon": [list(p) for p in self.polygon]})


def parse_lines(given: object) -> tuple[TextLine, ...]:
    """Lines of a list of texts, or of objects `{"text", "polygon" | "box"?}`.

    Raises:
        ValueError: no list, no line or more than `MOST_LINES`, an empty text, an unusable place, or places of some
            lines only.
    """
    entries = cast("list[Any]", given)
    if not isinstance(given, list | tuple) or not 0 < len(entries) <= MOST_LINES:
        raise ValueError(f"given {shown(given)}; expected a list of 1 to {MOST_LINES} texts or lines")
    lines = tuple(_line(entry, f"line {number}") for number, entry in enumerate(entries, 1))
    if len({line.polygon is None for line in lines}) > 1:
        raise ValueError("some lines have a polygon or box and others none; give every line one, or none of them")
    if all(line.bounds is not None and max(line.bounds) <= 1 for line in lines):
        raise ValueError("all places lie within one pixel, as shares of the sides do; give them in pixels of the image")
    return lines


def _line(entry: Any, where: str) -> TextLine:
    fields = cast("Mapping[str, Any]", entry if isinstance(entry, Mapping) else {"text": entry})
    unknown = sorted(set(fields) - {"text", "polygon", "box"})
    if unknown:
        raise ValueError(f"{where}: no such key {shown(unknown[0])}; a line has text, and polygon or box")
    text = fields.get("text")
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{where}: text is {shown(text)}; it must be a string that is not empty")
    if fields.get("polygon") is not None and fields.get("box") is not None:
        raise ValueError(f"{where}: polygon and box both given; keep one")
    if fields.get("box") is not None:
        return TextLine(text.strip(), _corners(fields["box"], where))
    return TextLine(text.strip(), None if fields.get("polygon") is None else _polygon(fields["polygon"], where))


def _corners(box: object, where: str) -> tuple[Point, ...]:
    if not isinstance(box, list | tuple) or len(cast("list[Any]", box)) != 4 or not all(map(_is_number, box)):
        raise ValueError(f"{where}: box is {shown(box)}; it must be [left, top, right, bottom] in pixels")
    left, top, right, bottom = (float(n) for n in cast("list[Any]", box))
    if left >= right or top >= bottom:
        raise ValueError(f"{where}: box is {shown(box)}; left must be below right, and top below bottom")
    corners = (left, top), (right, top), (right, bottom), (left, bottom)
    if not area(corners):
        raise ValueError(f"{where}: box is {shown(box)}, which has no area")
    return corners


def _polygon(points: object, where: str) -> tuple[Point, ...]:
    listed = cast("list[Any]", points if isinstance(points, list | tuple) else [])
    pairs = all(isinstance(p, list | tuple) and len(cast("list[Any]", p)) == 2 for p in listed)
    pairs = pairs and all(_is_number(n) for point in listed for n in point)
    if len(listed) < 3 or not pairs:
        raise ValueError(
            f"{where}: polygon is {shown(points)}; it must be a list of at least 3 points [x, y], in pixels"
        )
    corners = tuple((float(x), float(y)) for x, y in listed)
    if not area(corners):
        raise ValueError(f"{where}: polygon is {shown(points)}, which has no area")
    return corners


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _FARTHEST


def area(polygon: Sequence[Point]) -> float:
    """Area of a simple polygon in square pixels."""
    turned = [*polygon[1:], polygon[0]]
    return abs(sum(x * b - a * y for (x, y), (a, b) in zip(polygon, turned, strict=True))) / 2


def folded(text: str, *, case_sensitive: bool = True) -> str:
    """The normal form in which a text to write and a text that was read are compared, by every measure of this package.

    NFKC (composed letters, one width, ... for …), typographic variants of quotation marks, apostrophes, dashes and
    middle dots as one, no invisible characters; a space between words, and none where `joined` writes none.
    """
    plain = unicodedata.normalize("NFKC", text.translate(_ALIKE)).translate(_ALIKE)
    visible = "".join(character for character in plain if unicodedata.category(character) != "Cf")
    one_line = joined(visible.split())
    return one_line if case_sensitive else unicodedata.normalize("NFKC", one_line.casefold())


def joined(texts: Iterable[str]) -> str:
    """The texts as one, in order: with a space between, and none between two characters of scripts without spaces, or
    between one and punctuation."""
    parts: list[str] = []
    for text in texts:
        if text:
            parts += [" ", text] if parts and not _are_close(parts[-1][-1], text[0]) else [text]
    return "".join(parts)


def pieces(text: str) -> list[str]:
    """The smallest parts of a text with single spaces that `joined` makes it of again."""
    found: list[str] = []
    for word in text.split():
        start = 0
        for end in range(1, len(word) + 1):
            if end == len(word) or _are_close(word[end - 1], word[end]):
                found.append(word[start:end])
                start = end
    return found


def _are_close(one: str, other: str) -> bool:
    unspaced = [_is_unspaced(character) for character in (one, other)]
    return any(unspaced) and all(
        is_unspaced or unicodedata.category(character)[0] in "PS"
        for character, is_unspaced in zip((one, other), unspaced, strict=True)
    )


@cache
def _is_unspaced(character: str) -> bool:
    return any(first <= ord(character) <= last for first, last in _UNSPACED)


def greedy_reading(
    classes: Iterable[int], probabilities: Iterable[float], characters: Sequence[str]
) -> tuple[str, float]:
    """The text of the likeliest class of every column under CTC, repeats and blanks removed, and its confidence: the
    mean probability of the columns of its characters; ("", 0.0) if all are blank.

    Args:
        classes: of the columns in order; 0 is the blank, and class i + 1 is character i.
        probabilities: of these classes.
    """
    text, sure, last = "", list[float](), 0
    for found, probability in zip(classes, probabilities, strict=True):
        if found not in (0, last):
            text += characters[found - 1]
            sure.append(probability)
        last = found
    return text, sum(sure) / len(sure) if sure else 0.0


def placed(lines: Iterable[TextLine], scale: Point, offset: Point) -> tuple[TextLine, ...]:
    """The lines in other pixels: every point (x, y) becomes (x * scale x - offset x, y * scale y - offset y)."""

    def move(line: TextLine) -> TextLine:
        if line.polygon is None:
            return line
        return replace(
            line, polygon=tuple((x * scale[0] - offset[0], y * scale[1] - offset[1]) for x, y in line.polygon)
        )

    return tuple(map(move, lines))


def share_inside(line: TextLine, size: tuple[int, int]) -> float:
    """Share of a line's upright box that lies in an image of `size` (width, height); 1 for a line without a place, 0
    for a box that scaling left without an area."""
    if line.bounds is None:
        return 1.0
    left, top, right, bottom = line.bounds
    width, height = min(right, size[0]) - max(left, 0), min(bottom, size[1]) - max(top, 0)
    whole = (right - left) * (bottom - top)
    return max(width, 0.0) * max(height, 0.0) / whole if whole else 0.0


def polygon_mask(polygons: Iterable[Sequence[Point]], size: tuple[int, int]) -> Image.Image:
    """ "L" of `size` (width, height): 255 in any of the polygons, with their outlines, else 0."""
    mask = Image.new("L", size, 0)
    draw = ImageDraw.Draw(mask)
    for polygon in polygons:
        draw.polygon([(x, y) for x, y in polygon], fill=255, outline=255)
    return mask


def shown_text(metadata: Mapping[str, Any]) -> str | None:
    """The target text of an example for people: its lines with a mark between them, else its text."""
    lines = metadata.get("lines")
    if isinstance(lines, list) and lines:
        return BETWEEN_LINES.join(str(cast("Mapping[str, Any]", line)["text"]) for line in cast("list[Any]", lines))
    text = metadata.get("text")
    return text if isinstance(text, str) else None
