"""The plain body of `POST /score`: one image as JSON, without ids and versions, and one combined score.

    {"image": base64, "prompt": text, "text": text, "mask": base64, "vlm_weight": 0.6, "ocr_weight": 0.4}
    -> {"vlm_score": 0.8, "ocr_confidence": 0.99, "combined_score": 0.876, "errors": {}, ...}

`NAME_weight` adds any other reward of the server, whose value is `NAME_score`. A failed reward is null, with an error,
and then the combined score is null too: it is never computed from the others alone.
"""

from __future__ import annotations

import math
import re
import uuid
from collections.abc import Collection, Mapping
from typing import Annotated, Any, cast

from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator

from retouch.files import plain_json
from retouch.rewards.messages import (
    MOST_DEADLINE_MS,
    PROTOCOL_VERSION,
    Message,
    ScoreReply,
    ScoreRequest,
    WireError,
    WireItem,
    WireScorer,
)
from retouch.rewards.protocol import PICTURES

DEFAULT_WEIGHTS = {"vlm": 0.6, "ocr": 0.4}
"""Weights of rewards that the body does not name."""

_JUDGE = "openai_judge"
"""Reward that answers for `vlm` on a server without it."""

_DEADLINE_MS = 60_000
_WEIGHT = "_weight"
_DATA_URL = re.compile(r"data:[\w/+.=;-]{0,100},")

Weight = Annotated[float, Field(ge=-1000, le=1000, allow_inf_nan=False)]


class PlainRequest(Message):
    """A body with one image; keys that end in `_weight` are in `weights`."""

    prompt: str
    image: str
    text: str | None = None
    mask: str | None = None
    source: str | None = None
    reference: str | None = None
    metadata: dict[str, Any] = Field(default={})
    deadline_ms: Annotated[int, Field(gt=0, le=MOST_DEADLINE_MS)] = _DEADLINE_MS
    request_id: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    weights: dict[Annotated[str, Field(min_length=1, max_length=200)], Weight] = Field(default={})

    @model_validator(mode="before")
    @classmethod
    def _gather_weights(cls, value: object) -> object:
        body = cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}
        if "weights" in body:
            raise ValueError("weights: write them as NAME_weight, like ocr_weight")
        given = {key.removesuffix(_WEIGHT): number for key, number in body.items() if key.endswith(_WEIGHT)}
        rest = {key: one for key, one in body.items() if not key.endswith(_WEIGHT)}
        return {**rest, "weights": {**DEFAULT_WEIGHTS, **given}} if body else value

    @field_validator("weights")
    @classmethod
    def _weigh_something(cls, weights: dict[str, float]) -> dict[str, float]:
        if "combined" in weights:
            raise ValueError("combined_weight: the combined score is no reward; leave it out")
        if not any(weights.values()):
            raise ValueError("every weight is 0; set one, like ocr_weight, to another value")
        return weights

    @field_validator(*PICTURES)
    @classmethod
    def _is_base64(cls, image: str | None) -> str | None:
        """The image without the head of a data URL, which browsers write."""
        return image if image is None else _DATA_URL.sub("", image, count=1)

    def names(self, served: Collection[str]) -> dict[str, str]:
        """Reward of the body -> reward of the server: those that count, and those of weight 0 that are served."""
        known = {
            name: _JUDGE if name == "vlm" and name not in served and _JUDGE in served else name for name in self.weights
        }
        return {name: of for name, of in known.items() if self.weights[name] or of in served}

    def request(self, served: Collection[str]) -> ScoreRequest:
        """The same as a request of the protocol, with one item."""
        text = {} if self.text is None else {"text": self.text}
        images = {name: getattr(self, name) for name in PICTURES}
        return ScoreRequest(
            protocol=PROTOCOL_VERSION,
            request_id=self.request_id or uuid.uuid4().hex,
            deadline_ms=self.deadline_ms,
            rewards=list(dict.fromkeys(self.names(served).values())),
            items=[WireItem(id=0, prompt=self.prompt, metadata={**self.metadata, **text}, **images)],
        )

    def reply(self, reply: ScoreReply, served: Collection[str]) -> PlainReply:
        """The reply to `request` in the plain layout."""
        (item,) = reply.items
        names = self.names(served)
        values = {name: _value(name, item.scores[of]) for name, of in names.items() if of in item.scores}
        counted = [name for name, weight in self.weights.items() if weight]
        whole = all(name in values for name in counted)
        total = sum(self.weights[name] * values.get(name, 0.0) for name in counted)
        scores = {_key(name): values.get(name) for name in {**DEFAULT_WEIGHTS, **self.weights}}
        return PlainReply(
            **scores,
            combined_score=total if whole and math.isfinite(total) else None,
            weights={name: self.weights[name] for name in names},
            errors={name: item.errors[of] for name, of in names.items() if of in item.errors},
            scorers=reply.scorers,
        )


Value = Annotated[float, Field(allow_inf_nan=False)] | None


class PlainReply(Message):
    """The reply to a plain body; `NAME_score` of other rewards are further keys."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Value] = Field(init=False)

    vlm_score: Value
    ocr_confidence: Value
    combined_score: Value
    """The weighted sum; null if a reward that counts failed."""
    weights: dict[str, float]
    errors: dict[str, WireError]
    scorers: dict[str, WireScorer]


def _key(name: str) -> str:
    return "ocr_confidence" if name == "ocr" else f"{name}_score"


def _value(name: str, score: Any) -> float:
    """The value of a reward; of `ocr`, whose value may be a similarity, the confidence of the recogniser."""
    confidence = score.detail.get("confidence") if name == "ocr" else None
    return float(confidence) if isinstance(confidence, int | float) else score.value


def read_body(body: bytes, served: Collection[str]) -> tuple[ScoreRequest, PlainRequest | None]:
    """The request of a JSON body, and the plain body if it is one.

    Raises:
        ValueError: neither of the two.
    """
    try:
        return ScoreRequest.model_validate_json(body), None
    except ValidationError as error:
        if not _is_plain(body):
            raise error from None
    plain = PlainRequest.model_validate_json(body)
    return plain.request(served), plain


def _is_plain(body: bytes) -> bool:
    """Whether a body that is no request has an image, and no items."""
    found = plain_json.table_of(body)
    return "image" in found and not {"items", "protocol", "rewards"} & found.keys()
