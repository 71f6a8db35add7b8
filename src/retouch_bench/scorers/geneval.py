"""GenEval (arXiv 2310.11513): whether a detector finds the objects that a prompt names, in number, colour and place.

The verdict is a pure function of detections. The detections come from a Mask2Former and a CLIP of transformers in this
process, or with `detector_url` from another server, like the published detector of mmdet 2.x in its own environment
(`examples/geneval_detector.py`). They are different detectors, and so are their numbers.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from PIL import Image
from pydantic import model_validator

from retouch.config.base import Names, Positive, Text
from retouch.config.reads import ReadIf
from retouch.errors import ConfigError, RewardOutage
from retouch.files import plain_json
from retouch.rewards.addresses import base_url, is_local
from retouch.rewards.base import PackageScorer, RewardEntry
from retouch.rewards.foreign import BrokenReply, deadline_of, fetch, one_line
from retouch.rewards.protocol import Pixels, RewardItem
from retouch.rewards.scorers.judge_replies import problem_of
from retouch.types import Failure, Outcome, Score
from retouch_bench.scorers.geneval_verdict import (
    CLASSES,
    COLORS,
    COUNTING_THRESHOLD,
    MOST_OBJECTS,
    THRESHOLD,
    Box,
    Clause,
    Detection,
    counted,
    read_clauses,
    soft_value,
    verdict,
)

if TYPE_CHECKING:
    from retouch_bench.scorers.geneval_networks import Networks


OWN_NETWORKS = ReadIf(
    "without `detector_url`",
    lambda own: own.detector_url is None,
    "but the server of detector_url has networks of its own; leave {name} out",
    warns=True,
)
SERVED = ReadIf(
    "with `detector_url`", lambda own: own.detector_url, "but detector_url is not set; leave timeout_s out", warns=True
)


class GenEvalReward(RewardEntry):
    """GenEval (arXiv 2310.11513): 1 if a detector finds what the prompt names, in number, colour and place, and 0 if
    not; or the partial credit of Flow-GRPO. Needs `metadata.tag` and `metadata.include`. The networks of this process
    are not the published detector: their numbers are not GenEval's published ones."""

    value_range = (-14.0, 1.0)  # "soft" with 16 objects in place of one
    licence = "MIT"
    unscored = frozenset({"detector_url"})  # its server names the detector

    scorer: Literal["geneval"] = "geneval"
    value: Literal["strict", "soft"] = "strict"
    """"strict" is GenEval's verdict, 0 or 1. "soft" is Flow-GRPO's mean over the clauses of the prompt: partial credit
    for a wrong count, and for a right count with a wrong colour or place; it wants the exact count."""
    detector: Annotated[Text, OWN_NETWORKS] = "facebook/mask2former-swin-small-coco-instance"
    """Hub id or folder of a Mask2Former of transformers with the 80 classes of COCO."""
    color_model: Annotated[Text, OWN_NETWORKS] = "openai/clip-vit-large-patch14"
    """Hub id or folder of the CLIP that names the colour of an object."""
    detector_url: Annotated[Text | None, Names("host")] = None
    """Address of a server that detects objects and colours in place of the two networks, like the published detector
    in its own container; null: none."""
    timeout_s: Annotated[Positive, SERVED] = 60.0
    """Deadline of one request to `detector_url` in seconds."""

    @property
    def cpu_only(self) -> str | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        return "the server of detector_url keeps its own devices; leave device out" if self.detector_url else None

    @model_validator(mode="after")
    def _has_one_detector(self) -> GenEvalReward:
        if self.detector_url is not None:
            try:
                base_url(self.detector_url)
            except ValueError as error:
                raise ValueError(f"detector_url: {error}") from None
        return self

    def models(self) -> dict[str, str]:
        return {} if self.detector_url else {"detector": self.detector, "color_model": self.color_model}

    def make(self) -> GenEvalScorer:
        return GenEvalScorer(self)


