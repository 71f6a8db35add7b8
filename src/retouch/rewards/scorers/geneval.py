"""GenEval (arXiv 2310.11513): whether a detector finds the objects that a prompt names, in number, colour and place.

The verdict is a pure function of detections. The detections come from a Mask2Former and a CLIP of transformers in this
process, or with `detector_url` from another server, like the published detector of mmdet 2.x in its own container
(`examples/geneval_mmdet`). They are different detectors: numbers of one must not be compared with those of the other.

Legend: a box is (left, top, right, bottom) in pixels.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast

from PIL import Image
from pydantic import model_validator

from retouch.config.base import Positive, Text
from retouch.errors import ConfigError
from retouch.rewards.addresses import base_url, is_local
from retouch.rewards.base import PackageScorer, RewardEntry
from retouch.rewards.protocol import Pixels, RewardItem
from retouch.types import Failure, Outcome, Score

if TYPE_CHECKING:
    from retouch.rewards.scorers.geneval_networks import Networks

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

_SHIFT = 0.1
"""Fraction of both objects' sizes by which their centres may differ without a relation."""

_RELATIONS = ("left of", "right of", "above", "below")

Box = tuple[float, float, float, float]


class GenEvalReward(RewardEntry):
    """GenEval (arXiv 2310.11513): 1 if a detector finds what the prompt names, in number, colour and place, and 0 if
    not; or the partial credit of Flow-GRPO. Needs `metadata.tag` and `metadata.include`. The networks of this process
    are not the published detector: their numbers are not GenEval's published ones."""

    value_range = (-14.0, 1.0)  # "soft" with 16 objects where one is asked for
    licence = "MIT"

    scorer: Literal["geneval"] = "geneval"
    value: Literal["strict", "soft"] = "strict"
    """"strict" is GenEval's verdict, 0 or 1. "soft" is Flow-GRPO's mean over the clauses of the prompt: partial credit
    for a wrong count, and for a right count with a wrong colour or place; it wants the exact count."""
    detector: Text = "facebook/mask2former-swin-small-coco-instance"
    """Hub id or folder of a Mask2Former of transformers with the 80 classes of COCO."""
    color_model: Text = "openai/clip-vit-large-patch14"
    """Hub id or folder of the CLIP that names the colour of an object."""
    detector_url: Text | None = None
    """Address of a server that detects objects and colours in place of the two networks, like the published detector
    in its own container; null: none."""
    timeout_s: Positive = 60.0
    """Deadline of one request to `detector_url` in seconds."""

    @model_validator(mode="after")
    def _has_one_detector(self) -> GenEvalReward:
        if self.detector_url is not None:
            try:
                base_url(self.detector_url)
            except ValueError as error:
                raise ValueError(f"detector_url: {error}") from None
            if self.device != "cpu":
                raise ValueError(
                    f"device: given {self.device!r} beside detector_url, whose server keeps its own devices; leave "
                    "device out"
                )
        return self

    def models(self) -> dict[str, str]:
        return {} if self.detector_url else {"detector": self.detector, "color_model": self.color_model}

    def make(self) -> GenEvalScorer:
        return GenEvalScorer(self)


@dataclass(frozen=True)
class Detection:
    """One detected object; its colour is None until it is needed."""

    label: str
    score: float
    box: Box
    color: str | None = None


@dataclass(frozen=True)
class Clause:
    """What must be there: `count` objects of a class, of a colour, in a relation to those of an earlier clause."""

    label: str
    count: int
    color: str | None = None
    position: tuple[str, int] | None = None


