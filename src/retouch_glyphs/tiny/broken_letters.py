"""Letters in many fonts, whole and broken: what `glyph_structure` learns from and is measured on.

A letter is rendered at `CAP` pixels of capital height and varied (width, slant, rotation, weight, outline); then the
defect is rendered; then it is scaled, coloured, blurred, and noise and JPEG are added, whether it is whole or broken.
A defect added later would be recognised by its sharper edges.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from retouch.data.sampler import derive_seed
from retouch.errors import FontsMissing
from retouch.imaging.glyphs import layout
from retouch_glyphs.glyph_structure import LETTERS

TRAIN_FONTS: dict[str, tuple[str, ...]] = {
    "font_hanken_grotesk": (
        "HankenGroteskLight", "HankenGrotesk", "HankenGroteskItalic", "HankenGroteskSemiBold", "HankenGroteskBold",
        "HankenGroteskBoldItalic",
    ),
    "font_roboto": (
        "RobotoLight", "Roboto", "RobotoItalic", "RobotoMedium", "RobotoBold", "RobotoBoldItalic", "RobotoBlack",
    ),
    "font_source_sans_pro": (
        "SourceSansProLight", "SourceSansPro", "SourceSansProIt", "SourceSansProSemibold", "SourceSansProBoldIt",
        "SourceSansProBlack",
    ),
    "font_source_serif_pro": (
        "SourceSerifProLight", "SourceSerifPro", "SourceSerifProIt", "SourceSerifProSemibold", "SourceSerifProBold",
        "SourceSerifProBoldIt", "SourceSerifProBlack",
    ),
    "font_amatic_sc": ("AmaticSC", "AmaticSCBold"),
    "font_intuitive": ("Intuitive",),
}  # fmt: skip
"""Module of a font package -> names of its fonts."""

TEST_FONTS: dict[str, tuple[str, ...]] = {
    "font_caladea": ("Caladea", "CaladeaBoldItalic"),
    "font_fredoka_one": ("FredokaOne",),
    "font_manrope": ("Manrope", "ManropeExtraBold"),
    "PIL": ("Aileron",),
}
"""Fonts of which no training letter has a family. PIL's own is the default font of Pillow."""

CAPITALS_ONLY = frozenset({"AmaticSC", "AmaticSCBold"})
"""Fonts that render capitals in the place of lower-case letters."""

DEFECTS = ("erase", "add", "warp", "splice", "merge", "other", "nothing")
"""erase and add: a stroke; warp: bent; splice: the lower half of another letter; merge: the next letter pushed over it;
other: another letter, whole; nothing: no letter (noise, strokes, or the ground)."""

STRUCTURAL = DEFECTS[:4]
"""Defects within one letter."""

SAME_SHAPE = ("Il1|", "O0o", "Cc", "Kk", "Pp", "Ss", "Uu", "Vv", "Ww", "Xx", "Zz", "Mm", "Yy", "Jj", "B8", "S5", "Z2")
"""Letters of which a half, or the whole, may be taken for the other."""

LEAST_CHANGE = 0.01
"""Share of the letter's area below which a changed letter is whole."""

CAP = 48  # pixels of capital height while a letter is rendered
_WIDTH, _HEIGHT, _BASE = 176, 112, 76  # of the page; the baseline
_CENTRE = _WIDTH / 2

Ink = NDArray[Any]
Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class Letter:
    """One example.

    Attributes:
        pixels: [h, w, 3] uint8 RGB, a crop around the letter.
        asked: index in `retouch_glyphs.glyph_structure.LETTERS`.
        defect: of `DEFECTS`; None for a whole letter.
    """

    pixels: Pixels
    asked: int
    defect: str | None
    font: str


@dataclass(frozen=True)
class LetterSetting:
    """How letters are shown.

    Attributes:
        alone: without neighbours, in a box as high as its line.
        heights: lowest and highest of a crop in pixels; a third of the crops may be as low as `lowest`.
    """

    alone: bool = False
    heights: tuple[int, int] = (24, 40)
    lowest: int | None = 11


