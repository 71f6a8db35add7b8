"""Characters and their boxes by rapidocr, and which of them are the asked ones.

The recogniser scans a line in columns; the column in which a character appears is near its middle. A box reaches
halfway to the neighbouring characters and is as high as its line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from retouch.imaging.masks import Box
from retouch.rewards.protocol import Pixels


@dataclass(frozen=True)
class Character:
    """A recognised character.

    Attributes:
        box: in the crop that was read, half-open.
    """

    text: str
    box: Box


def read_characters(engine: Any, crop: Pixels, detect: bool) -> list[Character]:
    """Characters of an RGB crop, line by line from the top, without spaces.

    Args:
        engine: a `rapidocr.RapidOCR`.
        detect: find the lines first; False reads the crop as one line.
    """
    from rapidocr.ch_ppocr_rec import TextRecInput

    bgr = np.ascontiguousarray(crop[..., ::-1])
    height, width = crop.shape[:2]
    lines = _detected(engine, bgr) if detect else [(0, 0, width, height)]
    recognizer = engine._load_rec_model()  # the public call with boxes needs detected lines
    found: list[Character] = []
    for left, top, right, bottom in lines:
        line = np.ascontiguousarray(bgr[top:bottom, left:right])
        info = recognizer(TextRecInput(img=[line], return_word_box=True)).word_results[0]
        if info is None or not info.words:
            continue
        texts = [char for word in info.words for char in word]
        middles = [(column + 0.5) / info.line_txt_len for columns in info.word_cols for column in columns]
        for text, (start, end) in zip(texts, spans(middles), strict=True):
            x0, x1 = left + round(start * (right - left)), left + round(end * (right - left))
            found.append(Character(text, (x0, top, max(x0 + 1, x1), bottom)))
    return found


def _detected(engine: Any, bgr: Pixels) -> list[Box]:
    """Upright boxes of the detected lines, from the top."""
    height, width = bgr.shape[:2]
    # rapidocr keeps these three flags between calls: always pass all of them
    quads = engine(bgr, use_det=True, use_cls=False, use_rec=False).boxes
    boxes: list[Box] = []
    for quad in [] if quads is None else quads:
        (left, top), (right, bottom) = np.floor(quad.min(0)).astype(int), np.ceil(quad.max(0)).astype(int)
        box = max(0, int(left)), max(0, int(top)), min(width, int(right)), min(height, int(bottom))
        if box[0] < box[2] and box[1] < box[3]:
            boxes.append(box)
    return sorted(boxes, key=lambda box: (box[1] + box[3], box[0]))


def spans(middles: Sequence[float]) -> list[tuple[float, float]]:
    """Start and end of each character on a line of length 1: halfway to its neighbours, and at the ends as far out as
    in; a single character has the whole line."""
    if len(middles) == 1:
        return [(0.0, 1.0)]
    between = [(a + b) / 2 for a, b in pairwise(middles)]
    first, last = 2 * middles[0] - between[0], 2 * middles[-1] - between[-1]
    edges = [max(0.0, first), *between, min(1.0, last)]
    return list(pairwise(edges))


def aligned(asked: str, found: str) -> list[int | None]:
    """Index in `found` of each character of `asked` by an alignment of least edit distance, whether it is equal or
    another one in its place; None for characters that were left out. Case does not count."""
    a, b = [c.casefold() for c in asked], [c.casefold() for c in found]
    cost = np.zeros((len(a) + 1, len(b) + 1), np.int64)
    cost[:, 0], cost[0] = np.arange(len(a) + 1), np.arange(len(b) + 1)
    for i, char in enumerate(a, 1):
        for j, other in enumerate(b, 1):
            cost[i, j] = min(cost[i - 1, j - 1] + (char != other), cost[i - 1, j] + 1, cost[i, j - 1] + 1)
    places: list[int | None] = [None] * len(a)
    i, j = len(a), len(b)
    while i and j:
        if cost[i, j] == cost[i - 1, j - 1] + (a[i - 1] != b[j - 1]):
            i, j = i - 1, j - 1
            places[i] = j
        elif cost[i, j] == cost[i - 1, j] + 1:
            i -= 1
        else:
            j -= 1
    return places
