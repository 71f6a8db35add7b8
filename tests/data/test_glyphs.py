"""The second opinion beside OCR: ink compared with ink."""

from __future__ import annotations

import unicodedata

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont, features

from retouch.imaging import glyphs
from retouch.imaging.glyphs import (
    FONTS,
    FontsMissing,
    fit_font,
    font,
    glyph_correlation,
    ink_of,
    layout,
    write_spaced,
)
from retouch.imaging.lines import folded
from retouch.imaging.masks import Box

Array = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
WORDS = ("MOON", "KIGE", "TAHI", "BATOMU", "Ocean")
GROUND, INK = (240, 230, 220), (30, 20, 60)


def written(word: str, name: str, box: Box = (8, 6, 120, 42), size: tuple[int, int] = (128, 48)) -> Array:
    page = Image.new("RGB", size, GROUND)
    write_spaced(page, word, name, box, INK)
    return np.asarray(page)


def hole(box: Box = (8, 6, 120, 42), size: tuple[int, int] = (128, 48)) -> Array:
    mask = np.zeros((size[1], size[0]), np.uint8)
    mask[box[1] : box[3], box[0] : box[2]] = 255
    return mask


@pytest.mark.parametrize("name", FONTS)
@pytest.mark.parametrize("word", WORDS)
def test_the_right_word_in_every_font(word: str, name: str) -> None:
    assert glyph_correlation(written(word, name), hole(), word) > 0.85


@pytest.mark.parametrize("name", FONTS)
def test_a_wrong_word_is_clearly_lower(name: str) -> None:
    picture = written("MOON", name)
    right, one_wrong, two_wrong, other = (
        glyph_correlation(picture, hole(), word) for word in ("MOON", "MOOM", "NOOM", "BABY")
    )
    assert right > 0.85
    assert right - 0.15 > one_wrong > max(two_wrong, other) + 0.15
    assert other < 0.4


@pytest.mark.parametrize("name", FONTS)
def test_small_signs_still_tell_words_apart(name: str) -> None:
    box, size = (4, 4, 60, 28), (64, 32)
    picture = written("KIGE", name, box, size)
    right = glyph_correlation(picture, hole(box, size), "KIGE")
    assert right > 0.7
    assert all(glyph_correlation(picture, hole(box, size), word) < right - 0.15 for word in ("KIGO", "EGIK", "TAHI"))


def test_words_set_tight_count_as_much() -> None:
    page = Image.new("RGB", (128, 48), GROUND)
    ImageDraw.Draw(page).text((20, 4), "Ocean", font=font("CaladeaBold", 32), fill=INK)
    assert glyph_correlation(np.asarray(page), hole(), "Ocean") > 0.9


def test_colours_do_not_count() -> None:
    picture = written("MOON", "FredokaOne")
    plain = glyph_correlation(picture, hole(), "MOON")
    assert glyph_correlation(255 - picture, hole(), "MOON") == pytest.approx(plain, abs=1e-6)
    assert glyph_correlation(np.roll(picture, 1, axis=2), hole(), "MOON") == pytest.approx(plain, abs=1e-6)
    faint = np.rint(240 - (240 - picture.astype(float)) * 0.4).astype(np.uint8)
    assert glyph_correlation(faint, hole(), "MOON") == pytest.approx(plain, abs=0.02)


@pytest.mark.parametrize("shift", [(-5, 0), (4, 3), (0, -4)])
def test_place_does_not_count(shift: tuple[int, int]) -> None:
    picture = written("MOON", "FredokaOne", (20, 12, 108, 36))
    moved = np.roll(picture, shift, axis=(1, 0))
    assert glyph_correlation(moved, hole(), "MOON") == pytest.approx(
        glyph_correlation(picture, hole(), "MOON"), abs=1e-9
    )


def test_size_hardly_counts() -> None:
    small = glyph_correlation(written("MOON", "FredokaOne", (36, 15, 92, 33)), hole(), "MOON")
    large = glyph_correlation(written("MOON", "FredokaOne"), hole(), "MOON")
    assert small == pytest.approx(large, abs=0.06)


def test_what_lies_outside_the_mask_does_not_count() -> None:
    picture = written("MOON", "FredokaOne").copy()
    before = glyph_correlation(picture, hole(), "MOON")
    picture[hole() == 0] = np.random.default_rng(0).integers(0, 256, 3, np.uint8)
    assert glyph_correlation(picture, hole(), "MOON") == before


