"""PaddleOCR 3.x as the reader of the ocr reward. It downloads its models on first use."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from retouch.errors import ConfigError
from retouch.process.machine import installed_version
from retouch.rewards.protocol import Pixels


class PaddleReader:
    """Finds lines in crops, or reads crops that hold one line. Each of the two loads its models on first use.

    Raises:
        ConfigError: paddleocr is not installed, or is older than 3.
    """

    def __init__(self, device: str, threads: int, language: str | None = None) -> None:
        try:
            self._library: Any = importlib.import_module("paddleocr")
        except ImportError as error:
            raise ConfigError(
                f"engine: given 'paddleocr', which cannot be imported ({error}): pip install paddleocr paddlepaddle"
            ) from None
        if int(version().partition(".")[0] or 0) < 3:
            raise ConfigError(f"engine: paddleocr is {version()}; version 3 or newer is needed")
        self._options: dict[str, Any] = {"device": device.replace("cuda", "gpu")}
        if threads:
            self._options["cpu_threads"] = threads
        self._language = language
        self._finder: Any = None
        self._recognizer: Any = None

    def load(self, *, find: bool) -> None:
        """Load the models that find lines, or the one that reads them, if they are not loaded."""
        if find and self._finder is None:
            # orientation models turn short words upside down; keep unsure readings
            self._finder = self._library.PaddleOCR(
                use_doc_orientation_classify=False,
                use_doc_unwarping=False,
                use_textline_orientation=False,
                text_rec_score_thresh=0.0,
                **({} if self._language is None else {"lang": self._language}),
                **self._options,
            )
        if not find and self._recognizer is None:
            model = {} if self._language is None else {"model_name": f"{self._language}_PP-OCRv5_mobile_rec"}
            self._recognizer = self._library.TextRecognition(**model, **self._options)

    def characters(self) -> list[str] | None:
        """The entries of the dictionary of the loaded recogniser; None where a release of the library keeps it in
        another place than PaddleOCR 3.0 to 3.3."""
        inside = getattr(getattr(self._finder, "paddlex_pipeline", None), "text_rec_model", None)
        predictor = inside if self._recognizer is None else getattr(self._recognizer, "paddlex_predictor", None)
        found = getattr(getattr(predictor, "post_op", None), "character", None)
        return list(found) if isinstance(found, list | tuple) else None

    def find(self, crops: Sequence[Pixels]) -> list[list[tuple[str, float, tuple[tuple[float, float], ...]]]]:
        """Text, confidence and corners of every line of each RGB crop."""
        self.load(find=True)
        # one at a time: lines of a batch are padded to its widest
        found = [self._finder.predict(bgr(crop))[0] for crop in crops]
        return [
            [
                (str(text), float(score), tuple((float(x), float(y)) for x, y in corners))
                for text, score, corners in zip(r["rec_texts"], r["rec_scores"], r["rec_polys"], strict=True)
            ]
            for r in found
        ]

    def read_lines(self, crops: Sequence[Pixels]) -> list[tuple[str, float]]:
        """Text and confidence of each RGB crop, which holds one line."""
        self.load(find=False)
        results = [self._recognizer.predict(bgr(crop))[0] for crop in crops]
        return [(str(result["rec_text"]), float(result["rec_score"])) for result in results]


def version() -> str:
    """Version of paddleocr; "0" if it is missing."""
    return installed_version("paddleocr", "0")


def bgr(pixels: Pixels) -> Pixels:
    """The channels in the order that the engines expect."""
    return np.ascontiguousarray(pixels[..., ::-1])
