"""Reads one line of text: a small convolutional network with CTC (Graves et al. 2006), differentiable in the pixels.

It was trained on rendered words and lines (`retouch tiny build text_recognizer`) in fonts of which the signs of
`retouch data synth` have none. Its weights, 1.1 MB in fp16, come with the package.

Legend: B images, T columns, C classes (0 is CTC's blank), H and W in pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from retouch.files.saved_tensors import load_frozen
from retouch.imaging.lines import greedy_reading

FOLDER = Path(__file__).parent / "bases" / "text_recognizer"
"""The network that comes with the package, and the card of its training."""

WEIGHTS = "model.safetensors"

CHARACTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789 "
"""Characters that the network can read; class i + 1 is character i."""

HEIGHT = 32
"""Height of the network's input in pixels."""

COLUMN = 4
"""Width of a column in pixels of the input: each column has one distribution over the classes."""

WIDEST = 1024
"""Largest width of the network's input in pixels: a longer line is squeezed."""

_GREY = (0.299, 0.587, 0.114)
_FLAT = 8 / 255  # standard deviation below which a crop is not amplified to full range: it holds no text


class RecognizerNetwork(nn.Module):
    """Seven convolutions reduce the height to 1 and the width to a quarter; three along the line look at neighbours,
    10 columns to each side; the mean of the line is added, because it distinguishes small and capital letters of one
    shape; one layer names the character of each column."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for given, made, stride in (
            (1, 24, (2, 2)), (24, 32, (1, 1)), (32, 64, (2, 2)), (64, 64, (1, 1)), (64, 96, (2, 1)), (96, 96, (1, 1)),
        ):  # fmt: skip
            layers += [nn.Conv2d(given, made, 3, stride, padding=1, bias=False), nn.BatchNorm2d(made), nn.ReLU()]
        layers += [nn.Conv2d(96, 128, (HEIGHT // 8, 1), bias=False), nn.BatchNorm2d(128), nn.ReLU()]
        self.features = nn.Sequential(*layers)
        self.along = nn.ModuleList(
            nn.Sequential(nn.Conv1d(128, 128, 5, padding=2 * reach, dilation=reach, bias=False), nn.BatchNorm1d(128))
            for reach in (1, 2, 2)
        )
        self.whole = nn.Linear(128, 128)
        self.names = nn.Linear(128, len(CHARACTERS) + 1)
        for layer in self.modules():
            if isinstance(layer, nn.Conv1d | nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")

    def forward(self, pixels: Tensor) -> Tensor:
        """Log-probabilities [B, T, C] of `line_pixels` [B, 1, 32, 4 T]."""
        return self.logits(pixels).log_softmax(-1)

    def logits(self, pixels: Tensor) -> Tensor:
        """The same before the softmax."""
        line = self.features(pixels).squeeze(2)
        for layer in self.along:
            line = line + layer(line).relu()
        line = line + self.whole(line.mean(2)).relu()[:, :, None]
        return self.names(line.transpose(1, 2))


def line_pixels(crop: Tensor) -> Tensor:
    """A crop of one line [3, h, w] in [0, 1] -> [1, 32, W]: grey, scaled to the height 32 with its proportions kept but
    for the rounding of W to whole columns, minus its mean, divided by its standard deviation."""
    grey = (crop * crop.new_tensor(_GREY).view(3, 1, 1)).sum(0)
    size = HEIGHT, width_of(*grey.shape)
    scaled = functional.interpolate(grey[None, None], size, mode="bilinear", align_corners=False, antialias=True)[0]
    centred = scaled - scaled.mean()
    return centred / (centred.square().mean() + _FLAT**2).sqrt()


def width_of(height: int, width: int) -> int:
    """Width of the network's input in pixels for a crop of `height` and `width`."""
    return min(WIDEST, max(COLUMN, COLUMN * round(HEIGHT * width / height / COLUMN)))


def classes_of(text: str) -> list[int] | None:
    """Classes of the characters of a text; None if the network cannot read one of them."""
    found = [CHARACTERS.find(character) + 1 for character in text]
    return found if all(found) else None


def columns_needed(classes: Sequence[int]) -> int:
    """Columns that a text takes at least under CTC: one per character, and a blank between equal ones."""
    return len(classes) + sum(a == b for a, b in pairwise(classes))


def log_likelihood(log_probabilities: Tensor, classes: Sequence[int]) -> Tensor:
    """Log-likelihood of a text under CTC, a scalar: the sum over all alignments; -inf if the columns are too few.

    Args:
        log_probabilities: [T, C] of one line.
        classes: of the characters; at least one.
    """
    columns, letters = torch.tensor([[len(log_probabilities)], [len(classes)]], dtype=torch.long)
    target = torch.tensor([list(classes)], dtype=torch.long, device=log_probabilities.device)
    return -functional.ctc_loss(log_probabilities[:, None], target, columns, letters, reduction="sum")


def read_greedily(log_probabilities: Tensor) -> tuple[str, float]:
    """The text of the likeliest class of every column [T, C], and its confidence (`greedy_reading`)."""
    best, classes = log_probabilities.max(-1)
    return greedy_reading(classes.tolist(), map(math.exp, best.tolist()), CHARACTERS)


@lru_cache(maxsize=4)
def packaged(device: str = "cpu", dtype: torch.dtype = torch.float32) -> RecognizerNetwork:
    """The network of the package, frozen."""
    return load_frozen(RecognizerNetwork, FOLDER / WEIGHTS).to(device, dtype)
