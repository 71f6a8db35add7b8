"""How well the masked region joins its surroundings: gradients across the edge of the mask.

`score` is numpy, without torch; `values` is the same in torch, on pixels that are not rounded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from retouch.imaging.masks import MASK_THRESHOLD
from retouch.rewards.base import NO_NETWORK, PixelScorer, RewardEntry
from retouch.rewards.protocol import Pixels, RewardItem
from retouch.types import Failure, Outcome, Score

if TYPE_CHECKING:
    from torch import Tensor

Floats = NDArray[np.float32]


class SeamReward(RewardEntry):
    """-|gradients just inside the mask's edge - just outside|, in [-1, 0]; meant for the raw sample."""

    value_range = (-1.0, 0.0)
    images = frozenset({"mask"})
    differentiable = True
    cpu_only = NO_NETWORK

    scorer: Literal["seam"] = "seam"
    paste_back: bool = False
    """True scores the hard edge that pasting creates."""

    def make(self) -> SeamScorer:
        return SeamScorer(self)


class SeamScorer(PixelScorer[SeamReward]):
    """-|mean Sobel magnitude just inside the mask's edge - just outside it|; 0 where both are equal."""

    def _one(self, item: RewardItem) -> Outcome:
        bands = usable_bands(item, item.image.shape[:2])
        if isinstance(bands, Failure):
            return bands
        inside, outside = bands
        magnitude = sobel(item.image)
        within, without = float(magnitude[inside].mean()), float(magnitude[outside].mean())
        return Score(-abs(within - without), {"inside": within, "outside": without})

    def _value(self, image: Tensor, item: RewardItem) -> Tensor | Failure:
        """It differs from `score` by less than .002, because that rounds the luminance to 256 levels."""
        import torch

        bands = usable_bands(item, tuple(image.shape[1:]))
        if isinstance(bands, Failure):
            return bands
        magnitude = sobel_of(image)
        within, without = (magnitude[torch.from_numpy(band).to(image.device)].mean() for band in bands)
        return -(within - without).abs()


Band = NDArray[np.bool_]


def usable_bands(item: RewardItem, size: tuple[int, ...]) -> tuple[Band, Band] | Failure:
    """`edge_bands` of an item's mask; a failure if it has no edge, or another size (height, width) than the image."""
    assert item.mask is not None  # spec.needs
    if item.mask.shape != size:
        return Failure("bad_item", f"image {size} and mask {item.mask.shape} must have one size")
    inside, outside = edge_bands(item.mask)
    if not inside.any() or not outside.any():
        return Failure("bad_item", "the mask is empty or full: it has no edge")
    return inside, outside


def sobel(image: Pixels) -> Floats:
    """[H, W] gradient magnitude of the luminance in [0, 1], edges repeated; 1 is a step from black to white on both
    axes."""
    grey = np.asarray(Image.fromarray(image).convert("L"), np.float32) / 255
    g = np.pad(grey, 1, mode="edge")
    down = g[2:, :-2] + 2 * g[2:, 1:-1] + g[2:, 2:] - g[:-2, :-2] - 2 * g[:-2, 1:-1] - g[:-2, 2:]
    right = g[:-2, 2:] + 2 * g[1:-1, 2:] + g[2:, 2:] - g[:-2, :-2] - 2 * g[1:-1, :-2] - g[2:, :-2]
    return (np.hypot(down, right) / (4 * np.sqrt(2))).astype(np.float32)


def sobel_of(image: Tensor) -> Tensor:
    """`sobel` of an image [3, H, W] in [0, 1], differentiable; flat places have gradient 0."""
    from torch.nn.functional import pad

    grey = 0.299 * image[0] + 0.587 * image[1] + 0.114 * image[2]
    g = pad(grey[None, None], (1, 1, 1, 1), mode="replicate")[0, 0]
    down = g[2:, :-2] + 2 * g[2:, 1:-1] + g[2:, 2:] - g[:-2, :-2] - 2 * g[:-2, 1:-1] - g[:-2, 2:]
    right = g[:-2, 2:] + 2 * g[1:-1, 2:] + g[2:, 2:] - g[:-2, :-2] - 2 * g[1:-1, :-2] - g[2:, :-2]
    return ((down.square() + right.square() + _FLAT).sqrt() - _FLAT**0.5) / (4 * 2**0.5)


_FLAT = 1e-8
"""Keeps the root of the squared gradients differentiable at 0."""


def edge_bands(mask: Pixels, width: int = 3) -> tuple[Band, Band]:
    """Masked pixels within `width` of the unmasked region, and unmasked pixels within `width` of the mask."""
    inside = mask >= MASK_THRESHOLD
    levels, size = Image.fromarray(inside.astype(np.uint8) * 255), 2 * width + 1
    grown = np.asarray(levels.filter(ImageFilter.MaxFilter(size))) > 0
    shrunk = np.asarray(levels.filter(ImageFilter.MinFilter(size))) > 0
    return inside & ~shrunk, grown & ~inside
