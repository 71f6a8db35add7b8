"""Does the picture say what it should? rapidocr (PP-OCR, onnxruntime; its weights come in the wheel), or PaddleOCR.

The score is 1 - edit distance / longer length between the text read in the mask crop and the text asked for:
symmetric, so that neither missing nor repeated letters pay. The recogniser's confidence alone is no reward: it is .999
on nonsense.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from retouch.config.errors import ConfigError
from retouch.imaging import MASK_THRESHOLD, mask_box, normalize_text, text_similarity, widen
from retouch.rewards.protocol import Pixels, RewardItem, ScorerSpec, text_to_read
from retouch.rewards.scorers import paddle
from retouch.types import Failure, Outcome, Score

_HEIGHT = 48  # pixels the recogniser scales a line to
_BUCKET = 32  # line widths are padded to a multiple of this, so that a score does not depend on its batch
_BATCH = 16
_LONGEST = 32  # sides of a crop: detection scales the short side up to 736 px, and a sliver takes minutes


class OcrScorer:
    """Reads the mask crop of each item.

    Args:
        score: "ned" for the edit-distance similarity, "confidence" for the recogniser's mean confidence.
        case_sensitive: whether "Moon" and "MOON" differ.
        crop_margin: widens the mask box by this share of its sides.
        detect: find lines in the crop first (large masks, several lines); False reads the crop as one line, several
            times faster and better for crops only as large as their word.
        threads: of the engine; 0 leaves the choice to it.
        engine: "rapidocr" or, where it is installed, "paddleocr".
    """

    def __init__(
        self,
        score: Literal["ned", "confidence"] = "ned",
        case_sensitive: bool = True,
        crop_margin: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0,
        detect: bool = True,
        threads: Annotated[int, Field(ge=0)] = 0,
        engine: Literal["rapidocr", "paddleocr"] = "rapidocr",
    ) -> None:
        self.kind = score
        self.case_sensitive = case_sensitive
        self.crop_margin = crop_margin
        self.detect = detect
        self.threads = threads
        settings = f"score={score} case={case_sensitive} margin={crop_margin} detect={detect}"
        self.engine = engine
        version = _version() if engine == "rapidocr" else paddle.version()
        self.spec = ScorerSpec("ocr", (0.0, 1.0), frozenset(), f"{engine} {version} {settings}", "Apache-2.0")
        self._engine: Any = None
        self._paddle: paddle.PaddleReader | None = None

    def load(self, device: str) -> None:
        """Build the engine; rapidocr runs on the CPU whatever `device` is.

        Raises:
            ConfigError: the engine is not installed.
        """
        if self.engine == "paddleocr":
            self._paddle = paddle.PaddleReader(device, self.detect, self.threads)
            return
        try:
            from rapidocr import RapidOCR
        except ImportError:
            raise ConfigError('the ocr reward needs rapidocr: pip install "retouch[ocr]"') from None
        threads = self.threads or -1
        self._engine = RapidOCR(
            params={
                "Global.log_level": "error",
                "Global.text_score": 0.0,  # keep unsure readings: a wrong letter is a lower score, not an empty one
                "Global.use_cls": False,  # the angle classifier turns short words upside down
                "EngineConfig.onnxruntime.intra_op_num_threads": threads,
            }
        )

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        texts = [_unreadable(item, self.crop_margin) or text_to_read(item) for item in items]
        readable = [i for i, text in enumerate(texts) if isinstance(text, str)]
        crops = [crop_for(items[i], self.crop_margin) for i in readable]
        read = dict(zip(readable, self.read(crops), strict=True))
        return [text if isinstance(text, Failure) else self._compare(text, *read[i]) for i, text in enumerate(texts)]

    def read(self, crops: Sequence[Pixels]) -> list[tuple[str, float]]:
        """Text and mean confidence of each RGB crop; ("", 0.0) where nothing is found."""
        if self._paddle is not None:
            return self._paddle.read(crops)
        return [self._read_lines(crop) for crop in crops] if self.detect else self._read_as_line(crops)

    def _compare(self, wanted: str, found: str, confidence: float) -> Outcome:
        wanted = normalize_text(wanted, case_sensitive=self.case_sensitive)
        found = normalize_text(found, case_sensitive=self.case_sensitive)
        similarity = text_similarity(wanted, found)
        detail = {
            "text": found,
            "ned": similarity,
            "exact": wanted == found,
            "confidence": confidence,
            "length_ratio": len(found) / len(wanted),
        }
        return Score(similarity if self.kind == "ned" else confidence, detail)

    def _read_lines(self, crop: Pixels) -> tuple[str, float]:
        # rapidocr remembers these three flags between calls: always pass all of them
        output = self._engine(_bgr(crop), use_det=True, use_cls=False, use_rec=True)
        if not output.txts:  # None where nothing was found
            return "", 0.0
        return " ".join(output.txts), float(np.mean(output.scores))

    def _read_as_line(self, crops: Sequence[Pixels]) -> list[tuple[str, float]]:
        """The recogniser alone, on batches of one padded width."""
        from rapidocr.ch_ppocr_rec import TextRecInput

        recognizer = self._engine._load_rec_model()  # the public call takes one picture at a time
        recognizer.rec_batch_num = _BATCH
        results: list[tuple[str, float]] = [("", 0.0)] * len(crops)
        buckets: dict[int, list[int]] = {}
        for i, crop in enumerate(crops):
            width = math.ceil(_HEIGHT * crop.shape[1] / crop.shape[0])
            buckets.setdefault(math.ceil(width / _BUCKET) * _BUCKET, []).append(i)
        for width, members in buckets.items():
            recognizer.rec_image_shape = [3, _HEIGHT, width]
            output = recognizer(TextRecInput(img=[_bgr(crops[i]) for i in members], return_word_box=False))
            for i, text, confidence in zip(members, output.txts, output.scores, strict=True):
                results[i] = (text, float(confidence))
        return results


def unusable_mask(item: RewardItem) -> Failure | None:
    """A failure where the mask has no box in the image: the whole picture is not what it asked to be read."""
    if item.mask is None:
        return None
    if item.mask.shape != item.image.shape[:2]:
        return Failure("bad_item", f"image {item.image.shape[:2]} and mask {item.mask.shape} must have one size")
    if not (item.mask >= MASK_THRESHOLD).any():
        return Failure("bad_item", "the mask is empty: there is nothing in it to read; send none to read all")
    return None


def _unreadable(item: RewardItem, margin: float) -> Failure | None:
    wrong = unusable_mask(item)
    if wrong is not None:
        return wrong
    height, width = crop_for(item, margin).shape[:2]
    if max(height, width) > _LONGEST * min(height, width):
        return Failure("bad_item", f"no text fits in {width} x {height} pixels; paint a mask less long and narrow")
    return None


def crop_for(item: RewardItem, margin: float) -> Pixels:
    """The mask box of the image, widened; the whole image without a mask. The mask is no `unusable_mask`."""
    if item.mask is None:
        return item.image
    left, top, right, bottom = widen(mask_box(item.mask), margin, item.image.shape[1], item.image.shape[0])
    return item.image[top:bottom, left:right]


def _bgr(pixels: Pixels) -> Pixels:
    return np.ascontiguousarray(pixels[..., ::-1])


def _version() -> str:
    try:
        return importlib.metadata.version("rapidocr")
    except importlib.metadata.PackageNotFoundError:
        return "missing"
