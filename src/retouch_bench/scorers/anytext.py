"""AnyText's metric of lines at given places (arXiv 2311.03054, eval/eval_dgocr.py, Apache-2.0): each line is cropped by
its polygon, scaled to 48 pixels of height and at most 320 of width, and recognised alone.

An exact line has the same characters: case and spaces count. NED is compared on places in a table of characters, 97 for
English, the keys of PP-OCR for Chinese: a character outside the table is its last entry, the space. The published
recogniser is ModelScope's DuGuangOCR; with another one the numbers are not the published ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from statistics import fmean
from typing import Any, Literal, cast

from retouch.imaging.lines import BETWEEN_LINES
from retouch.rewards.line_crops import as_pixels, scaled, upright
from retouch.rewards.protocol import RewardItem, lines_to_read
from retouch.rewards.scorers.reading import ReadingEntry, ReadingScorer
from retouch.rewards.text_distance import edit_distance
from retouch.types import Failure, Outcome, Score

Table = Literal["en", "zh"]

_SLACK = 1e-5  # the published script adds it to the longer length


@dataclass(frozen=True)
class LineReading:
    """One line as the metric compares it."""

    asked: str
    found: str
    exact: bool
    ned: float


def compare(asked: str, found: str, table: Table) -> LineReading:
    """The two measures of one line."""
    known = characters(table)
    one, other = ("".join(c if c in known else " " for c in text) for text in (asked, found))
    ned = 1 - edit_distance(one, other) / (max(len(asked), len(found)) + _SLACK)
    return LineReading(asked, found, asked == found, ned)


@cache
def characters(table: Table) -> frozenset[str]:
    """The characters of a table; every other one counts as a space."""
    if table == "en":
        return frozenset(map(chr, range(0x20, 0x7F)))
    keys = files("retouch.rewards.scorers").joinpath("ppocr_keys_v1.txt").read_text(encoding="utf-8")
    return frozenset(keys.split("\n"))


def _asked(item: RewardItem, texts: list[str]) -> list[str]:
    """The texts of the lines as the benchmark compares them: a text that was cut behind a space keeps the space."""
    given = item.metadata.get("asked_texts")
    same = isinstance(given, list) and [str(text).strip() for text in cast("list[Any]", given)] == texts
    return [str(text) for text in cast("list[Any]", given)] if same else texts


class AnyTextReward(ReadingEntry):
    """Mean NED of the lines of an image, each read at its polygon as AnyText's evaluation crops and compares them, in
    [0, 1]."""

    scorer: Literal["anytext"] = "anytext"
    table: Table = "en"
    """Table of characters that NED compares by: "en" has the printable ASCII characters, "zh" the keys of PP-OCR."""

    def finds_lines(self) -> bool:
        return False

    def make(self) -> AnyTextScorer:
        return AnyTextScorer(self)


class AnyTextScorer(ReadingScorer[AnyTextReward]):
    """Reads the lines of each item at their places."""

    def __init__(self, options: AnyTextReward) -> None:
        super().__init__(options, f"anytext table={options.table}")

    def _one(self, item: RewardItem) -> Outcome:
        asked = lines_to_read(item)
        if isinstance(asked, Failure):
            return asked
        polygons = [line.polygon for line in asked if line.polygon is not None]
        if len(polygons) < len(asked):
            return Failure("bad_item", "no polygons: set metadata.lines to lines with a text and a polygon or box")
        crops = [upright(item.image, polygon) for polygon in polygons]
        shown = [as_pixels(scaled(crop)) for crop in crops if crop is not None]
        if len(shown) < len(asked):
            return Failure("bad_item", "the polygon of a line lies outside the image, or is narrower than a pixel")
        read = [text for text, _ in self.read_lines(shown)]
        texts = _asked(item, [line.text for line in asked])
        lines = [compare(text, found, self.options.table) for text, found in zip(texts, read, strict=True)]
        detail = {
            "text": BETWEEN_LINES.join(read),
            "lines": [{"asked": line.asked, "found": line.found} for line in lines],
            "exact": fmean(float(line.exact) for line in lines),
        }
        return Score(fmean(line.ned for line in lines), detail)
