"""The OCR reward of Flow-GRPO as published (arXiv 2505.05470, flow_grpo/ocr.py, MIT), to compare with its numbers.

All boxes are joined without a separator in the engine's order; both sides lose their ASCII spaces and their case. A
target that the reading contains is right, whatever else was read; else the distance is capped at the length of the
target. Published runs read with PaddleOCR 2.9.1 (English), and count any error as 0; here it is a failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from retouch.rewards.protocol import RewardItem, text_to_read
from retouch.rewards.scorers.reading import ReadingEntry, ReadingScorer
from retouch.rewards.text_distance import edit_distance
from retouch.types import Failure, Outcome, Score


def substring_reward(target: str, boxes: Sequence[str]) -> float:
    """1 - distance / length of the target, in [0, 1]; the distance is 0 where the reading contains the target.

    Args:
        target: holds a character that is not a space.
        boxes: texts in the engine's order.
    """
    wanted, found = (text.replace(" ", "").lower() for text in (target, "".join(boxes)))
    distance = 0 if wanted in found else min(edit_distance(found, wanted), len(wanted))
    return 1 - distance / len(wanted)


class FlowGrpoOcrReward(ReadingEntry):
    """Flow-GRPO's OCR reward, in [0, 1]: 1 where the reading contains the target text, else by edit distance. Further
    text costs nothing once the target is there; `ocr` also counts it."""

    scorer: Literal["flow_grpo_ocr"] = "flow_grpo_ocr"

    def make(self) -> FlowGrpoOcrScorer:
        return FlowGrpoOcrScorer(self)


class FlowGrpoOcrScorer(ReadingScorer[FlowGrpoOcrReward]):
    """Reads each whole image."""

    def _one(self, item: RewardItem) -> Outcome:
        target = text_to_read(item)
        if isinstance(target, Failure):
            return target
        (lines,) = self.find_lines([item.image])
        boxes = [line.text for line in lines if line.confidence > 0]
        return Score(substring_reward(target, boxes), {"text": " ".join(boxes)})
