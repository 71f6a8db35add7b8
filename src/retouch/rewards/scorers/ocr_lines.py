"""Legibility of several texts in one image, line by line.

Without places, the lines of the image (of its mask crop) are found and matched with the asked lines
(`retouch.rewards.matching`): neighbouring lines are joined where that fits better, because detectors split and merge
lines at will. With a polygon or box for each asked line, every line is cropped and recognised alone: misplaced text is
then wrong.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from retouch.config.base import Unit
from retouch.imaging.lines import BETWEEN_LINES, MOST_LINES, TextLine, folded, joined
from retouch.rewards.line_crops import as_pixels, upright
from retouch.rewards.matching import MOST_EXACT, Matching, Order, Weight, match_lines
from retouch.rewards.protocol import RewardItem, lines_to_read
from retouch.rewards.scorers.reading import ReadingEntry, ReadingScorer, crop_for, rows_of, unreadable
from retouch.rewards.text_distance import text_similarity
from retouch.types import Failure, Outcome, Score

_UNREAD = "–"


class OcrLinesReward(ReadingEntry):
    """Similarity of the lines read in the image to the lines to write, in [0, 1]: the best matching over all ways to
    join neighbouring lines; or line by line where the lines have places."""

    scorer: Literal["ocr_lines"] = "ocr_lines"
    order: Order = "free"
    """"free" takes the lines in any order; "kept" takes only matches that keep the order of the lines."""
    line_weight: Weight = "characters"
    """Weight of a line: its "characters", or every one of the "lines" the same, for short labels that matter."""
    places: bool = True
    """Crop each line by its polygon or box, if the lines have one, and read it there. False finds the lines anywhere in
    the mask."""
    case_sensitive: bool = True
    """Whether "Moon" and "MOON" differ."""
    punctuation: bool = True
    """Whether punctuation counts; false removes it from both sides."""
    crop_margin: Unit = 0.0
    """Widens the mask box by this fraction of its sides before lines are found."""

    def make(self) -> OcrLinesScorer:
        return OcrLinesScorer(self)


@dataclass(frozen=True)
class _Reading:
    """The text read for every target line, and the other lines.

    Attributes:
        found: one text for each asked line, "" for none; asked lines that were found as one text share it.
    """

    value: float
    similarities: Sequence[float]
    found: Sequence[str]
    missing: Sequence[str] = ()
    extra: Sequence[str] = ()


class OcrLinesScorer(ReadingScorer[OcrLinesReward]):
    """Reads the lines of each item."""

    def __init__(self, options: OcrLinesReward) -> None:
        o = options
        settings = (o.order, o.line_weight, f"places={o.places} case={o.case_sensitive} punctuation={o.punctuation}")
        super().__init__(o, " ".join(("lines", *settings, f"margin={o.crop_margin}")))

    def _one(self, item: RewardItem) -> Outcome:
        asked = lines_to_read(item)
        if isinstance(asked, Failure):
            return asked
        wanted = [self._normal(line.text) for line in asked]
        if not self.options.punctuation and not all(wanted):
            return Failure("bad_item", "a line to read is punctuation alone; set punctuation=true, or leave it out")
        if (failure := self.beyond_reader(*wanted)) is not None:
            return failure
        placed = self.options.places and all(line.polygon is not None for line in asked)
        read = self._read_places(item, asked, wanted) if placed else self._find_and_match(item, wanted)
        return read if isinstance(read, Failure) else _score_of(wanted, read)

    def _normal(self, text: str) -> str:
        if not self.options.punctuation:
            text = "".join(" " if unicodedata.category(c).startswith("P") else c for c in folded(text))
        return folded(text, case_sensitive=self.options.case_sensitive)

    def _read_places(self, item: RewardItem, asked: Sequence[TextLine], wanted: Sequence[str]) -> _Reading | Failure:
        crops = [upright(item.image, line.polygon) for line in asked if line.polygon is not None]
        seen = [as_pixels(crop) for crop in crops if crop is not None]
        if len(seen) < len(asked):
            return Failure("bad_item", "the place of a line lies outside the image, or is narrower than a pixel")
        found = [self._normal(text) for text, _ in self.read_lines(seen)]
        similarities = [text_similarity(a, b) for a, b in zip(wanted, found, strict=True)]
        weights = [len(text) if self.options.line_weight == "characters" else 1 for text in wanted]
        value = sum(w * s for w, s in zip(weights, similarities, strict=True)) / sum(weights)
        return _Reading(value, similarities, found, [a for a, b in zip(wanted, found, strict=True) if not b])

    def _find_and_match(self, item: RewardItem, wanted: Sequence[str]) -> _Reading | Failure:
        margin = self.options.crop_margin
        wrong = unreadable(item, margin)
        if wrong is not None:
            return wrong
        (lines,) = self.find_lines([crop_for(item, margin)])
        if len(lines) > MOST_LINES:
            return Failure("bad_item", f"{len(lines)} lines found; more than {MOST_LINES} are not compared")
        rows = [[self._normal(line.text) for line in row] for row in rows_of(lines)]
        rows = [[text for text in row if text] for row in rows]
        found, matching = best_matching(wanted, rows, self.options.order, self.options.line_weight)
        return _matched(wanted, found, matching)


def best_matching(
    asked: Sequence[str], rows: Sequence[Sequence[str]], order: Order, weight: Weight
) -> tuple[list[str], Matching]:
    """The found lines that were matched, in reading order, and their best matching.

    Up to `MOST_EXACT` found lines every join is tried; above, the lines of a row are one line, or every line is alone,
    whichever scores more.
    """
    alone = [text for row in rows for text in row]
    best = alone, match_lines(asked, alone, order, weight)
    if len(alone) > MOST_EXACT:
        together = [joined(row) for row in rows if row]
        other = together, match_lines(asked, together, order, weight)
        return max(best, other, key=lambda pair: pair[1].score)
    return best


def _matched(asked: Sequence[str], found: Sequence[str], matching: Matching) -> _Reading:
    similarities, read, left = [0.0] * len(asked), [""] * len(asked), set(range(len(found)))
    for match in matching.matches:
        for i in range(*match.asked):
            similarities[i], read[i] = match.similarity, joined(found[slice(*match.found)])
        left -= set(range(*match.found))
    covered = {i for match in matching.matches for i in range(*match.asked)}
    missing = [text for i, text in enumerate(asked) if i not in covered]
    return _Reading(matching.score, similarities, read, missing, [found[j] for j in sorted(left)])


def _score_of(asked: Sequence[str], read: _Reading) -> Score:
    lines = [
        {"asked": text, "found": found, "ned": similarity}
        for text, found, similarity in zip(asked, read.found, read.similarities, strict=True)
    ]
    detail: dict[str, Any] = {
        "text": BETWEEN_LINES.join([*(text or _UNREAD for text in read.found), *read.extra]),
        "lines": lines,
        "line_ned": fmean(read.similarities),
        "exact": fmean(float(similarity == 1.0) for similarity in read.similarities),
        "missing": sum(map(len, read.missing)),
        "extra": sum(map(len, read.extra)),
    }
    return Score(read.value, detail)
