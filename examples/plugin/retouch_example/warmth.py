"""A reward: how warm the colours of an image are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from retouch.rewards.base import PackageScorer, RewardEntry
from retouch.rewards.protocol import RewardItem
from retouch.types import Outcome, Score


class WarmthReward(RewardEntry):
    """Mean red less mean blue of the image, in [-1, 1]."""

    value_range = (-1.0, 1.0)

    scorer: Literal["warmth"] = "warmth"
    region: Literal["image", "mask"] = "image"
    """"mask" looks at the repainted region only."""

    def required_images(self) -> frozenset[str]:
        return frozenset({"mask"} if self.region == "mask" else ())

    def make(self) -> WarmthScorer:
        return WarmthScorer(self)


class WarmthScorer(PackageScorer[WarmthReward]):
    """Needs no network; one with weights loads them in `load(device)`."""

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        return [Score(self._warmth(item)) for item in items]

    def _warmth(self, item: RewardItem) -> float:
        pixels = item.image.reshape(-1, 3)
        if self.options.region == "mask":
            assert item.mask is not None  # an item without a required image is a failure before it comes here
            pixels = item.image[np.asarray(item.mask) >= 128]
        red, _, blue = pixels.mean(0) / 255
        return float(red - blue)
