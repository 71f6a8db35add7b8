"""How well the unmasked region was kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from retouch.imaging import MASK_THRESHOLD
from retouch.rewards.base import NO_NETWORK, PackageScorer, RewardEntry
from retouch.rewards.protocol import RewardItem
from retouch.types import Failure, Outcome, Score


class PreservationReward(RewardEntry):
    """1 - mean |difference| to the source in the unmasked region, in [0, 1]; meant for the raw sample."""

    images = frozenset({"mask", "source"})
    cpu_only = NO_NETWORK

    scorer: Literal["preservation"] = "preservation"
    paste_back: bool = False
    """True scores the composite, which is 1 by construction."""

    def make(self) -> PreservationScorer:
        return PreservationScorer(self)


class PreservationScorer(PackageScorer[PreservationReward]):
    """1 - mean |image - source| / 255 over the unmasked pixels."""

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        return [self._one(item) for item in items]

    def _one(self, item: RewardItem) -> Outcome:
        difference = unmasked_difference(item)
        if isinstance(difference, Failure):
            return difference
        drift = float(np.abs(difference).mean() / 255)
        return Score(1.0 - drift, {"outside_l1": drift})


def unmasked_difference(item: RewardItem) -> NDArray[np.float32] | Failure:
    """Image minus source [N, 3] of the N unmasked pixels, in [-255, 255]; a failure without such pixels."""
    assert item.mask is not None and item.source is not None  # spec.needs
    if item.image.shape != item.source.shape or item.image.shape[:2] != item.mask.shape:
        shapes = f"image {item.image.shape}, source {item.source.shape}, mask {item.mask.shape}"
        return Failure("bad_item", f"image, source and mask must have one size; given {shapes}")
    kept = item.mask < MASK_THRESHOLD
    if not kept.any():
        return Failure("bad_item", "the mask is full: there is no unmasked region to compare")
    return item.image[kept].astype(np.float32) - item.source[kept]
