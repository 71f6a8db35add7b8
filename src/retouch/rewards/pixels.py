"""Pixels of items as tensors, and tensors as items: what the scorers with gradients share. torch is imported on use."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from retouch.rewards.protocol import Pixels, RewardItem

if TYPE_CHECKING:
    from torch import Tensor


def unit_pixels(image: Pixels) -> Tensor:
    """[3, H, W] fp32 in [0, 1] of uint8 RGB pixels [H, W, 3]."""
    import torch

    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


def rounded_pixels(image: Tensor) -> Pixels:
    """uint8 RGB pixels [H, W, 3] of an image [3, H, W] in [0, 1], without gradient; values beyond are clamped."""
    levels = (image.detach() * 255).round().clamp(0, 255)
    return levels.byte().permute(1, 2, 0).cpu().numpy()


def with_image(item: RewardItem, image: Tensor) -> RewardItem:
    """The item with an image [3, H, W] in [0, 1], rounded to uint8: for what needs no gradient, such as boxes."""
    return replace(item, image=rounded_pixels(image))
