"""Rewards that stand in for a reader and an encoder: they answer by brightness and count what they are given."""

from __future__ import annotations

from collections.abc import Sequence

from retouch.rewards.protocol import RewardItem
from retouch.types import Outcome, Score

SEEN: list[str] = []
"""Prompt of every image that `read` got."""


def read(items: Sequence[RewardItem]) -> list[Outcome]:
    """Brightness as NED."""
    SEEN.extend(item.prompt for item in items)
    return [_score(item) for item in items]


def style(items: Sequence[RewardItem]) -> list[Outcome]:
    """Redness."""
    assert all(item.reference is not None for item in items)
    return [Score(float(item.image[..., 0].mean()) / 255) for item in items]


def _score(item: RewardItem) -> Outcome:
    value = float(item.image.mean()) / 255
    return Score(value, {"ned": value, "exact": value > 0.5})


def judged(items: Sequence[RewardItem]) -> list[Outcome]:
    """Brightness as the three scores of Complex-Edit."""
    names = ("instruction_following", "identity_preservation", "perceptual_quality")
    return [Score(0.0, dict.fromkeys(names, float(item.image.mean()) / 255)) for item in items]