class GenEvalScorer(PackageScorer[GenEvalReward]):
    """1 or 0, or the soft value; its detail has both, what is wrong, and the detections."""

    def __init__(self, options: GenEvalReward) -> None:
        self._networks: Networks | None = None
        super().__init__(options)
        self._name_detector(f"at {options.detector_url}" if options.detector_url else options.detector)

    def load(self, device: str) -> None:
        """Load the networks, or ask the detection server a first time.

        Raises:
            ConfigError: transformers is missing, no such models, or no detection server.
            RewardOutage: the detection server does not answer at the moment.
        """
        o = self.options
        if o.detector_url is not None:
            try:
                self._served(Image.new("RGB", (64, 64), "#999"), THRESHOLD, {"bench": 1})
            except (_Unreachable, ValueError) as error:
                kind = RewardOutage if isinstance(error, _Unreachable) else ConfigError
                raise kind(
                    f"reward 'geneval': detector_url: {error}; start the server (examples/geneval_detector.py), or "
                    "leave detector_url out"
                ) from None
            return
        from retouch_bench.scorers.geneval_networks import Networks

        self._networks = Networks(o.detector, o.color_model, device)
        self._name_detector(self._networks.revision)

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

    def _name_detector(self, name: str) -> None:
        self._name = name
        self.set_revision(f"{self.options.value} {name}")

    def _detect(self, pixels: Pixels, threshold: float, clauses: Sequence[Clause]) -> dict[str, list[Detection]]:
        """The objects that count, with the colours that clauses name."""
        image = Image.fromarray(pixels)
        colored = [clause for clause in clauses if clause.color is not None]
        wanted = {one.label: max(other.count for other in colored if other.label == one.label) for one in colored}
        if self.options.detector_url is not None:
            return counted(self._served(image, threshold, wanted), threshold)
        assert self._networks is not None
        masks = self._networks.detect(image)
        objects = counted([one for one, _ in masks], threshold)
        for label, count in wanted.items():
            chosen = objects.get(label, [])[:count]
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
            with httpx.Client(trust_env=not is_local(address)) as client:
                reply = fetch(client, "POST", f"{address}/detect", deadline_of(self.options.timeout_s), body)
        except BrokenReply as error:
            raise ValueError(f"{address}: {error}") from None
        except (httpx.RequestError, TimeoutError) as error:
            raise _Unreachable(one_line(f"{address}: {type(error).__name__} {error}")) from None
        if reply.status != 200:
            message = one_line(f"{address}: HTTP {reply.status}: {reply.start()}")
            raise _Unreachable(message) if problem_of(reply).kind == "away" else ValueError(message)
        try:
            detector, found = read_detections(reply.body)
        except ValueError as error:
            problem = f"{address}: not a list of detections ({error}): {reply.start()}"
            raise ValueError(one_line(problem)) from None
        self._name_detector(one_line(detector, most=_MOST_NAME))
        return found


_MOST_NAME = 200  # characters of the name of a detector


class _Unreachable(Exception):
    """The detection server gave no answer."""


def read_detections(body: bytes) -> tuple[str, list[Detection]]:
    """Name of the detector and its detections, from a reply of the detection server.

    Raises:
        ValueError: not of the protocol.
    """
    try:
        reply = plain_json.loads(body)
        return str(reply["detector"]), [_detection(given) for given in reply["objects"]]
    except (KeyError, TypeError, AttributeError, OverflowError, ValueError) as error:
        raise ValueError(f"{type(error).__name__} {str(error)[:200]}") from None


def _detection(given: Mapping[str, Any]) -> Detection:
    box = [float(side) for side in given["box"]]
    color, label = given.get("color"), given["class"]
    if len(box) != 4 or not all(map(math.isfinite, [*box, float(given["score"])])):
        raise ValueError(f"box {given['box']!r}, score {given['score']!r}")
    if label not in CLASSES or (color is not None and color not in COLORS):
        raise ValueError(f"class {label!r}, color {color!r}")
    return Detection(label, float(given["score"]), cast("Box", tuple(box)), color)
