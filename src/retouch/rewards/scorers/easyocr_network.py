"""EasyOCR's recogniser of English lines, `english_g2`, in plain torch (CRNN: Shi et al. 2015, arXiv 1507.05717;
JaidedAI/EasyOCR, easyocr/model/vgg_model.py): seven convolutions, the mean over rows, two bidirectional LSTMs, CTC.

Legend: T columns of four pixels, C classes (0 is CTC's blank).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from retouch.errors import ConfigError, first_line
from retouch.imaging.lines import greedy_reading
from retouch.rewards.scorers.weights import read_weights

CHARACTERS = "0123456789!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~ €ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
"""Character i is class i + 1."""

_WIDTH = 256


class _Along(nn.Module):
    """A bidirectional LSTM over columns [B, T, 256], and its projection."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(_WIDTH, _WIDTH, bidirectional=True, batch_first=True)
        self.linear = nn.Linear(2 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.rnn(x)[0])


class EasyOcrNetwork(nn.Module):
    """Names of submodules are those of the published weights."""

    def __init__(self) -> None:
        super().__init__()
        self.FeatureExtraction = nn.ModuleDict({"ConvNet": nn.Sequential(*_layers())})
        self.SequenceModeling = nn.Sequential(_Along(), _Along())
        self.Prediction = nn.Linear(_WIDTH, len(CHARACTERS) + 1)

    def forward(self, lines: Tensor) -> Tensor:
        """Logits [B, T, C] of grey lines [B, 1, 64, W] in [-1, 1]."""
        features = self.FeatureExtraction["ConvNet"](lines)
        return self.Prediction(self.SequenceModeling(features.mean(2).transpose(1, 2)))

    def read(self, line: NDArray[np.uint8]) -> tuple[str, float]:
        """Text and confidence of a grey line [64, W]."""
        pixels = torch.from_numpy(line.astype(np.float32)) / 127.5 - 1
        with torch.inference_mode():
            best, classes = self(pixels[None, None])[0].softmax(-1).max(-1)
        return greedy_reading(classes.tolist(), best.tolist(), CHARACTERS)


def _layers() -> list[nn.Module]:
    tall = (2, 1)  # halves the height alone
    layers: list[nn.Module] = []
    for given, made, pool in ((1, 32, 2), (32, 64, 2), (64, 128, None), (128, 128, tall)):
        layers += [nn.Conv2d(given, made, 3, padding=1), nn.ReLU(), *([nn.MaxPool2d(pool)] if pool else [])]
    for given, pool in ((128, None), (_WIDTH, tall)):
        layers += [nn.Conv2d(given, _WIDTH, 3, padding=1, bias=False), nn.BatchNorm2d(_WIDTH), nn.ReLU()]
        layers += [nn.MaxPool2d(pool)] if pool else []
    return [*layers, nn.Conv2d(_WIDTH, _WIDTH, 2), nn.ReLU()]


def loaded(file: Path) -> EasyOcrNetwork:
    """The network with the weights of a file, frozen.

    Raises:
        ConfigError: the file has weights of another network.
    """
    network = EasyOcrNetwork()
    weights = {name.removeprefix("module."): tensor for name, tensor in read_weights(file, "engine").items()}
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        raise ConfigError(f"engine: {file.name} is not english_g2 of EasyOCR: {first_line(error)}") from None
    return network.eval().requires_grad_(False)
