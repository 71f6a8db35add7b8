"""GenEval's verdict (arXiv 2310.11513) on the objects that a detector found: pure functions. No torch.

Legend: a box is (left, top, right, bottom) in pixels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from retouch.errors import shown

COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")

CLASSES = (
    "person", "bicycle", "car", "motorcycle", "airplane", "bus", "train", "truck", "boat", "traffic light",
    "fire hydrant", "stop sign", "parking meter", "bench", "bird", "cat", "dog", "horse", "sheep", "cow", "elephant",
    "bear", "zebra", "giraffe", "backpack", "umbrella", "handbag", "tie", "suitcase", "frisbee", "skis", "snowboard",
    "sports ball", "kite", "baseball bat", "baseball glove", "skateboard", "surfboard", "tennis racket", "bottle",
    "wine glass", "cup", "fork", "knife", "spoon", "bowl", "banana", "apple", "sandwich", "orange", "broccoli",
    "carrot", "hot dog", "pizza", "donut", "cake", "chair", "couch", "potted plant", "bed", "dining table", "toilet",
    "tv", "laptop", "computer mouse", "tv remote", "computer keyboard", "cell phone", "microwave", "oven", "toaster",
    "sink", "refrigerator", "book", "clock", "vase", "scissors", "teddy bear", "hair drier", "toothbrush",
)  # fmt: skip
"""GenEval's names of the 80 classes of COCO, in COCO's order."""

TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")

THRESHOLD, COUNTING_THRESHOLD = 0.3, 0.9
"""A detection counts above this score; the second is that of prompts with the tag counting."""

MOST_OBJECTS = 16
"""Detections of a class that count, best first."""

_MOST_CLAUSES = 100

_SHIFT = 0.1
"""Fraction of both objects' sizes by which their centres may differ without a relation."""

_RELATIONS = ("left of", "right of", "above", "below")

Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Detection:
    """One detected object; its colour is None until it is needed."""

    label: str
    score: float
    box: Box
    color: str | None = None


@dataclass(frozen=True)
class Clause:
    """A requirement: `count` objects of a class, of a colour, in a relation to those of an earlier clause."""

    label: str
    count: int
    color: str | None = None
    position: tuple[str, int] | None = None


def read_clauses(metadata: Mapping[str, Any]) -> tuple[list[Clause], list[Clause]]:
    """`include` and `exclude` of a prompt.

    Raises:
        ValueError: no tag, or a clause that is not of the benchmark.
    """
    if metadata.get("tag") not in TAGS:
        raise ValueError(f"tag must be one of {', '.join(TAGS)}; given {shown(metadata.get('tag'))}")
    lists = [cast("list[Any]", metadata.get(name) or []) for name in ("include", "exclude")]
    for name, given in zip(("include", "exclude"), lists, strict=True):
        if not isinstance(given, list | tuple) or len(given) > _MOST_CLAUSES:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"{name} must be a list of at most {_MOST_CLAUSES} objects; given {shown(given)}")
    include = [_clause(given, i) for i, given in enumerate(lists[0])]
    if not include:
        raise ValueError("include must name at least one object")
    return include, [_clause(given, 0) for given in lists[1]]


def _clause(given: Any, number: int) -> Clause:
    fields = cast("Mapping[str, Any]", given) if isinstance(given, Mapping) else {}
    label, count, color, position = (fields.get(name) for name in ("class", "count", "color", "position"))
    if label not in CLASSES or isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"include: clause {number} needs a class of COCO and a count; given {shown(given)}")
    if color is not None and color not in COLORS:
        raise ValueError(f"include: clause {number}: color must be one of {', '.join(COLORS)}; given {shown(color)}")
    if position is None:
        return Clause(label, count, color)
    relation, target = (*position, None, None)[:2] if isinstance(position, list | tuple) else (None, None)
    if relation not in _RELATIONS or not isinstance(target, int) or not 0 <= target < number:
        raise ValueError(
            f"include: clause {number}: position must be one of {', '.join(_RELATIONS)} and the number of an earlier "
            f"clause; given {shown(position)}"
        )
    return Clause(label, count, color, (relation, target))


