"""How whole a letter is: a small network on crops of letters, differentiable in the pixels.

OCR reads a letter with a missing or an additional stroke as if it were whole, with high confidence. This network was
trained on rendered letters with such defects (`retouch tiny build glyph_structure`) and receives the asked letter.
Two come with the package, of 0.3 MB in fp16: the standard one, and the robust one, which was trained further on
adversarial perturbations of the letters.

Legend: B images, N letters, H and W in pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from retouch.files.saved_tensors import load_frozen
from retouch.imaging.masks import Box

Variant = Literal["standard", "robust"]

_BASES = Path(__file__).parent / "bases"
FOLDERS: dict[Variant, Path] = {
    "standard": _BASES / "glyph_structure",
    "robust": _BASES / "glyph_structure_robust",
}
"""The networks that come with the package, and the cards of their training."""

WEIGHTS = "model.safetensors"

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
"""Letters that the network can judge; the index in it is the network's input."""

SIDE = 32
"""Pixels of the network's square input."""

_GREY = (0.299, 0.587, 0.114)
_UNLIKELY = -8.0  # log-probability of a name below which a letter is only another one
_WEAKEST = 8 / 255  # contrast below which a crop is not amplified to full range: it holds no letter


class GlyphNetwork(nn.Module):
    """Six convolutions give 64 features, from which one layer names the letter. The asked letter scales and shifts the
    features; they and the log-probability of its name decide whether it is whole."""

    def __init__(self) -> None:
        super().__init__()
        channels = [(1, 16, 1), (16, 16, 2), (16, 32, 1), (32, 32, 2), (32, 64, 1), (64, 64, 2)]
        layers: list[nn.Module] = []
        for given, made, stride in channels:
            layers += [nn.Conv2d(given, made, 3, stride, padding=1, bias=False), nn.BatchNorm2d(made), nn.ReLU()]
        self.features = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * (SIDE // 8) ** 2, 64))
        self.names = nn.Linear(64, len(LETTERS))
        self.asked = nn.Embedding(len(LETTERS), 128)
        self.broken = nn.Linear(65, 1)
        for layer in self.features:
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        nn.init.normal_(self.asked.weight, std=0.1)  # of the size of the features: at 1 nothing is learned
        with torch.no_grad():
            self.asked.weight[:, :64] += 1

    def forward(self, pixels: Tensor, letters: Tensor) -> Tensor:
        """Logits [N] of P(broken, or another letter) from `letter_pixels` [N, 1, 32, 32] and indices [N] of
        `LETTERS`: the mean of both polarities. Light on dark thus counts as dark on light."""
        given, inverted = (self.judge(self.features(sign * pixels), letters)[0] for sign in (1, -1))
        return (given + inverted) / 2

    def judge(self, features: Tensor, letters: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [N] of broken and [N, 62] of the names of the letters, from features [N, 64]."""
        names = self.names(features.relu())
        named = names.log_softmax(1).gather(1, letters[:, None]).clamp(min=_UNLIKELY)
        gain, shift = self.asked(letters).chunk(2, dim=1)
        return self.broken(torch.cat([torch.relu(features * gain + shift), named / -_UNLIKELY], 1))[:, 0], names


def structure_of(
    images: Tensor,
    boxes: Sequence[tuple[int, Box]],
    letters: Sequence[int],
    network: GlyphNetwork | None = None,
) -> Tensor:
    """Probability [N] that each box holds the asked letter, whole. Differentiable with respect to the images.

    Args:
        images: [B, 3, H, W] in [0, 1], RGB.
        boxes: of each letter the index of its image, and left, top, right, bottom in pixels, half-open.
        letters: index of each asked letter in `LETTERS`.
        network: None takes the standard one of the package, on the device and in the dtype of the images.

    Raises:
        ValueError: a box that is empty or reaches beyond its image, or other numbers of boxes and letters.
    """
    if len(boxes) != len(letters):
        raise ValueError(f"letters: given {len(letters)} for {len(boxes)} boxes; give one for each")
    if not boxes:
        return images.new_zeros(0)
    network = network or packaged(str(images.device), images.dtype)
    pixels = torch.stack([letter_pixels(_cut(images, *box)) for box in boxes])
    return torch.sigmoid(-network(pixels, torch.tensor(list(letters), dtype=torch.long, device=images.device)))


def letter_pixels(crop: Tensor) -> Tensor:
    """A crop of one letter [3, h, w] in [0, 1] -> [1, 32, 32]: grey, scaled to fit with its proportions kept, minus its
    median, divided by its largest absolute value; 0 beside it."""
    grey = (crop * crop.new_tensor(_GREY).view(3, 1, 1)).sum(0)
    height, width = grey.shape
    scale = SIDE / max(height, width)
    size = max(1, round(height * scale)), max(1, round(width * scale))
    scaled = functional.interpolate(grey[None, None], size, mode="bilinear", align_corners=False, antialias=True)[0, 0]
    centred = scaled - scaled.median()
    normal = centred / centred.abs().amax().clamp(min=_WEAKEST)
    left, top = (SIDE - size[1]) // 2, (SIDE - size[0]) // 2
    return functional.pad(normal, (left, SIDE - size[1] - left, top, SIDE - size[0] - top))[None]


def index_of(letter: str) -> int | None:
    """Index of a character in `LETTERS`; None if the network cannot judge it."""
    found = LETTERS.find(letter) if len(letter) == 1 else -1
    return None if found < 0 else found


@lru_cache(maxsize=4)
def packaged(device: str = "cpu", dtype: torch.dtype = torch.float32, variant: Variant = "standard") -> GlyphNetwork:
    """A network of the package, frozen."""
    return load_frozen(GlyphNetwork, FOLDERS[variant] / WEIGHTS).to(device, dtype)


def _cut(images: Tensor, image: int, box: Box) -> Tensor:
    left, top, right, bottom = box
    height, width = images.shape[2:]
    if not (0 <= image < len(images) and 0 <= left < right <= width and 0 <= top < bottom <= height):
        raise ValueError(f"boxes: given {box} of image {image}; expected a box within {width} x {height} pixels")
    return images[image, :, top:bottom, left:right]