def test_no_ink_is_0() -> None:
    blank = np.full((48, 128, 3), 200, np.uint8)
    assert glyph_correlation(blank, hole(), "MOON") == 0.0
    noisy = np.random.default_rng(0).integers(190, 211, (48, 128, 3), np.uint8)
    assert glyph_correlation(noisy, hole(), "MOON") == 0.0
    assert ink_of(noisy) is None
    ramp = np.repeat(np.linspace(180, 220, 128).astype(np.uint8)[None, :, None], 48, 0).repeat(3, 2)
    assert ink_of(ramp) is None  # a sign that fades a little


@pytest.mark.parametrize("text", ["", " ", "\n"])
def test_a_blank_text_is_0(text: str) -> None:
    assert glyph_correlation(written("MOON", "FredokaOne"), hole(), text) == 0.0


def test_a_texture_is_no_word() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (48, 128, 3), np.uint8)
    stripes = np.where(np.arange(128) // 4 % 2, np.uint8(0), np.uint8(255))[None, :, None].repeat(48, 0).repeat(3, 2)
    for texture in (noise, stripes):
        assert max(glyph_correlation(texture, hole(), word) for word in WORDS) < 0.35


def test_ink_by_hand() -> None:
    crop = np.full((24, 64, 3), 200, np.uint8)
    crop[6:18, 16:48] = 100  # one block of half the sides: its ink is the whole canvas, at its distance from the ground
    ink = ink_of(crop)
    assert ink is not None
    assert ink.shape == (24, 64)
    assert np.unique(ink).tolist() == [100.0]


@pytest.mark.parametrize("name", FONTS)
def test_the_largest_font_that_fits(name: str) -> None:
    face = fit_font("MOON", name, 60, 20)
    assert extent(face.size, name)[0] <= 60 and extent(face.size, name)[1] <= 20
    larger = extent(face.size + 1, name)
    assert larger[0] > 60 or larger[1] > 20
    assert fit_font("MOON", name, 1, 1).size == 4
    assert fit_font("I", name, 9999, 9999, largest=50).size == 50


def extent(size: float, name: str) -> tuple[float, float]:
    left, top, right, bottom = font(name, int(size)).getbbox("MOON")
    return right - left, bottom - top


def test_missing_fonts_name_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(glyphs.FONTS, "Nowhere", "font_that_is_not_installed")
    with pytest.raises(FontsMissing) as caught:
        glyphs.font_path("Nowhere")
    assert str(caught.value) == 'font Nowhere is not installed: pip install "retouch[train]"'


# --- letters and lines ---


@pytest.mark.parametrize("text", ["開業", "안녕", "مرحبا", "नमस्ते", "ΩMEGA開", "OPEN 🎉"])
def test_letters_that_no_font_has_give_no_value(text: str) -> None:
    """Boxes would be compared with boxes."""
    page = Image.new("RGB", (256, 48), GROUND)
    ImageDraw.Draw(page).text((20, 4), text, font=font("FredokaOne", 24), fill=INK)
    assert glyph_correlation(np.asarray(page), hole((8, 6, 248, 42), (256, 48)), text) is None


def test_fonts_without_a_letter_are_skipped() -> None:
    """A word is compared with the fonts that have it alone, and not with the boxes of the others."""
    having = {name: glyphs.has_letters(name, "Ω") for name in FONTS}
    without = next(name for name, has in having.items() if not has)
    boxes = np.asarray(written("ΩΩΩ", without))
    renderings = [glyphs.rendered_ink(("ΩΩΩ",), name, spaced) for name in FONTS if having[name] for spaced in (0, 1)]
    ink = ink_of(boxes[6:42, 8:120])
    assert ink is not None
    expected = max(glyphs.correlation(ink, other) for other in renderings)
    assert glyph_correlation(boxes, hole(), "ΩΩΩ") == expected


@pytest.mark.parametrize("text", ["Ocean", "Ocean\u200b", "\ufeffOcean", "O\u00adcean"])
def test_marks_without_ink_do_not_count(text: str) -> None:
    picture = written("Ocean", "CaladeaBold")
    assert glyph_correlation(picture, hole(), text) == glyph_correlation(picture, hole(), "Ocean") != 0


@pytest.mark.parametrize("composed", ["É", "ÄÖÜ", "Ñandú"])
def test_decomposed_letters_are_those_that_they_are_composed_to(composed: str) -> None:
    picture, decomposed = written(composed, "CaladeaBold"), unicodedata.normalize("NFD", composed)
    assert len(decomposed) > len(composed)
    assert glyph_correlation(picture, hole(), decomposed) == glyph_correlation(picture, hole(), composed)


@pytest.mark.parametrize("mark", ["\n", "\r\n", "\u2028", "\x0b", "\n\n", " \n "])
def test_a_line_break_is_two_lines_or_a_space(mark: str) -> None:
    size, box = (128, 96), (8, 6, 120, 90)
    page = Image.new("RGB", size, GROUND)
    for row, word in enumerate(("GRAND", "OPENING")):
        ImageDraw.Draw(page).text((64, 24 + 32 * row), word, font=font("CaladeaBold", 24), fill=INK, anchor="mm")
    stacked = np.asarray(page)
    broken = glyph_correlation(stacked, hole(box, size), f"GRAND{mark}OPENING")
    together = glyph_correlation(stacked, hole(box, size), "GRAND OPENING")
    assert broken is not None and together is not None and broken > 0.8 > together + 0.2
    line = written("GRAND OPENING", "CaladeaBold", (4, 6, 252, 42), (256, 48))
    whole = hole((4, 6, 252, 42), (256, 48))
    assert glyph_correlation(line, whole, f"GRAND{mark}OPENING") == glyph_correlation(line, whole, "GRAND OPENING")


@pytest.mark.parametrize("text", ["GRAND\tOPENING", "GRAND\u00a0OPENING", "GRAND\u3000OPENING", "GRAND OPENING\n"])
def test_other_white_space_is_a_space(text: str) -> None:
    picture = written("GRAND OPENING", "CaladeaBold", (4, 6, 252, 42), (256, 48))
    whole = hole((4, 6, 252, 42), (256, 48))
    assert glyph_correlation(picture, whole, text) == glyph_correlation(picture, whole, "GRAND OPENING")


@pytest.mark.parametrize("text", ["SALE\n\u200b", "\u200b", "\ufeff"])
def test_a_line_without_ink_is_no_line(text: str) -> None:
    """It was rendered across its width, divided by its zero letters."""
    shown = glyph_correlation(written("SALE", next(iter(FONTS))), hole(), text)
    assert shown == (glyph_correlation(written("SALE", next(iter(FONTS))), hole(), "SALE") if "SALE" in text else 0.0)


@pytest.mark.parametrize(
    ("shown", "asked"),
    [("CAFE 12", "ＣＡＦＥ　１２"), ("WAIT...", "WAIT…"), ("9-17", "9‑17"), ("office", "oﬃce"), ("L'OR", "L´OR")],
)
def test_a_text_is_rendered_as_the_scorers_compare_it(shown: str, asked: str) -> None:
    """One rule for readings and ink (`retouch.imaging.lines.folded`): what scores 1 as read is the same text here."""
    assert folded(asked) == folded(shown)
    picture = written(shown, "CaladeaBold")
    value = glyph_correlation(picture, hole(), asked)
    assert value is not None and value >= glyph_correlation(picture, hole(), shown) > 0.85


def test_a_typographic_text_is_rendered_as_it_is_typed_too() -> None:
    page = Image.new("RGB", (128, 48), GROUND)
    ImageDraw.Draw(page).text((64, 24), "“I—O”", font=font("CaladeaBold", 24), fill=INK, anchor="mm")
    typed, plain = (glyph_correlation(np.asarray(page), hole(), text) for text in ("“I—O”", '"I-O"'))
    assert typed is not None and plain is not None and typed > 0.9 > plain


@pytest.mark.parametrize("there", [True, False])
def test_another_placement_of_letters_is_told(
    there: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without FriBiDi, as in small images of containers, Pillow places them by rules of its own, without an error."""
    monkeypatch.setattr(features, "check", lambda name: there)
    layout.cache_clear()
    try:
        assert layout() == layout() == (ImageFont.Layout.RAQM if there else ImageFont.Layout.BASIC)
        warned = [record.getMessage().partition(":")[0] for record in caplog.records]
        assert warned == ([] if there else ["Pillow does not find FriBiDi"])
    finally:
        layout.cache_clear()
