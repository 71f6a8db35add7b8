"""LPIPS with the VGG16 backbone (arXiv 1801.03924), in plain torch: no torchvision, no package lpips.

Features after relu1_2, 2_2, 3_3, 4_3 and 5_3 are divided by their norm over channels; their squared differences are
weighted by a 1 x 1 head, averaged over places and summed. Values of other backbones (Alex, Squeeze) do not compare.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from retouch.imaging.masks import MASK_THRESHOLD
from retouch.rewards.base import PixelScorer, RewardEntry
from retouch.rewards.pixels import unit_pixels
from retouch.rewards.protocol import RewardItem
from retouch.rewards.scorers.preservation import pasted
from retouch.rewards.scorers.weights import file_digest, named_file, read_weights, tensor_of
from retouch.types import Failure, Outcome, Score

if TYPE_CHECKING:
    from torch import Tensor

_BLOCKS = ((0, 2), (5, 7), (10, 12, 14), (17, 19, 21), (24, 26, 28))
"""Numbers of the convolutions in `features` of VGG16, block by block; between blocks the maximum of 2 x 2."""

_SHIFT, _SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)

_SMALLEST = 16  # pixels: four halvings leave one


class LpipsReward(RewardEntry):
    """-LPIPS (VGG16) between sample and source, at most 0; its detail `lpips` is the distance."""

    images = frozenset({"source"})
    value_range = (-100.0, 0.0)
    licence = "BSD-2-Clause"
    differentiable = True

    scorer: Literal["lpips"] = "lpips"
    backbone: str
    """File (.pth or .safetensors) of the ImageNet weights of VGG16, with keys `features.0.weight` as torchvision and
    timm have them; required."""
    heads: str
    """File of the linear heads, `lpips/weights/v0.1/vgg.pth` of the package lpips, with keys `lin0.model.1.weight`;
    required."""
    region: Literal["all", "kept"] = "all"
    """"kept" multiplies both images by the unmasked region first, as BrushBench does."""

    def required_images(self) -> frozenset[str]:
        return self.images | ({"mask"} if self.region == "kept" else set())

    def advice(self, name: str) -> list[str]:
        return [pasted(name, "0 and every gradient 0")] if self.region == "kept" and self.paste_back else []

    def make(self) -> LpipsScorer:
        return LpipsScorer(self)


class LpipsScorer(PixelScorer[LpipsReward]):
    """One image at a time: sizes may differ."""

    def __init__(self, options: LpipsReward) -> None:
        super().__init__(options, f"vgg16 {options.region}")
        self._device = "cpu"
        self._convolutions: dict[int, tuple[Tensor, Tensor]] = {}
        self._heads: list[Tensor] = []

    def load(self, device: str) -> None:
        """Read both files.

        Raises:
            ConfigError: a missing file, or one without the tensors.
        """
        o = self.options
        files = {"backbone": named_file("backbone", o.backbone), "heads": named_file("heads", o.heads)}
        backbone, heads = (read_weights(file, name, mmap=False) for name, file in files.items())
        self._device = device
        for number in (number for block in _BLOCKS for number in block):
            weight, bias = (tensor_of(backbone, "backbone", f"features.{number}.{part}") for part in ("weight", "bias"))
            self._convolutions[number] = (weight.to(device), bias.to(device))
        names = [f"lin{i}.model.1.weight" for i in range(len(_BLOCKS))]
        self._heads = [tensor_of(heads, "heads", name).flatten().to(device) for name in names]
        digests = " ".join(map(file_digest, files.values()))
        self.set_revision(f"vgg16 {self.options.region} {digests}")

    def _one(self, item: RewardItem) -> Outcome:
        import torch

        with torch.no_grad():
            distance = self._distance(unit_pixels(item.image), item)
        if isinstance(distance, Failure):
            return distance
        return Score(-float(distance), {"lpips": float(distance)})

    def _value(self, image: Tensor, item: RewardItem) -> Tensor | Failure:
        distance = self._distance(image, item)
        return distance if isinstance(distance, Failure) else -distance

    def _distance(self, image: Tensor, item: RewardItem) -> Tensor | Failure:
        """LPIPS between an image [3, H, W] in [0, 1] and the source of an item, on the scorer's device."""
        import torch

        assert item.source is not None  # spec.needs
        shape = (*image.shape[1:], 3)
        if shape != item.source.shape or min(shape[:2]) < _SMALLEST:
            shapes = f"image {shape}, source {item.source.shape}"
            return Failure("bad_item", f"image and source must have one size of {_SMALLEST} or more; given {shapes}")
        image = image.to(self._device)
        both = torch.stack([image, unit_pixels(item.source).to(image)])
        if self.options.region == "kept":
            assert item.mask is not None
            if item.mask.shape != shape[:2]:
                return Failure("bad_item", f"image {shape[:2]} and mask {item.mask.shape} must have one size")
            both = both * torch.from_numpy(item.mask < MASK_THRESHOLD).to(image)
        shift, scale = (both.new_tensor(values)[:, None, None] for values in (_SHIFT, _SCALE))
        return self._compared((both * 2 - 1 - shift) / scale)

    def _compared(self, x: Tensor) -> Tensor:
        """LPIPS between two images [2, 3, H, W], normalised."""
        import torch
        import torch.nn.functional as F

        total = x.new_zeros(())
        for block, (numbers, head) in enumerate(zip(_BLOCKS, self._heads, strict=True)):
            x = F.max_pool2d(x, 2) if block else x
            for number in numbers:
                weight, bias = self._convolutions[number]
                x = F.conv2d(x, weight.to(x.dtype), bias.to(x.dtype), padding=1).relu()
            # the norm has gradient 0 where all features are 0; the root of the sum of squares has none
            unit = x / (torch.linalg.vector_norm(x, dim=1, keepdim=True) + 1e-10)
            squared = (unit[0] - unit[1]).square()
            total = total + (squared * head[:, None, None].to(x.dtype)).sum(0).mean()
        return total
