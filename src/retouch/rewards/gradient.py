"""Gradients of rewards with respect to the pixels of a sample. Legend: B images of H x W pixels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from retouch.errors import ConfigError
from retouch.imaging.masks import MASK_THRESHOLD
from retouch.rewards.protocol import RewardItem, Scorer, malformed, missing_needs, raised
from retouch.rewards.table import NOT_FINITE, RewardTable
from retouch.rewards.views import View, can_be_pasted, view_box, viewed
from retouch.types import Failure


@runtime_checkable
class DifferentiableScorer(Scorer, Protocol):
    """A scorer of an entry that is `differentiable`."""

    def values(self, images: Tensor, items: Sequence[RewardItem]) -> list[Tensor | Failure]:
        """The scores of images as scalars with gradient, one per item in order; value i depends on image i only.

        Args:
            images: [B, 3, H, W] fp32 in [0, 1]; values beyond keep their gradient.
            items: everything but the images, which are not read from them.
        """
        ...


@dataclass(frozen=True)
class PixelReward:
    """A reward of the run as a function of pixels; `view` is the part of the image that its scorer receives."""

    name: str
    weight: float
    scorer: DifferentiableScorer
    view: View
    device: str

    def value(self, image: Tensor, item: RewardItem) -> Tensor | Failure:
        """The reward of an image [3, H, W] in [0, 1], with gradient."""
        problem = malformed(item)
        if problem is not None:
            return problem
        image, item = viewed_pixels(image, item, self.view)
        problem = missing_needs(self.scorer.spec, item)
        if problem is not None:
            return problem
        try:
            [value] = self.scorer.values(image[None].to(self.device), [item])
        except (ConfigError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a scorer is foreign code, see `CheckedScorer`
            return raised(self.name, error)
        if isinstance(value, Failure) or not isinstance(value, Tensor):
            return value
        return value.to(image.device)

    def gradient(self, image: Tensor, item: RewardItem) -> Tensor | Failure:
        """d reward / d pixels [3, H, W] fp32 of an image [3, H, W] in [0, 1]; a failure where the scorer has no finite
        value, or no gradient.

        Raises:
            ConfigError, torch.OutOfMemoryError: of the scorer.
        """
        with torch.enable_grad():
            pixels = image.detach().float().requires_grad_()
            value = self.value(pixels, item)
            if isinstance(value, Failure):
                return value
            problem = _unusable(value, *self.scorer.spec.range)
            if problem is not None:
                return Failure("scorer_error", f"{self.name} {problem}")
            try:
                [found] = torch.autograd.grad(value, pixels, allow_unused=True)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # a backward of foreign code
                return raised(self.name, error)
        if found is None:  # of parameters that require one, for example
            return Failure("scorer_error", f"{self.name} returned a value that does not depend on the pixels")
        return found


def pixel_rewards(table: RewardTable, weights: Mapping[str, float]) -> list[PixelReward]:
    """The rewards of which the weight of the gradient is not 0; their scorers must have loaded."""
    found: list[PixelReward] = []
    for name, weight in weights.items():
        if weight:
            scorer, view, device = table.local(name)
            if not isinstance(scorer, DifferentiableScorer):
                raise ConfigError(
                    f"rewards.{name}: its entry sets differentiable, but {type(scorer).__name__} has no method values; "
                    "define values(images, items), or leave differentiable out"
                )
            found.append(PixelReward(name, weight, scorer, view, device))
    return found


def combined_gradient(rewards: Sequence[PixelReward], image: Tensor, item: RewardItem) -> Tensor | Failure:
    """d (weighted sum of rewards) / d pixels of an image [3, H, W] in [0, 1], or the failure of one of them, or of an
    image with NaN or Inf, which a scorer may clamp."""
    if not bool(image.isfinite().all()):
        return NOT_FINITE
    total = torch.zeros_like(image, dtype=torch.float32)
    for reward in rewards:
        found = reward.gradient(image, item)
        if isinstance(found, Failure):
            return found
        total = total + reward.weight * found
    return total


def _unusable(value: Tensor, low: float, high: float) -> str | None:
    """The reason why the value of a scorer has no usable gradient, None where it has one.

    Args:
        low, high: range of the scorer. Pixels beyond [0, 1] may have values beyond it, but by no more than its width.
    """
    if not isinstance(value, Tensor):
        return f"returned {type(value).__name__}, not a tensor"
    if value.numel() != 1:
        return f"returned a tensor of shape {list(value.shape)}, not a scalar"
    if not bool(value.isfinite().all()):
        return "returned NaN or Inf"
    width = high - low
    if not low - width <= float(value.detach()) <= high + width:
        return f"returned {float(value.detach()):g}, far outside its range of {low:g} to {high:g}"
    return None if value.requires_grad else "returned a value without gradient"


def viewed_pixels(image: Tensor, item: RewardItem, view: View) -> tuple[Tensor, RewardItem]:
    """`retouch.rewards.views.viewed` of an image [3, H, W] with gradient, and the item that goes with it. The gradient
    is 0 outside the mask of a composite and outside a crop."""
    if view.paste_back and item.mask is not None and item.source is not None and can_be_pasted(item):
        inside = torch.from_numpy(item.mask >= MASK_THRESHOLD).to(image.device)
        source = torch.from_numpy(item.source.copy()).to(image).permute(2, 0, 1) / 255
        image = torch.where(inside, image, source)
    box = view_box(item, view.margin, view.least) if view.crop else None
    if box is not None:
        left, top, right, bottom = box
        image = image[:, top:bottom, left:right]
    return image, viewed(item, view)
