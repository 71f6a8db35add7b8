"""TextEdit's OCR metric of a replaced text (arXiv 2603.09877, hub opencompass/TextEdit; eval_pipeline/
classic_metrics_eval.py, MIT): is the target where the source text stood, and does every other line still stand?

Texts are compared after NFKC, in lower case, letters and digits only. The published reader is PaddleOCR 2.10 (English,
with the angle classifier), which reads the source and the output in different channel orders; here both are RGB.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

from PIL import Image

from retouch.imaging.fitting import of_size
from retouch.imaging.lines import BETWEEN_LINES, Bounds
from retouch.rewards.protocol import RewardItem, text_to_read
from retouch.rewards.scorers.reading import ReadingEntry, ReadingScorer
from retouch.rewards.text_distance import edit_distance
from retouch.types import Failure, Outcome, Score

_SLACK = 1e-5  # the published script adds it to the longer length
_SAME_LINE = 10.0  # pixels between the vertical centres of neighbours in one line, whatever the size of the image
_TARGET_WEIGHT = 0.5  # of the edited line; the lines of the background share the rest
_LEFT_BEHIND = 0.2  # factor where the source text is still there, and the target is not


@dataclass(frozen=True)
class BoxedText:
    """A text and its upright box in pixels of the source."""

    text: str
    box: Bounds


@dataclass(frozen=True)
class EditScores:
    """The measures of one image; `accuracy` is the table's OA, `ned` is of the place of the source text."""

    accuracy: float = 0.0
    precision: float = 0.0
    recall: float = 0.0
    f1: float = 0.0
    ned: float = 0.0


def edit_scores(
    source: Sequence[BoxedText], output: Sequence[BoxedText], source_text: str, target_text: str
) -> EditScores:
    """The measures of one image, from the boxes of the source and of the output; all 0 where the source text is not
    found in the source, or nothing in the output."""
    # As published. The line of the source that is most like the source text was to be edited: boxes of the output in
    # its place are the new text, and what is left of both images is compared as background.
    before, target = _normal(source_text), _normal(target_text)
    lines = _lines(source)
    likeness = [1.0 if before in _of(line) else _similarity(before, _of(line)) for line in lines]
    edited = max(range(len(lines)), key=lambda i: likeness[i], default=None)
    if edited is None or likeness[edited] < 0.5 or not output:
        return EditScores()
    region = _union(lines[edited])
    inside = [one for one in output if _iou(one.box, region) > 0.5 or _holds(region, one.box)]
    outside = [one for one in output if one not in inside]
    accuracy = max(
        (_similarity(target, _of(part)) for part in [*([one] for one in inside), *_lines(inside)]), default=0.0
    )
    whole = _of(output)
    if before in whole and target not in whole:
        accuracy *= _LEFT_BEHIND
    background = _lines([one for i, line in enumerate(lines) if i != edited for one in line])
    found = _lines(outside)
    return EditScores(
        accuracy, *_rates(accuracy, _kept(background, found), len(found)), _ned_in_place(source, output, before, target)
    )


def _rates(accuracy: float, kept: Sequence[float], found: int) -> tuple[float, float, float]:
    """Precision, recall and F1 from the similarities of the asked background lines, and the number of found ones."""
    share = (1 - _TARGET_WEIGHT) / len(kept) if kept else 0.0
    hits = accuracy * _TARGET_WEIGHT + sum(kept) * share
    recall = hits / (_TARGET_WEIGHT + len(kept) * share)
    precision = hits / (_TARGET_WEIGHT + found * share)
    return precision, recall, 2 * precision * recall / (precision + recall) if precision + recall > 0 else 0.0


def _kept(asked: Sequence[Sequence[BoxedText]], found: Sequence[Sequence[BoxedText]]) -> list[float]:
    """Similarity of each asked line to the best found line that is still unused, in order; ties go to the first."""
    used, kept = set[int](), list[float]()
    for line in asked:
        likeness = {j: _similarity(_of(line), _of(other)) for j, other in enumerate(found) if j not in used}
        best = max(likeness, key=lambda j: likeness[j], default=None)
        kept.append(0.0 if best is None else likeness[best])
        if best is not None and likeness[best] > 0:
            used.add(best)
    return kept


