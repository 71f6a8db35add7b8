"""Requests and replies of `POST /score` as typed messages.

A request names rewards and items; the reply gives every item, by id, a score or a typed error for every reward. NaN and
infinity are forbidden, and a failure is never a number.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

PROTOCOL_VERSION = 1

MAX_ITEMS = 4096
"""Maximum number of items of a request at any server; more are rejected before they are parsed."""

MAX_REWARDS = 64
"""Maximum number of reward names of a request: each has an outcome for each item."""


MOST_DEADLINE_MS = 24 * 3600 * 1000
"""Longest deadline of a request; a client that waits longer names this one."""


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, cache_strings="keys")


ItemId = int | Annotated[str, Field(min_length=1)]
"""Returned as it was given."""


RewardName = Annotated[str, Field(max_length=200)]


class WireItem(Message):
    """An item of a request. Images are base64 (JSON) or the names of binary parts (multipart)."""

    id: ItemId
    prompt: str
    image: str
    mask: str | None = None
    source: str | None = None
    reference: str | None = None
    group: int | None = None
    metadata: dict[str, Any] = {}

    @field_validator("metadata", mode="before")
    @classmethod
    def _null_is_none(cls, metadata: object) -> object:
        return {} if metadata is None else metadata


class ScoreRequest(Message):
    protocol: int
    request_id: Annotated[str, Field(min_length=1, max_length=200)]
    deadline_ms: Annotated[int, Field(gt=0, le=MOST_DEADLINE_MS)]
    """Time the client waits, from when the server receives the request; later work is dropped."""
    rewards: Annotated[list[RewardName], Field(min_length=1, max_length=MAX_REWARDS)]
    items: Annotated[list[WireItem], Field(min_length=1, max_length=MAX_ITEMS)]

    @field_validator("protocol")
    @classmethod
    def _is_ours(cls, protocol: int) -> int:
        if protocol != PROTOCOL_VERSION:
            raise ValueError(f"given {protocol}; this server speaks protocol {PROTOCOL_VERSION}")
        return protocol

    @field_validator("rewards")
    @classmethod
    def _rewards_differ(cls, rewards: list[str]) -> list[str]:
        if len(set(rewards)) != len(rewards):
            raise ValueError("a reward is named twice; names of a request must differ")
        return rewards

    @field_validator("items")
    @classmethod
    def _ids_differ(cls, items: list[WireItem]) -> list[WireItem]:
        if len({item.id for item in items}) != len(items):
            raise ValueError("two items have the same id; ids of a request must differ")
        return items


class WireScore(Message):
    value: Annotated[float, Field(allow_inf_nan=False)]
    detail: dict[str, Any] = {}


class WireError(Message):
    code: str
    message: str
    retryable: bool = False


class WireOutcome(Message):
    id: ItemId
    scores: dict[str, WireScore] = {}
    errors: dict[str, WireError] = {}


class WireScorer(Message):
    revision: str


class ScoreReply(Message):
    items: list[WireOutcome]
    scorers: dict[str, WireScorer]
