"""How well the masked region joins its surroundings: gradients across the edge of the mask, in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from retouch.imaging import MASK_THRESHOLD
from retouch.rewards.base import NO_NETWORK, PackageScorer, RewardEntry
from retouch.rewards.protocol import Pixels, RewardItem
from retouch.types import Failure, Outcome, Score

Floats = NDArray[np.float32]


class SeamReward(RewardEntry):
    """-|gradients just inside the mask's edge - just outside|, in [-1, 0]; meant for the raw sample."""

    value_range = (-1.0, 0.0)
    images = frozenset({"mask"})
    cpu_only = NO_NETWORK

    scorer: Literal["seam"] = "seam"
    paste_back: bool = False
    """True scores the hard edge that pasting creates."""

    def make(self) -> SeamScorer:
        return SeamScorer(self)


class SeamScorer(PackageScorer[SeamReward]):
    """-|mean Sobel magnitude just inside the mask's edge - just outside it|; 0 where both are equal."""

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        return [self._one(item) for item in items]

    def _one(self, item: RewardItem) -> Outcome:
        assert item.mask is not None  # spec.needs
        if item.mask.shape != item.image.shape[:2]:
            return Failure("bad_item", f"image {item.image.shape[:2]} and mask {item.mask.shape} must have one size")
        inside, outside = edge_bands(item.mask)
        if not inside.any() or not outside.any():
            return Failure("bad_item", "the mask is empty or full: it has no edge")
        magnitude = sobel(item.image)
        within, without = float(magnitude[inside].mean()), float(magnitude[outside].mean())
        return Score(-abs(within - without), {"inside": within, "outside": without})


def sobel(image: Pixels) -> Floats:
    """[H, W] gradient magnitude of the luminance in [0, 1], edges repeated; 1 is a step from black to white on both
    axes."""
    grey = np.asarray(Image.fromarray(image).convert("L"), np.float32) / 255
    g = np.pad(grey, 1, mode="edge")
    down = g[2:, :-2] + 2 * g[2:, 1:-1] + g[2:, 2:] - g[:-2, :-2] - 2 * g[:-2, 1:-1] - g[:-2, 2:]
    right = g[:-2, 2:] + 2 * g[1:-1, 2:] + g[2:, 2:] - g[:-2, :-2] - 2 * g[1:-1, :-2] - g[2:, :-2]
    return (np.hypot(down, right) / (4 * np.sqrt(2))).astype(np.float32)


def edge_bands(mask: Pixels, width: int = 3) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Masked pixels within `width` of the unmasked region, and unmasked pixels within `width` of the mask."""
    inside = mask >= MASK_THRESHOLD
    levels, size = Image.fromarray(inside.astype(np.uint8) * 255), 2 * width + 1
    grown = np.asarray(levels.filter(ImageFilter.MaxFilter(size))) > 0
    shrunk = np.asarray(levels.filter(ImageFilter.MinFilter(size))) > 0
    return inside & ~shrunk, grown & ~inside
