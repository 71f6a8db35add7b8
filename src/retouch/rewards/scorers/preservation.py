"""How well the unmasked region was kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from retouch.imaging.masks import MASK_THRESHOLD
from retouch.rewards.base import NO_NETWORK, PixelScorer, RewardEntry
from retouch.rewards.protocol import RewardItem
from retouch.types import Failure, Outcome, Score

if TYPE_CHECKING:
    from torch import Tensor


class PreservationReward(RewardEntry):
    """1 - mean |difference| to the source in the unmasked region, in [0, 1]; meant for the raw sample."""

    images = frozenset({"mask", "source"})
    differentiable = True
    cpu_only = NO_NETWORK

    scorer: Literal["preservation"] = "preservation"
    paste_back: bool = False
    """True scores the composite, which is 1 by construction."""

    def advice(self, name: str) -> list[str]:
        return [pasted(name, "1 and every gradient 0")] if self.paste_back else []

    def make(self) -> PreservationScorer:
        return PreservationScorer(self)


def pasted(name: str, values: str) -> str:
    """The warning about a reward of the unmasked region alone, of composites."""
    return (
        f"rewards.{name}.paste_back: given true, but the composite equals the source outside the mask: every value is "
        f"{values}; set paste_back=false"
    )


class PreservationScorer(PixelScorer[PreservationReward]):
    """1 - mean |image - source| / 255 over the unmasked pixels."""

    def _one(self, item: RewardItem) -> Outcome:
        difference = unmasked_difference(item)
        if isinstance(difference, Failure):
            return difference
        drift = float(np.abs(difference).mean() / 255)
        return Score(1.0 - drift, {"outside_l1": drift})

    def _value(self, image: Tensor, item: RewardItem) -> Tensor | Failure:
        import torch

        kept = kept_pixels(item, (*image.shape[1:], 3))
        if isinstance(kept, Failure):
            return kept
        assert item.source is not None
        source = torch.from_numpy(item.source[kept]).to(image.device, image.dtype) / 255
        pixels = image.permute(1, 2, 0)[torch.from_numpy(kept).to(image.device)]
        return 1 - (pixels - source).abs().mean()


def unmasked_difference(item: RewardItem) -> NDArray[np.float32] | Failure:
    """Image minus source [N, 3] of the N unmasked pixels, in [-255, 255]; a failure without such pixels."""
    kept = kept_pixels(item, item.image.shape)
    if isinstance(kept, Failure):
        return kept
    assert item.source is not None
    return item.image[kept].astype(np.float32) - item.source[kept]


def kept_pixels(item: RewardItem, shape: tuple[int, ...]) -> NDArray[np.bool_] | Failure:
    """Whether each pixel [H, W] is unmasked; a failure if none is, or the image's shape (H, W, 3) is another one."""
    assert item.mask is not None and item.source is not None  # spec.needs
    if shape != item.source.shape or shape[:2] != item.mask.shape:
        shapes = f"image {shape}, source {item.source.shape}, mask {item.mask.shape}"
        return Failure("bad_item", f"image, source and mask must have one size; given {shapes}")
    kept = item.mask < MASK_THRESHOLD
    if not kept.any():
        return Failure("bad_item", "the mask is full: there is no unmasked region to compare")
    return kept