@lru_cache(maxsize=64)
def face(name: str) -> ImageFont.FreeTypeFont:
    """A font in which capitals are `CAP` pixels high.

    Raises:
        FontsMissing: with the command that installs it.
    """
    large = _sized(name, 200)
    _, top, _, bottom = large.getbbox("H")
    return _sized(name, 200 * CAP / (bottom - top))


def _sized(name: str, size: float) -> ImageFont.FreeTypeFont:
    if name == "Aileron":
        font = ImageFont.load_default(size)
        if not isinstance(font, ImageFont.FreeTypeFont):
            raise FontsMissing("this Pillow was built without FreeType: pip install --force-reinstall pillow")
        return font
    module = next(m for fonts in (TRAIN_FONTS, TEST_FONTS) for m, names in fonts.items() if name in names)
    try:
        return ImageFont.truetype(str(getattr(importlib.import_module(module), name)), size, layout_engine=layout())
    except ImportError:
        raise FontsMissing(f'font {name} is not installed: pip install "retouch[train,fonts]"') from None


def names_of(fonts: dict[str, tuple[str, ...]]) -> list[str]:
    """Names of the fonts of a table."""
    return [name for names in fonts.values() for name in names]


def alphabet_of(font: str) -> str:
    """Letters that a font renders as themselves."""
    return "".join(c for c in LETTERS if not c.islower()) if font in CAPITALS_ONLY else LETTERS


