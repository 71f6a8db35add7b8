"""CVTG-2K's metric of several texts (TextCrafter, arXiv 2503.23461): words of all boxes, without case.

Word accuracy is the share of the asked words that occur among the found ones; a found word is not used up: one
satisfies all repeats. NED is the ratio of Python's difflib to the closest found word, not an edit distance. The
published reader is PaddleOCR (English, with the angle classifier).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Literal

from retouch.imaging.lines import BETWEEN_LINES
from retouch.rewards.protocol import RewardItem, lines_to_read
from retouch.rewards.scorers.reading import ReadingEntry, ReadingScorer
from retouch.types import Failure, Outcome, Score


@dataclass(frozen=True)
class Words:
    """Counts of one image: asked words, those that were found, and the sum of the closest ratios."""

    asked: int
    found: int
    ratios: float


def word_counts(asked: Sequence[str], boxes: Sequence[str]) -> Words:
    """The counts of one image, from the asked texts and the texts of all boxes."""
    wanted = [word for text in asked for word in text.lower().split()]
    found = [word for box in boxes for word in box.lower().split()]
    ratios = [max((SequenceMatcher(None, word, other).ratio() for other in found), default=0.0) for word in wanted]
    return Words(len(wanted), sum(word in found for word in wanted), sum(ratios))


class CvtgReward(ReadingEntry):
    """Share of the asked words that are found in the image, as CVTG-2K counts them, in [0, 1]."""

    scorer: Literal["cvtg"] = "cvtg"

    def make(self) -> CvtgScorer:
        return CvtgScorer(self)


class CvtgScorer(ReadingScorer[CvtgReward]):
    """Finds the words of each image."""

    def _one(self, item: RewardItem) -> Outcome:
        asked = lines_to_read(item)
        if isinstance(asked, Failure):
            return asked
        (lines,) = self.find_lines([item.image])
        boxes = [line.text for line in lines]
        words = word_counts([line.text for line in asked], boxes)
        return Score(
            words.found / words.asked,
            {
                "text": BETWEEN_LINES.join(boxes),
                "asked_words": words.asked,
                "found_words": words.found,
                "ratios": words.ratios,
            },
        )
