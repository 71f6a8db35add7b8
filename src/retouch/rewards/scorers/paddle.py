"""PaddleOCR 3.x as the reader of the ocr reward. It downloads its models on first use."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Sequence
from typing import Any

import numpy as np

from retouch.errors import ConfigError
from retouch.rewards.protocol import Pixels


class PaddleReader:
    """Reads crops, as whole images (`detect`) or as single lines.

    Raises:
        ConfigError: paddleocr is not installed, or is older than 3.
    """

    def __init__(self, device: str, detect: bool, threads: int) -> None:
        try:
            paddleocr: Any = importlib.import_module("paddleocr")
        except ImportError as error:
            raise ConfigError(
                f"engine: given 'paddleocr', which cannot be imported ({error}): pip install paddleocr paddlepaddle"
            ) from None
        if int(version().partition(".")[0] or 0) < 3:
            raise ConfigError(f"engine: paddleocr is {version()}; version 3 or newer is needed")
        options: dict[str, Any] = {"device": "gpu" if device.startswith("cuda") else "cpu"}
        if threads:
            options["cpu_threads"] = threads
        self.detect = detect
        if detect:
            # orientation models turn short words upside down; keep unsure readings
            self._engine = paddleocr.PaddleOCR(
                use_doc_orientation_classify=False,
                use_doc_unwarping=False,
                use_textline_orientation=False,
                text_rec_score_thresh=0.0,
                **options,
            )
        else:
            self._engine = paddleocr.TextRecognition(**options)

    def read(self, crops: Sequence[Pixels]) -> list[tuple[str, float]]:
        """Text and mean confidence of each RGB crop; ("", 0.0) where nothing is found."""
        return [self._one(np.ascontiguousarray(crop[..., ::-1])) for crop in crops]

    def _one(self, bgr: Pixels) -> tuple[str, float]:
        # one at a time: lines of a batch are padded to its widest
        (result,) = self._engine.predict(bgr)
        if not self.detect:
            return str(result["rec_text"]), float(result["rec_score"])
        texts = [str(text) for text in result["rec_texts"]]
        return (" ".join(texts), float(np.mean(result["rec_scores"]))) if texts else ("", 0.0)


def version() -> str:
    """Version of paddleocr; "0" if it is missing."""
    try:
        return importlib.metadata.version("paddleocr")
    except importlib.metadata.PackageNotFoundError:
        return "0"