class GenEvalScorer(PackageScorer[GenEvalReward]):
    """1 or 0, or the soft value; its detail has both, what is wrong, and the detections."""

    def __init__(self, options: GenEvalReward) -> None:
        o = options
        self._networks: Networks | None = None
        super().__init__(o, o.value + " " + (f"at {o.detector_url}" if o.detector_url else f"{o.detector}"))

    def load(self, device: str) -> None:
        """Load the networks, or ask the detection server a first time.

        Raises:
            ConfigError: transformers is missing, no such models, or no detection server.
        """
        o = self.options
        if o.detector_url is not None:
            try:
                self._served(Image.new("RGB", (64, 64), "#999"), THRESHOLD, {"bench": 1})
            except (_Unreachable, ValueError) as error:
                raise ConfigError(
                    f"reward 'geneval': detector_url: {error}; start the server (examples/geneval_mmdet), or leave "
                    "detector_url out"
                ) from None
            return
        from retouch.rewards.scorers.geneval_networks import Networks

        self._networks = Networks(o.detector, o.color_model, device)
        self.set_revision(f"{o.value} {self._networks.revision}")

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        return [self._one(item) for item in items]

    def _one(self, item: RewardItem) -> Outcome:
        try:
            include, exclude = read_clauses(item.metadata)
        except ValueError as error:
            return Failure("bad_item", f"metadata.{error}")
        counting = item.metadata["tag"] == "counting"
        try:
            objects = self._detect(item.image, COUNTING_THRESHOLD if counting else THRESHOLD, include)
        except _Unreachable as error:
            return Failure("unavailable", str(error), retryable=True)
        except ValueError as error:
            return Failure("scorer_error", str(error))
        problems = verdict(objects, include, exclude)
        strict, soft = float(not problems), soft_value(objects, include)
        found = [asdict(one) for group in objects.values() for one in group]
        value = strict if self.options.value == "strict" else soft
        return Score(
            value, {"correct": strict, "soft": soft, "problems": problems, "detections": found, "detector": self._name}
        )

    @property
    def _name(self) -> str:
        return self.spec.revision.partition(" ")[2]

    def _detect(self, pixels: Pixels, threshold: float, clauses: Sequence[Clause]) -> dict[str, list[Detection]]:
        """What counts, with the colours that the clauses ask for."""
        image = Image.fromarray(pixels)
        wanted = {clause.label: clause.count for clause in clauses if clause.color is not None}
        if self.options.detector_url is not None:
            return counted(self._served(image, threshold, wanted), threshold)
        assert self._networks is not None
        masks = self._networks.detect(image)
        objects = counted([one for one, _ in masks], threshold)
        for label, count in wanted.items():
            chosen = objects.get(label, [])[:count] if len(objects.get(label, [])) >= count else []
            cutouts = [(one.box, next(mask for other, mask in masks if other is one)) for one in chosen]
            colors = self._networks.colors(image, label, cutouts) if chosen else []
            for i, color in enumerate(colors):
                objects[label][i] = replace(objects[label][i], color=color)
        return objects

    def _served(self, image: Image.Image, threshold: float, colors: Mapping[str, int]) -> list[Detection]:
        """The detections of the server.

        Raises:
            _Unreachable: no answer.
            ValueError: an answer that is not of the protocol.
        """
        import httpx

        address = base_url(str(self.options.detector_url))
        buffer = io.BytesIO()
        image.save(buffer, "PNG", compress_level=1)
        body = {
            "image": base64.b64encode(buffer.getvalue()).decode(),
            "threshold": threshold,
            "most": MOST_OBJECTS,
            "colors": dict(colors),
        }
        try:
            with httpx.Client(trust_env=not is_local(address), timeout=self.options.timeout_s) as client:
                response = client.post(f"{address}/detect", json=body)
        except httpx.RequestError as error:
            raise _Unreachable(f"{address}: {type(error).__name__} {error}") from None
        if response.status_code != 200:
            message = f"{address}: HTTP {response.status_code}: {response.text[:200]}"
            raise _Unreachable(message) if response.status_code >= 500 else ValueError(message)
        try:
            reply = response.json()
            self.set_revision(f"{self.options.value} {reply['detector']}")
            return [_detection(given) for given in reply["objects"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{address}: not a list of detections ({error}): {response.text[:200]}") from None


class _Unreachable(Exception):
    """The detection server gave no answer."""


def _detection(given: Mapping[str, Any]) -> Detection:
    box = [float(side) for side in given["box"]]
    color, label = given.get("color"), given["class"]
    if len(box) != 4 or not all(map(math.isfinite, [*box, float(given["score"])])):
        raise ValueError(f"box {given['box']!r}, score {given['score']!r}")
    if label not in CLASSES or (color is not None and color not in COLORS):
        raise ValueError(f"class {label!r}, color {color!r}")
    return Detection(label, float(given["score"]), cast("Box", tuple(box)), color)


# --- the verdict ---


def read_clauses(metadata: Mapping[str, Any]) -> tuple[list[Clause], list[Clause]]:
    """`include` and `exclude` of a prompt.

    Raises:
        ValueError: no tag, or a clause that is not of the benchmark.
    """
    if metadata.get("tag") not in TAGS:
        raise ValueError(f"tag must be one of {', '.join(TAGS)}; given {metadata.get('tag')!r}")
    include = [_clause(given, i) for i, given in enumerate(metadata.get("include") or ())]
    if not include:
        raise ValueError("include must name at least one object")
    return include, [_clause(given, 0) for given in metadata.get("exclude") or ()]


def _clause(given: Any, number: int) -> Clause:
    fields = cast("Mapping[str, Any]", given) if isinstance(given, Mapping) else {}
    label, count, color, position = (fields.get(name) for name in ("class", "count", "color", "position"))
    if label not in CLASSES or isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"include: clause {number} needs a class of COCO and a count; given {given!r}")
    if color is not None and color not in COLORS:
        raise ValueError(f"include: clause {number}: color must be one of {', '.join(COLORS)}; given {color!r}")
    if position is None:
        return Clause(label, count, color)
    relation, target = (*position, None, None)[:2] if isinstance(position, list | tuple) else (None, None)
    if relation not in _RELATIONS or not isinstance(target, int) or not 0 <= target < number:
        raise ValueError(
            f"include: clause {number}: position must be one of {', '.join(_RELATIONS)} and the number of an earlier "
            f"clause; given {position!r}"
        )
    return Clause(label, count, color, (relation, target))


def counted(found: Sequence[Detection], threshold: float) -> dict[str, list[Detection]]:
    """The detections above the threshold by class, best first, at most `MOST_OBJECTS` of each; overlapping ones count
    all. Of two with equal scores, the later one comes first, as in a reversed stable sort."""
    objects: dict[str, list[Detection]] = {}
    for _, one in sorted(enumerate(found), key=lambda pair: (pair[1].score, pair[0]), reverse=True):
        group = objects.setdefault(one.label, [])
        if one.score > threshold and len(group) < MOST_OBJECTS:
            group.append(one)
    return {label: group for label, group in objects.items() if group}


def verdict(
    objects: Mapping[str, Sequence[Detection]], include: Sequence[Clause], exclude: Sequence[Clause]
) -> list[str]:
    """What an image lacks; empty if it is right.

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
