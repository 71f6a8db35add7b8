"""Words with one broken letter, for `structure.py` and the tests of `glyph_structure`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from retouch_glyphs.tiny import broken_letters as letters
from retouch_glyphs.tiny.broken_letters import CAP, Pixels


@dataclass(frozen=True)
class Word:
    """A word on one line.

    Attributes:
        pixels: [h, w, 3] uint8 RGB.
        defect: of one of its letters; None for a whole word.
    """

    pixels: Pixels
    text: str
    defect: str | None
    font: str


def draw_word(fonts: Sequence[str], seed: int, defect: str | None, length: int = 5, height: int = 48) -> Word:
    """A word of random letters, one of which has a defect of `STRUCTURAL`, in an image of `height` pixels."""
    draw = np.random.default_rng(seed)
    name = letters._choice(draw, fonts)
    font, alphabet = letters.face(name), letters.alphabet_of(name)
    text = "".join(letters._choice(draw, alphabet) for _ in range(length))
    at = int(draw.integers(length))
    ends = np.cumsum([font.getlength(c) + 0.06 * CAP for c in text])
    line = np.zeros((letters._HEIGHT, round(float(ends[-1])) + 2 * letters._WIDTH), np.float32)
    for i, letter in enumerate(text):
        ink = letters._written(font, letter, letters._CENTRE)
        while i == at and defect is not None:
            other = letters._unlike(draw, name, letter)
            changed = letters.broken_ink(
                draw, ink, defect, lambda other=other: letters._written(font, other, letters._CENTRE)
            )
            if np.abs(changed - ink).sum() / ink.sum() >= letters.least_change(defect):
                ink = changed
                break
        left = letters._WIDTH + round(float(ends[i] - (font.getlength(letter) + 0.06 * CAP) / 2)) - letters._WIDTH // 2
        line[:, left : left + letters._WIDTH] = np.maximum(line[:, left : left + letters._WIDTH], ink)
    rows, columns = np.nonzero(line > 0.3)
    margin = draw.uniform(0.15, 0.3, 4) * CAP
    top, bottom = max(0, round(rows.min() - margin[0])), round(rows.max() + 1 + margin[1])
    cut = line[top:bottom, round(columns.min() - margin[2]) : round(columns.max() + 1 + margin[3])]
    return Word(letters.shown(draw, cut, height), text, defect, name)