def draw_letters(
    count: int,
    fonts: Sequence[str],
    seed: int,
    shares: Mapping[str, float],
    setting: LetterSetting | None = None,
) -> list[Letter]:
    """`count` letters: pairs of a whole and a broken one. A pair depends on its number and the seed alone.

    Args:
        shares: of each defect among the broken letters.
    """
    pairs = (draw_pair(fonts, derive_seed("letter", seed, i), shares, setting) for i in range(-(-count // 2)))
    return [letter for pair in pairs for letter in pair][:count]


def draw_pair(
    fonts: Sequence[str], seed: int, shares: Mapping[str, float], setting: LetterSetting | None = None
) -> tuple[Letter, Letter]:
    """A letter, whole and broken, in one random font, size and colour, with the same blur and noise: they differ
    in the defect alone."""
    draw = np.random.default_rng(seed)
    setting = setting or LetterSetting()
    defects = list(shares)
    weights = np.array([shares[d] for d in defects])
    while True:
        name = _choice(draw, fonts)
        letter = _choice(draw, alphabet_of(name))
        defect = defects[draw.choice(len(defects), p=weights / weights.sum())]
        found = _inks(draw, name, letter, defect, setting)
        if found is None:
            continue
        height, look = _height(draw, setting), int(draw.integers(2**32))
        asked = LETTERS.index(letter)
        whole, broken = (shown(np.random.default_rng(look), ink, height) for ink in found)
        return Letter(whole, asked, None, name), Letter(broken, asked, defect, name)


def _height(draw: Generator, setting: LetterSetting) -> int:
    low, high = setting.heights
    if setting.lowest is not None and draw.random() < 1 / 3:
        low, high = setting.lowest, low
    return int(draw.integers(low, high + 1))


def _inks(draw: Generator, name: str, letter: str, defect: str, setting: LetterSetting) -> tuple[Ink, Ink] | None:
    """Ink of a letter with its neighbours, whole and broken, cropped, [h, w] in [0, 1]; None if the defect cannot be
    seen in any of five attempts, or the box of a thin letter is empty."""
    font, vary = face(name), variation(draw)
    whole = vary(_written(font, letter, _CENTRE))
    if whole.sum() < CAP:  # a light letter that was eroded away
        return None
    apart = np.zeros_like(whole)
    if not setting.alone and draw.random() < 0.5:
        apart = vary(_neighbours(draw, font, name, letter))
    box = _box(draw, whole, setting)
    before = _cropped(np.maximum(whole, apart), box)
    if defect == "nothing":
        return (before, _no_letter(draw)) if before.size else None  # a box may be narrower than nothing
    if defect == "other":
        other = vary(_written(font, _unlike(draw, name, letter), _CENTRE))
        if other.sum() < CAP:
            return None
        after = _cropped(np.maximum(other, apart), _box(draw, other, setting))
        return (before, after) if before.size and after.size else None
    for _ in range(5):
        if defect == "merge":
            both = np.maximum(whole, vary(_neighbours(draw, font, name, letter, overlap=True)))
            change = np.abs(_cropped(both - np.maximum(whole, apart), box))
        else:
            after = broken_ink(draw, whole, defect, lambda: vary(_written(font, _unlike(draw, name, letter), _CENTRE)))
            both = np.maximum(after, apart)
            change = np.abs(_cropped(both, box) - before)
        if change.sum() >= least_change(defect) * whole.sum():
            return before, _cropped(both, box)
    return None


def least_change(defect: str) -> float:
    """Share of the letter's area below which a change is none; halves of letters often have one shape."""
    return 0.06 if defect in ("splice", "merge") else LEAST_CHANGE


def _choice(draw: Generator, letters: Sequence[str]) -> str:
    return letters[int(draw.integers(len(letters)))]


def same_shape(a: str, b: str) -> bool:
    """Whether two letters may be taken for each other in some font."""
    return a == b or any(a in group and b in group for group in SAME_SHAPE)


def _unlike(draw: Generator, name: str, letter: str) -> str:
    return _choice(draw, [c for c in alphabet_of(name) if not same_shape(c, letter)])


def _written(font: ImageFont.FreeTypeFont, text: str, centre: float) -> Ink:
    page = Image.new("L", (_WIDTH, _HEIGHT))
    ImageDraw.Draw(page).text((centre - font.getlength(text) / 2, _BASE), text, font=font, fill=255, anchor="ls")
    return np.asarray(page, np.float32) / 255


def _neighbours(draw: Generator, font: ImageFont.FreeTypeFont, name: str, letter: str, overlap: bool = False) -> Ink:
    """The letters on both sides; with `overlap` one of them is pushed over the letter by .35 to .55 of a width."""
    width, tracking = font.getlength(letter), draw.uniform(-0.02, 0.25) * CAP
    pushed = ("left", "right")[draw.integers(2)] if overlap else None
    found = np.zeros((_HEIGHT, _WIDTH), np.float32)
    for side, sign in (("left", -1), ("right", 1)):
        other = _choice(draw, alphabet_of(name))
        own = font.getlength(other)
        away = tracking if side != pushed else -draw.uniform(0.35, 0.55) * min(width, own)
        found = np.maximum(found, _written(font, other, _CENTRE + sign * ((width + own) / 2 + away)))
    return found


def variation(draw: Generator) -> Callable[[Ink], Ink]:
    """A random change of width, slant, angle and weight, or the outline; the same for all that it is applied to."""
    wide = np.exp(draw.uniform(-0.2, 0.2))
    slant = draw.uniform(-0.25, 0.25) if draw.random() < 0.3 else 0.0
    angle = np.deg2rad(draw.normal(0, 2.5))
    weight = draw.choice(["as it is", "bolder", "lighter", "outline"], p=[0.7, 0.14, 0.12, 0.04])
    c, s = np.cos(angle), np.sin(angle)
    turn = np.array([[c, -s], [s, c]]) @ np.array([[1.0, -slant], [0.0, 1.0]]) @ np.diag([wide, 1.0])
    back = np.linalg.inv(turn)
    middle = np.array([_CENTRE, _BASE - CAP / 2])
    shift = middle - back @ middle
    matrix = (*back[0], shift[0], *back[1], shift[1])

    def apply(ink: Ink) -> Ink:
        page = Image.fromarray(np.rint(ink * 255).astype(np.uint8))
        page = page.transform(page.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)
        if weight == "bolder":
            page = page.filter(ImageFilter.MaxFilter(3))
        elif weight == "lighter":
            page = page.filter(ImageFilter.MinFilter(3))
        elif weight == "outline":
            inner = np.asarray(page.filter(ImageFilter.MinFilter(3)), np.float32)
            return np.clip(np.asarray(page.filter(ImageFilter.MaxFilter(5)), np.float32) - inner, 0, 255) / 255
        return np.asarray(page, np.float32) / 255

    return apply


def broken_ink(draw: Generator, ink: Ink, defect: str, other: Callable[[], Ink]) -> Ink:
    """A letter with one of the `STRUCTURAL` defects.

    Args:
        other: renders another letter in the same way.
    """
    rows, columns = np.nonzero(ink > 0.5)
    top, bottom = (int(rows.min()), int(rows.max()) + 1) if len(rows) else (0, 1)
    height = bottom - top
    if defect == "warp":
        return _warped(draw, ink, height)
    if defect == "splice":
        cut = top + round(height * draw.uniform(0.4, 0.6))
        second = other()
        return np.concatenate([ink[:cut], second[cut:]] if draw.random() < 0.5 else [second[:cut], ink[cut:]])
    if not len(rows):
        return ink
    at = draw.integers(len(rows))
    x, y, angle = columns[at], rows[at], draw.uniform(0, 2 * np.pi)
    step = np.array([np.cos(angle), np.sin(angle)])
    if defect == "erase":
        length, wide = draw.uniform(0.25, 0.5) * height, draw.uniform(0.1, 0.2) * height
        return ink * (1 - _stroke(np.array([x, y]) - step * length / 2, step * length, wide))
    length, wide = draw.uniform(0.3, 0.6) * height, draw.uniform(0.06, 0.14) * height
    return np.maximum(ink, _stroke(np.array([x, y], float), step * length, wide))


def _stroke(start: NDArray[np.float64], along: NDArray[np.float64], wide: float) -> Ink:
    page = Image.new("L", (_WIDTH, _HEIGHT))
    (x, y), (u, v) = start, start + along
    ImageDraw.Draw(page).line([float(x), float(y), float(u), float(v)], fill=255, width=max(1, round(wide)))
    return np.asarray(page, np.float32) / 255


def _warped(draw: Generator, ink: Ink, height: int) -> Ink:
    """Two sines per axis with amplitudes of .1 to .2 of the height together."""
    y, x = np.mgrid[0:_HEIGHT, 0:_WIDTH].astype(np.float32)
    moved = []
    for along, across in ((x, y), (y, x)):
        shift = np.zeros_like(x)
        for _ in range(2):
            wave = height * draw.uniform(0.5, 1.2)
            shift += draw.uniform(0.05, 0.1) * height * np.sin(2 * np.pi * across / wave + draw.uniform(0, 2 * np.pi))
        moved.append(along + shift)
    return _at(ink, moved[0], moved[1])


def _at(ink: Ink, x: Ink, y: Ink) -> Ink:
    """Values between pixels, bilinear; the nearest beyond the edges."""
    x, y = np.clip(x, 0, _WIDTH - 1.001), np.clip(y, 0, _HEIGHT - 1.001)
    i, j = x.astype(int), y.astype(int)
    u, v = x - i, y - j
    upper = ink[j, i] * (1 - u) + ink[j, i + 1] * u
    return (upper * (1 - v) + (ink[j + 1, i] * (1 - u) + ink[j + 1, i + 1] * u) * v).astype(np.float32)


def _box(draw: Generator, ink: Ink, setting: LetterSetting) -> tuple[int, int, int, int]:
    """A box around a letter as recognisers and equal slices give them: as high as its line or its ink, and somewhat too
    narrow or too wide."""
    rows, columns = np.nonzero(ink > 0.3)
    left, right, top, bottom = columns.min(), columns.max() + 1, rows.min(), rows.max() + 1
    if setting.alone:
        margin = draw.uniform(0.08, 0.2, 4) * CAP
        line = min(top, _BASE - CAP), max(bottom, _BASE)
        return _within(left - margin[0], line[0] - margin[1], right + margin[2], line[1] + margin[3])
    if draw.random() < 0.3:  # as high as its ink
        above, below = draw.uniform(-0.02, 0.2, 2) * CAP
        upper, lower = top - above, bottom + below
    else:
        above, below = draw.uniform(0.0, 0.35, 2) * CAP
        upper, lower = min(top, _BASE - CAP) - above, max(bottom, _BASE) + below
    aside = draw.uniform(-0.06, 0.22, 2) * CAP
    if draw.random() < 0.3:  # a slice of equal width
        pitch = draw.uniform(0.65, 1.0) * CAP
        centre = (left + right) / 2 + draw.normal(0, 0.05) * CAP
        return _within(min(left + 3, centre - pitch / 2), upper, max(right - 3, centre + pitch / 2), lower)
    return _within(left - aside[0], upper, right + aside[1], lower)


def _within(left: float, top: float, right: float, bottom: float) -> tuple[int, int, int, int]:
    return max(0, round(left)), max(0, round(top)), min(_WIDTH, round(right)), min(_HEIGHT, round(bottom))


def _cropped(ink: Ink, box: tuple[int, int, int, int]) -> Ink:
    left, top, right, bottom = box
    return ink[top:bottom, left:right]


def _no_letter(draw: Generator) -> Ink:
    """The ground, strokes at random, or a random texture."""
    height, width = CAP + int(draw.integers(0, CAP // 2)), int(draw.uniform(0.4, 1.2) * CAP)
    kind = draw.integers(4)
    ink = np.zeros((height, width), np.float32)
    if kind == 1:
        page = Image.new("L", (width, height))
        for _ in range(int(draw.integers(2, 7))):
            ends = (draw.random(4) * (width, height, width, height)).tolist()
            ImageDraw.Draw(page).line(ends, fill=255, width=int(draw.integers(3, 11)))
        ink = np.asarray(page, np.float32) / 255
    elif kind > 1:
        cells = draw.integers(3, 16, 2)
        page = Image.fromarray((draw.random((cells[0], cells[1])) * 255).astype(np.uint8))
        soft = np.asarray(page.resize((width, height), Image.Resampling.BICUBIC), np.float32) / 255
        ink = soft if kind == 2 else (soft > draw.uniform(0.4, 0.65)).astype(np.float32)
    return ink


def shown(draw: Generator, ink: Ink, height: int) -> Pixels:
    """Ink as an image of `height` pixels: random colours, a ramp and spots of light, blur, noise and JPEG."""
    width = max(3, round(ink.shape[1] * height / ink.shape[0]))
    page = Image.fromarray(np.rint(ink * 255).astype(np.uint8)).resize((width, height), Image.Resampling.BOX)
    alpha = np.asarray(page, np.float32)[..., None] / 255
    ground, colour = _colours(draw)
    y, x = np.mgrid[0:height, 0:width] / max(height, width)
    angle = draw.uniform(0, 2 * np.pi)
    light = 1 + draw.uniform(0, 0.25) * (np.cos(angle) * x + np.sin(angle) * y - 0.5)
    if draw.random() < 0.4:
        spots = Image.fromarray((draw.random((3, 3)) * 255).astype(np.uint8)).resize((width, height))
        light = light + draw.uniform(0, 0.2) * (np.asarray(spots) / 255 - 0.5)
    image = (ground * (1 - alpha) + colour * alpha) * light[..., None]
    picture = Image.fromarray(np.clip(np.rint(image), 0, 255).astype(np.uint8))
    picture = picture.filter(ImageFilter.GaussianBlur(draw.uniform(0, 0.9) * height / 32))
    noisy = np.asarray(picture, np.float32) + draw.normal(0, draw.uniform(0, 0.05) * 255, (height, width, 3))
    pixels = np.clip(np.rint(noisy), 0, 255).astype(np.uint8)
    return _jpeg(pixels, int(draw.integers(40, 96))) if draw.random() < 0.4 else pixels


def _colours(draw: Generator) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Ground and ink, at least 60 of 255 levels of grey apart."""
    grey = np.array([0.299, 0.587, 0.114])
    while True:
        ground, ink = draw.uniform(0, 255, 3), draw.uniform(0, 255, 3)
        if draw.random() < 0.5:  # dark on light, as most text is
            ground, ink = 255 - ground * 0.3, ink * 0.45
        if abs(float(grey @ (ground - ink))) >= 60:
            return (ground, ink) if draw.random() < 0.6 else (ink, ground)


def _jpeg(pixels: Pixels, quality: int) -> Pixels:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "JPEG", quality=quality)
    return np.asarray(Image.open(stream).convert("RGB"))
