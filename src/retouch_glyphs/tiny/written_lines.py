"""Words and lines in many fonts: what `text_recognizer` learns from and is measured on.

A line is rendered at `CAP` pixels of capital height, with natural or even spacing; strokes of some lines are broken; a
crop of it, slanted, turned and seen at an angle, is scaled, coloured, blurred, and noise and JPEG are added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

from retouch.data.sampler import derive_seed
from retouch_glyphs.tiny.broken_letters import (
    CAP,
    CAPITALS_ONLY,
    TEST_FONTS,
    TRAIN_FONTS,
    Ink,
    Pixels,
    face,
    names_of,
    shown,
)

LINE_FONTS = names_of({module: names for module, names in TRAIN_FONTS.items() if module != "font_hanken_grotesk"})
"""Fonts of the training lines: those of the letters, without the family that `retouch data synth` writes signs in."""

UNSEEN_FONTS = [*names_of(TEST_FONTS), *TRAIN_FONTS["font_hanken_grotesk"]]
"""Fonts of which no training line has a family; all four of the signs are among their families."""

UPPER, LOWER, DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "abcdefghijklmnopqrstuvwxyz", "0123456789"

_BASE, _HIGH, _EDGE = 100, 160, 120
"""Baseline and height of the page in pixels, and the room beside the line."""


@dataclass(frozen=True)
class LineSetting:
    """How lines are shown.

    Attributes:
        heights: lowest and highest of a crop in pixels.
        hard: broken strokes, changed widths and weights, slants and angles.
        longest: most characters of a line.
    """

    heights: tuple[int, int] = (12, 48)
    hard: bool = True
    longest: int = 14


TESTED = LineSetting(heights=(32, 48), hard=False, longest=10)
"""Test lines: as sharp as the noise, the blur and JPEG leave them."""


@dataclass(frozen=True)
class Line:
    """One example.

    Attributes:
        pixels: [h, w, 3] uint8 RGB, a crop around the line.
        centres: of the characters, as shares of the width.
    """

    pixels: Pixels
    text: str
    centres: tuple[float, ...]
    font: str


def draw_lines(count: int, fonts: Sequence[str], seed: int, setting: LineSetting | None = None) -> list[Line]:
    """`count` lines; a line depends on its number and the seed alone."""
    return [draw_line(fonts, derive_seed("line", seed, i), setting or LineSetting()) for i in range(count)]


def draw_line(fonts: Sequence[str], seed: int, setting: LineSetting) -> Line:
    """A line of random text in a random font, size and colour."""
    draw = np.random.default_rng(seed)
    while True:
        name = fonts[int(draw.integers(len(fonts)))]
        text = random_text(draw, setting.longest, name in CAPITALS_ONLY)
        ink, places = _written(draw, text, name)
        if setting.hard and draw.random() < 0.2:
            _break(draw, ink)
        quad = _quad(draw, ink, setting.hard)
        if quad is not None:
            break
    crop, centres = _seen(draw, ink, places, quad, setting.hard)
    height = round(float(np.exp(draw.uniform(*np.log(setting.heights)))))
    return Line(shown(draw, crop, height), text, centres, name)


def random_text(draw: Generator, longest: int, capitals: bool = False) -> str:
    """Capitals, small letters, a capital before small ones, digits, all of these, or two words with a space.

    Args:
        capitals: no small letters.
    """
    kind = draw.choice(["upper", "lower", "title", "digits", "mixed", "words"], p=[0.46, 0.15, 0.12, 0.08, 0.04, 0.15])
    length = min(longest, 1 + int(draw.binomial(10, 0.38)))
    if kind == "words" and longest >= 3:
        first = random_text(draw, max(1, longest // 2), capitals).replace(" ", "")
        return f"{first} {random_text(draw, max(1, longest - len(first) - 1), capitals).replace(' ', '')}"
    if kind == "title":
        text = _some(draw, UPPER, 1) + _some(draw, LOWER, length - 1)
    else:
        alphabets = {"upper": UPPER, "lower": LOWER, "digits": DIGITS, "mixed": UPPER + LOWER + DIGITS}
        text = _some(draw, alphabets.get(str(kind), UPPER), length)
    return text.upper() if capitals else text


def _some(draw: Generator, alphabet: str, count: int) -> str:
    return "".join(alphabet[i] for i in draw.integers(len(alphabet), size=count))


def _written(draw: Generator, text: str, name: str) -> tuple[Ink, Ink]:
    """Ink of a line [h, w] in [0, 1], and the centres of its characters in pixels."""
    font = face(name)
    widths = np.array([font.getlength(character) for character in text])
    if draw.random() < 0.35:  # evenly spaced, as on the signs
        pitch = max(draw.uniform(0.8, 1.25) * CAP, 0.75 * float(widths.max()))
        centres = pitch * (np.arange(len(text)) + 0.5)
    else:
        advances = widths + draw.choice([0.0, draw.uniform(-0.03, 0.35)]) * CAP
        centres = np.cumsum(advances) - advances / 2
    page = Image.new("L", (round(float(centres[-1] + widths[-1])) + 2 * _EDGE, _HIGH))
    pen = ImageDraw.Draw(page)
    for character, centre, width in zip(text, centres, widths, strict=True):
        pen.text((_EDGE + centre - width / 2, _BASE), character, font=font, fill=255, anchor="ls")
    return np.array(page, np.float32) / 255, centres + _EDGE


def _break(draw: Generator, ink: Ink) -> None:
    """Erase or add one to three strokes, in place."""
    rows, columns = np.nonzero(ink > 0.5)
    for _ in range(int(draw.integers(1, 4)) if len(rows) else 0):
        at = draw.integers(len(rows))
        angle, length = draw.uniform(0, 2 * np.pi), draw.uniform(0.2, 0.45) * CAP
        step = np.array([np.cos(angle), np.sin(angle)]) * length / 2
        page = Image.new("L", ink.shape[::-1])
        ends = [
            float(v) for v in (columns[at] - step[0], rows[at] - step[1], columns[at] + step[0], rows[at] + step[1])
        ]
        ImageDraw.Draw(page).line(ends, fill=255, width=max(1, round(draw.uniform(0.05, 0.13) * CAP)))
        stroke = np.asarray(page, np.float32) / 255
        ink[:] = ink * (1 - stroke) if draw.random() < 0.7 else np.maximum(ink, stroke)


def _quad(draw: Generator, ink: Ink, hard: bool) -> NDArray[np.float64] | None:
    """Corners [4, 2] of the crop on the page: upper left, lower left, lower right, upper right; None without ink."""
    rows, columns = np.nonzero(ink > 0.3)
    if not len(rows):
        return None
    top, bottom = min(rows.min(), _BASE - CAP), max(rows.max() + 1, _BASE)
    above, below = CAP * np.exp(draw.uniform(np.log(0.04), np.log(0.9), 2))
    left, right = CAP * np.exp(draw.uniform(np.log(0.04), np.log(0.9), 2))
    left, right, top, bottom = columns.min() - left, columns.max() + 1 + right, top - above, bottom + below
    corners = np.array([[left, top], [left, bottom], [right, bottom], [right, top]], float)
    if not hard:
        return corners
    centre = corners.mean(0)
    angle = np.deg2rad(np.clip(draw.normal(0, 2.0), -5, 5)) * min(1.0, 4 * CAP / (right - left))
    slant = draw.uniform(-0.2, 0.2) if draw.random() < 0.3 else 0.0
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]) @ np.array([[1, slant], [0, 1]])
    jitter = draw.uniform(-0.06, 0.06, (4, 2)) * (bottom - top) * (draw.random() < 0.5)
    return (corners - centre) @ turn.T + centre + jitter


def _seen(
    draw: Generator, ink: Ink, places: Ink, quad: NDArray[np.float64], hard: bool
) -> tuple[Ink, tuple[float, ...]]:
    """The crop and the centres of its characters as shares of its width."""
    left, right = (quad[0] + quad[1]) / 2, (quad[2] + quad[3]) / 2
    height = float(np.linalg.norm(quad[1] - quad[0] + quad[2] - quad[3]) / 2)
    wide = float(np.exp(draw.uniform(-0.25, 0.25))) if hard else 1.0
    size = max(8, round(float(right[0] - left[0]) * wide)), max(8, round(height))
    page = Image.fromarray(np.rint(ink * 255).astype(np.uint8))
    page = page.transform(size, Image.Transform.QUAD, quad.flatten().tolist(), Image.Resampling.BILINEAR)
    weight = draw.choice(["as it is", "bolder", "lighter", "outline"], p=[0.72, 0.14, 0.11, 0.03]) if hard else ""
    if weight == "bolder":
        page = page.filter(ImageFilter.MaxFilter(int(draw.choice([3, 5]))))
    elif weight == "lighter":
        page = page.filter(ImageFilter.MinFilter(3))
    seen = np.asarray(page, np.float32) / 255
    if weight == "outline":
        seen = np.asarray(page.filter(ImageFilter.MaxFilter(5)), np.float32) / 255
        seen = np.clip(seen - np.asarray(page.filter(ImageFilter.MinFilter(3)), np.float32) / 255, 0, 1)
    shares = (places - left[0]) / (right[0] - left[0])
    return seen, tuple(np.clip(shares, 0, 0.999).tolist())
