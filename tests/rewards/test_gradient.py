"""Gradients of rewards by pixels: the view that a scorer receives, weights, and scorers that fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from retouch.errors import ConfigError
from retouch.rewards.gradient import PixelReward, combined_gradient, viewed_pixels
from retouch.rewards.protocol import RewardItem, ScorerSpec
from retouch.rewards.views import View, viewed
from retouch.types import Failure, Outcome


def item_of(**changes: Any) -> RewardItem:
    draw = np.random.default_rng(0)
    image, source = (draw.integers(0, 256, (24, 32, 3), dtype=np.uint8) for _ in range(2))
    mask = np.zeros((24, 32), np.uint8)
    mask[6:14, 8:20] = 255
    return RewardItem(**{"id": 1, "prompt": "a sign", "image": image, "mask": mask, "source": source, **changes})


def pixels_of(item: RewardItem) -> Tensor:
    return torch.from_numpy(item.image.copy()).permute(2, 0, 1) / 255


@pytest.mark.parametrize(
    "view",
    [View(), View(paste_back=True), View(crop=True, least=4), View(True, True, 0.25, 16), View(True, True, 0.0, 224)],
)
@pytest.mark.parametrize("without", [(), ("mask",), ("source",)])
def test_the_view_is_that_of_the_scorer_and_nothing_else_has_a_gradient(view: View, without: tuple[str, ...]) -> None:
    item = item_of(**dict.fromkeys(without))
    image = pixels_of(item).requires_grad_()
    seen, its_item = viewed_pixels(image, item, view)
    expected = viewed(item, view)
    assert torch.equal((seen.detach() * 255).round().to(torch.uint8).permute(1, 2, 0), torch.from_numpy(expected.image))
    for name in ("mask", "source"):
        assert np.array_equal(getattr(its_item, name), getattr(expected, name))
    [gradient] = torch.autograd.grad(seen.sum(), image)
    pasted, cropped = view.paste_back and not without, view.crop and "mask" not in without
    inside = torch.from_numpy(item.mask >= 128) if item.mask is not None else torch.zeros(24, 32, dtype=torch.bool)
    if pasted:
        assert torch.equal(gradient, inside.float().expand(3, -1, -1))
    elif cropped and view.least == 4:
        assert gradient.sum() == 3 * inside.sum()  # the mask is its box
    elif not cropped:
        assert torch.equal(gradient, torch.ones_like(gradient))


class Fake:
    def __init__(self, value: Callable[[Tensor], Any], needs: frozenset[str] = frozenset()) -> None:
        self.spec = ScorerSpec("fake", (0.0, 1.0), needs, "1", "-")
        self.value = value

    def load(self, device: str) -> None: ...

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        raise NotImplementedError

    def values(self, images: Tensor, items: Sequence[RewardItem]) -> list[Tensor | Failure]:
        assert images.shape[0] == len(items) == 1 and images.dtype == torch.float32
        return [self.value(images[0])]


def reward(value: Callable[[Tensor], Any], weight: float = 1.0, **spec: Any) -> PixelReward:
    return PixelReward("fake", weight, Fake(value, **spec), View(), "cpu")


def test_rewards_add_up_by_their_weights() -> None:
    image = pixels_of(item_of())
    found = combined_gradient([reward(torch.mean, 2.0), reward(lambda x: (x**2).mean(), -0.5)], image, item_of())
    assert isinstance(found, Tensor)
    torch.testing.assert_close(found, (2 - image) / image.numel())


class Breaks(torch.autograd.Function):
    """Raises in its backward."""

    @staticmethod
    def forward(ctx: Any, image: Tensor) -> Tensor:
        return image.mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise ZeroDivisionError("no gradient")


def broken(image: Tensor) -> Tensor:
    raise ZeroDivisionError("no\nimage")


@pytest.mark.parametrize(
    ("second", "item", "message"),
    [
        (reward(lambda image: Failure("scorer_error", "cannot read")), item_of(), "cannot read"),
        (reward(broken), item_of(), "fake raised ZeroDivisionError: no image, at test_gradient.py:"),
        (reward(lambda image: image.mean().detach()), item_of(), "fake returned a value without gradient"),
        (reward(lambda image: image.mean() * float("nan")), item_of(), "fake returned NaN or Inf"),
        (reward(lambda image: image.sum() * 1e20), item_of(), ", far outside its range of 0 to 1"),
        (reward(lambda image: image.mean() - 2), item_of(), ", far outside its range of 0 to 1"),
        (reward(lambda image: image.mean(0)), item_of(), "fake returned a tensor of shape [24, 32], not a scalar"),
        (reward(lambda image: 0.5), item_of(), "fake returned float, not a tensor"),
        (reward(Breaks.apply), item_of(), "fake raised ZeroDivisionError: no gradient, at test_gradient.py:"),
        (reward(torch.mean, needs=frozenset({"reference"})), item_of(), "fake needs reference"),
        (reward(torch.mean), item_of(mask=np.zeros((2, 2, 2), np.uint8)), "mask must be uint8 pixels"),
    ],
)
def test_one_failure_is_that_of_the_sample(second: PixelReward, item: RewardItem, message: str) -> None:
    found = combined_gradient([reward(torch.mean), second], pixels_of(item), item)
    assert isinstance(found, Failure) and message in found.message


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_scorer_receives_no_image_with_nan_or_inf(value: float) -> None:
    """It may clamp it."""
    image = pixels_of(item_of())
    image[0, 0, 0] = value
    found = combined_gradient([reward(lambda image: image.clamp(0, 1).nan_to_num().mean())], image, item_of())
    assert found == Failure("bad_item", "the sample contains NaN or Inf")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), ConfigError("rewards.fake: no key")])
def test_what_no_other_item_would_survive_is_no_failure_of_one(error: Exception) -> None:
    def exhausted(image: Tensor) -> Tensor:
        raise error

    with pytest.raises(type(error)):
        combined_gradient([reward(exhausted)], pixels_of(item_of()), item_of())
