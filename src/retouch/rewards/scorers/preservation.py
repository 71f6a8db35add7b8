"""How well the picture outside the mask was kept."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from retouch.imaging import MASK_THRESHOLD
from retouch.rewards.protocol import RewardItem, ScorerSpec
from retouch.types import Failure, Outcome, Score


class PreservationScorer:
    """1 - mean |image - source| / 255 over the pixels outside the mask, in [0, 1].

    Meant for the raw generation: after paste-back it is 1 by construction.
    """

    def __init__(self) -> None:
        self.spec = ScorerSpec("preservation", (0.0, 1.0), frozenset({"mask", "source"}), "1", "Apache-2.0")

    def load(self, device: str) -> None:
        """Nothing to load."""

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        return [self._one(item) for item in items]

    def _one(self, item: RewardItem) -> Outcome:
        assert item.mask is not None and item.source is not None  # spec.needs
        if item.image.shape != item.source.shape or item.image.shape[:2] != item.mask.shape:
            shapes = f"image {item.image.shape}, source {item.source.shape}, mask {item.mask.shape}"
            return Failure("bad_item", f"image, source and mask must have one size; given {shapes}")
        outside = item.mask < MASK_THRESHOLD
        if not outside.any():
            return Failure("bad_item", "the mask is full: there is no outside to preserve")
        drift = float(np.abs(item.image.astype(np.float32) - item.source.astype(np.float32))[outside].mean() / 255)
        return Score(1.0 - drift, {"outside_l1": drift})