def counted(found: Sequence[Detection], threshold: float) -> dict[str, list[Detection]]:
    """The detections above the threshold by class, best first, at most `MOST_OBJECTS` of each; overlapping ones count
    all. Equal scores: the later one comes first, as in a reversed stable sort."""
    objects: dict[str, list[Detection]] = {}
    for _, one in sorted(enumerate(found), key=lambda pair: (pair[1].score, pair[0]), reverse=True):
        group = objects.setdefault(one.label, [])
        if one.score > threshold and len(group) < MOST_OBJECTS:
            group.append(one)
    return {label: group for label, group in objects.items() if group}


def verdict(
    objects: Mapping[str, Sequence[Detection]], include: Sequence[Clause], exclude: Sequence[Clause]
) -> list[str]:
    """The problems of an image; empty if it is right.

    Of each class only the best `count` objects are looked at; all of them must have the colour, and each the relation
    to each object of the earlier clause, which must be right itself.
    """
    problems: list[str] = []
    matched: list[Sequence[Detection] | None] = []
    for clause in include:
        found = objects.get(clause.label, ())[: clause.count]
        wrong: list[str] = []
        if len(found) < clause.count:
            wrong.append(f"{clause.label}: {len(found)} of {clause.count} found")
        else:
            colored = sum(one.color == clause.color for one in found)
            if clause.color is not None and colored < clause.count:
                wrong.append(f"{clause.label}: {colored} of {clause.count} are {clause.color}")
            if clause.position is not None and not wrong:
                wrong += _misplaced(clause.label, clause.position, found, matched)
        problems += wrong
        matched.append(None if wrong else found)
    for clause in exclude:
        if len(objects.get(clause.label, ())) >= clause.count:
            problems.append(f"{clause.label}: {len(objects[clause.label])} found, at most {clause.count - 1} allowed")
    return problems


def _misplaced(
    label: str,
    position: tuple[str, int],
    found: Sequence[Detection],
    matched: Sequence[Sequence[Detection] | None],
) -> list[str]:
    relation, number = position
    targets = matched[number]
    if targets is None:
        return [f"{label}: there is nothing to be {relation}"]
    for one in found:
        for target in targets:
            true = relations(one.box, target.box)
            if relation not in true:
                return [f"{label}: {' and '.join(sorted(true)) or 'in no relation'} instead of {relation}"]
    return []


def soft_value(objects: Mapping[str, Sequence[Detection]], include: Sequence[Clause]) -> float:
    """Flow-GRPO's reward: the mean over 1 - |n - n'| / n of each clause and the credit for its colour and place, which
    is 0 unless the count is exact. With 16 or more objects it can be negative.

    As published, a clause whose objects are not all in place still gets a 1 behind its 0, unless the earlier clause is
    wrong; `exclude` is not read.
    """
    credits: list[float] = []
    matched: list[Sequence[Detection] | None] = []
    for clause in include:
        found = objects.get(clause.label, ())
        right = len(found) == clause.count
        credits.append(1 - abs(clause.count - len(found)) / clause.count)
        if not right and (clause.color is not None or clause.position is not None):
            credits.append(0.0)
        if right and clause.color is not None:
            colored = sum(one.color == clause.color for one in found)
            credits.append(1 - abs(clause.count - colored) / clause.count)
            right = colored == clause.count
        if right and clause.position is not None:
            right = not _misplaced(clause.label, clause.position, found, matched)
            credits += ([] if right else [0.0]) + ([1.0] if matched[clause.position[1]] is not None else [])
        matched.append(found if right else None)
    return sum(credits) / len(credits)


def relations(a: Box, b: Box) -> set[str]:
    """Relations of box a to box b: the offset of the centres, reduced by a tenth of both sizes on each axis, over its
    length; more than half of it on an axis names the relation."""
    offset = [(a[i] + a[i + 2]) / 2 - (b[i] + b[i + 2]) / 2 for i in (0, 1)]
    sizes = [abs(a[i + 2] - a[i]) + abs(b[i + 2] - b[i]) for i in (0, 1)]
    reduced = [math.copysign(max(abs(o) - _SHIFT * s, 0.0), o) for o, s in zip(offset, sizes, strict=True)]
    if all(abs(side) < 1e-3 for side in reduced):
        return set()
    dx, dy = (side / math.hypot(*offset) for side in reduced)
    named = {"left of": dx < -0.5, "right of": dx > 0.5, "above": dy < -0.5, "below": dy > 0.5}
    return {name for name, holds in named.items() if holds}
