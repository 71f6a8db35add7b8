"""Grids: every picture in its place, large enough to see, with its label."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from retouch.observe.grids import grid

GAP, LABEL = 6, 15


def colour(name: str, size: tuple[int, int] = (200, 100)) -> Image.Image:
    return Image.new("RGB", size, name)


def dark(sheet: Image.Image, box: tuple[int, int, int, int]) -> int:
    """Pixels of text in a box."""
    return int((np.asarray(sheet.crop(box).convert("L")) < 128).sum())


def test_pictures_stand_in_rows_and_columns() -> None:
    names = [["red", "lime"], ["blue", "yellow"], ["cyan", "magenta"]]
    sheet = grid([[(colour(name), "") for name in row] for row in names])
    assert sheet.size == (2 * (200 + GAP) + GAP, 3 * (100 + LABEL + GAP) + GAP)
    for r, row in enumerate(names):
        for c, name in enumerate(row):
            place = (GAP + c * (200 + GAP) + 100, GAP + r * (100 + LABEL + GAP) + 50)
            assert sheet.getpixel(place) == colour(name).getpixel((0, 0))


def test_labels_stand_under_pictures_and_titles_over_columns() -> None:
    plain = grid([[(colour("white"), ""), (colour("white"), "")]], ["", ""])
    sheet = grid([[(colour("white"), ""), (colour("white"), "MOON")]], ["", "after"])
    top = LABEL + GAP
    assert sheet.height == GAP + top + 100 + LABEL + GAP
    left, right = GAP, GAP + 200 + GAP
    assert dark(sheet, (right, 0, right + 200, top)) > 20
    assert dark(sheet, (right, top + GAP + 100, right + 200, sheet.height)) > 20
    assert dark(sheet, (left, 0, right, sheet.height)) == 0 == dark(plain, (0, 0, *plain.size))


def test_small_pictures_are_enlarged_without_blur_and_large_ones_shrunk() -> None:
    checker = np.zeros((32, 64, 3), np.uint8)
    checker[::2] = 255
    sheet = np.asarray(grid([[(checker, "")]]))
    picture = sheet[GAP : GAP + 96, GAP : GAP + 192]
    assert np.array_equal(picture, checker.repeat(3, 0).repeat(3, 1))
    large = colour("red", (1024, 512))
    assert grid([[(large, "")]]).width == 320 + 2 * GAP
    assert large.size == (1024, 512)  # the caller's picture stays as it was


def test_a_long_label_is_cut_to_its_picture() -> None:
    sheet = grid([[(colour("white"), "word " * 50), (colour("white"), "")]])
    right = GAP + 200
    assert dark(sheet, (right, 0, *sheet.size)) == 0
    assert dark(sheet, (0, GAP + 100, right, sheet.height)) > 100


def test_characters_that_the_font_lacks_are_question_marks() -> None:
    """OCR finds Chinese in noise; a row of boxes would say less."""
    sheets = [grid([[(colour("white"), label)]]) for label in ("?A\u00e9?", "\u6676A\u00e9\u6587", "A\u00e9")]
    assert sheets[0].tobytes() == sheets[1].tobytes() != sheets[2].tobytes()


def test_pictures_of_other_sizes_share_a_grid() -> None:
    sheet = grid([[(colour("red", (100, 100)), ""), (colour("blue", (300, 200)), "")]])
    assert sheet.size == (2 * (300 + GAP) + GAP, 200 + LABEL + 2 * GAP)


def test_a_grid_needs_a_picture() -> None:
    for rows in ([], [[]]):
        with pytest.raises(ValueError, match="at least one image"):
            grid(rows)