def _ned_in_place(source: Sequence[BoxedText], output: Sequence[BoxedText], before: str, target: str) -> float:
    """Similarity of the target to what is read where the source text stood."""
    likeness = [_similarity(before, _normal(one.text)) for one in source]
    place = max(range(len(source)), key=lambda i: likeness[i])
    if likeness[place] <= 0.6:
        return 0.0
    there = [one for one in output if _iou(one.box, source[place].box) > 0.3]
    if not there:
        return 0.0
    read = _of(sorted(there, key=lambda one: one.box[0]))
    stays = _similarity(before, read) > 0.9 and _similarity(before, target) < 0.5
    return _similarity(target, read) * (_LEFT_BEHIND if stays else 1.0)


def _normal(text: str) -> str:
    return "".join(c for c in unicodedata.normalize("NFKC", text).lower() if c.isalnum())


def _of(boxes: Sequence[BoxedText]) -> str:
    return _normal("".join(one.text for one in boxes))


def _similarity(a: str, b: str) -> float:
    return 1 - edit_distance(a, b) / (max(len(a), len(b)) + _SLACK)


def _lines(boxes: Sequence[BoxedText]) -> list[list[BoxedText]]:
    """Boxes whose vertical centre is near that of the one before, from top to bottom, each line from left to right."""
    lines: list[list[BoxedText]] = []
    for one in sorted(boxes, key=_middle):
        if lines and abs(_middle(one) - _middle(lines[-1][-1])) < _SAME_LINE:
            lines[-1].append(one)
        else:
            lines.append([one])
    return [sorted(line, key=lambda one: one.box[0]) for line in lines]


def _middle(one: BoxedText) -> float:
    return (one.box[1] + one.box[3]) / 2


def _union(boxes: Sequence[BoxedText]) -> Bounds:
    lefts, tops, rights, bottoms = zip(*(one.box for one in boxes), strict=True)
    return min(lefts), min(tops), max(rights), max(bottoms)


def _holds(region: Bounds, box: Bounds) -> bool:
    x, y = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
    return region[0] <= x <= region[2] and region[1] <= y <= region[3]


def _iou(a: Bounds, b: Bounds) -> float:
    common = max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - common
    return common / union if union > 0 else 0.0


class TextEditReward(ReadingEntry):
    """TextEdit's F1 of a replaced text, in [0, 1]: the target stands where the source text stood, and the other lines
    stay. An item needs its source image, `metadata.source_text` and the target text."""

    images: ClassVar[frozenset[str]] = frozenset({"source"})

    scorer: Literal["textedit"] = "textedit"

    def make(self) -> TextEditScorer:
        return TextEditScorer(self)


class TextEditScorer(ReadingScorer[TextEditReward]):
    """Reads the source and the output of each item."""

    def _one(self, item: RewardItem) -> Outcome:
        target, before = text_to_read(item), item.metadata.get("source_text")
        if isinstance(target, Failure):
            return target
        if not isinstance(before, str) or not _normal(before):
            return Failure("bad_item", f"metadata.source_text is {before!r}; set it to the text that is replaced")
        if item.source is None:
            return Failure("bad_item", "no source image")
        source, output = (
            [BoxedText(line.text, line.bounds) for line in lines]
            for lines in self.find_lines([item.source, of_size(item.image, item.source, Image.Resampling.LANCZOS)])
        )
        scores = edit_scores(source, output, before, target)
        detail: dict[str, Any] = {"text": BETWEEN_LINES.join(one.text for one in output), **asdict(scores)}
        detail |= {"source_boxes": _listed(source), "output_boxes": _listed(output)}
        return Score(scores.f1, detail)


def _listed(boxes: Sequence[BoxedText]) -> list[dict[str, Any]]:
    return [{"text": one.text, "box": list(one.box)} for one in boxes]
