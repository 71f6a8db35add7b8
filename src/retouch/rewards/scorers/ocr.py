"""Legibility of the target text: rapidocr (PP-OCR on onnxruntime; its weights are in the wheel) or PaddleOCR.

The score is 1 - edit distance / longer length between the text read in the mask crop and the target text: it is
symmetric: missing and repeated letters both lower it. The recogniser's confidence alone is no reward: it is .999 on
nonsense.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from retouch.config.base import Unit
from retouch.errors import ConfigError
from retouch.imaging import MASK_THRESHOLD, mask_box, normalize_text, text_similarity, widen
from retouch.rewards.base import PackageScorer, RewardEntry
from retouch.rewards.protocol import Pixels, RewardItem, text_to_read
from retouch.rewards.scorers import paddle
from retouch.types import Failure, Outcome, Score

_HEIGHT = 48  # pixels to which the recogniser scales the height of a line
_BUCKET = 32  # line widths are padded to a multiple of this: a score then does not depend on its batch
_BATCH = 16
_LONGEST = 32  # ratio of the sides of a crop: detection scales the short side up to 736 px, and a sliver takes minutes


class OcrReward(RewardEntry):
    """Similarity of the text read in the mask crop to the target text, in [0, 1] (rapidocr)."""

    scorer: Literal["ocr"] = "ocr"
    score: Literal["ned", "confidence"] = "ned"
    """Normalised edit distance, or the recogniser's confidence (which nonsense maximises too)."""
    case_sensitive: bool = True
    """Whether "Moon" and "MOON" differ."""
    crop_margin: Unit = 0.0
    """Widens the mask box by this fraction of its sides before reading."""
    detect: bool = True
    """Find the lines in the crop first; false reads the crop as one line: faster, for crops as large as their text."""
    threads: Annotated[int, Field(ge=0)] = 0
    """CPU threads of the recogniser; 0 uses all cores."""
    engine: Literal["rapidocr", "paddleocr"] = "rapidocr"
    """Library that reads. PaddleOCR 3 or newer must be installed separately, and downloads its models."""

    @property
    def cpu_only(self) -> str | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.engine == "paddleocr":
            return None
        return "rapidocr reads on the CPU; leave device out, or set engine: paddleocr"

    def make(self) -> OcrScorer:
        return OcrScorer(self)

    def reads_text(self) -> bool:
        return True

    def extras(self) -> frozenset[str]:
        return frozenset({"ocr"} if self.engine == "rapidocr" else ())


class OcrScorer(PackageScorer[OcrReward]):
    """Reads the mask crop of each item."""

    def __init__(self, options: OcrReward) -> None:
        o = options
        version = importlib_version("rapidocr") if o.engine == "rapidocr" else paddle.version()
        settings = f"score={o.score} case={o.case_sensitive} margin={o.crop_margin} detect={o.detect}"
        super().__init__(options, f"{o.engine} {version} {settings}")
        self._engine: Any = None
        self._paddle: paddle.PaddleReader | None = None

    def load(self, device: str) -> None:
        """Build the engine; rapidocr always runs on the CPU.

        Raises:
            ConfigError: the engine is not installed.
        """
        if self.options.engine == "paddleocr":
            self._paddle = paddle.PaddleReader(device, self.options.detect, self.options.threads)
            return
        try:
            from rapidocr import RapidOCR
        except ImportError:
            raise ConfigError('the ocr reward needs rapidocr: pip install "retouch[ocr]"') from None
        self._engine = RapidOCR(
            params={
                "Global.log_level": "error",
                "Global.text_score": 0.0,  # keep unsure readings: a wrong letter is a lower score, not an empty one
                "Global.use_cls": False,  # the angle classifier turns short words upside down
                "EngineConfig.onnxruntime.intra_op_num_threads": self.options.threads or -1,
            }
        )

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        margin = self.options.crop_margin
        texts = [unreadable(item, margin) or text_to_read(item) for item in items]
        readable = [i for i, text in enumerate(texts) if isinstance(text, str)]
        read = dict(zip(readable, self.read([crop_for(items[i], margin) for i in readable]), strict=True))
        return [text if isinstance(text, Failure) else self._compare(text, *read[i]) for i, text in enumerate(texts)]

    @property
    def engine(self) -> Any:
        """The loaded `rapidocr.RapidOCR`; None with PaddleOCR."""
        return self._engine

    def read(self, crops: Sequence[Pixels]) -> list[tuple[str, float]]:
        """Text and mean confidence of each RGB crop; ("", 0.0) where nothing is found."""
        if self._paddle is not None:
            return self._paddle.read(crops)
        return [self._read_lines(crop) for crop in crops] if self.options.detect else self._read_as_line(crops)

    def _compare(self, wanted: str, found: str, confidence: float) -> Outcome:
        wanted = normalize_text(wanted, case_sensitive=self.options.case_sensitive)
        found = normalize_text(found, case_sensitive=self.options.case_sensitive)
        similarity = text_similarity(wanted, found)
        detail = {
            "text": found,
            "ned": similarity,
            "exact": wanted == found,
            "confidence": confidence,
            "length_ratio": len(found) / len(wanted),
        }
        return Score(similarity if self.options.score == "ned" else confidence, detail)

    def _read_lines(self, crop: Pixels) -> tuple[str, float]:
        # rapidocr keeps these three flags between calls: always pass all of them
        output = self._engine(_bgr(crop), use_det=True, use_cls=False, use_rec=True)
        if not output.txts:  # None where nothing was found
            return "", 0.0
        return " ".join(output.txts), float(np.mean(output.scores))

    def _read_as_line(self, crops: Sequence[Pixels]) -> list[tuple[str, float]]:
        """The recogniser alone, on batches of one padded width."""
        from rapidocr.ch_ppocr_rec import TextRecInput

        recognizer = self._engine._load_rec_model()  # the public call takes one image at a time
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
    """A failure if the item has an empty mask or one of another size; the whole image is not read instead."""
    if item.mask is None:
        return None
    if item.mask.shape != item.image.shape[:2]:
        return Failure("bad_item", f"image {item.image.shape[:2]} and mask {item.mask.shape} must have one size")
    if not (item.mask >= MASK_THRESHOLD).any():
        return Failure("bad_item", "the mask is empty: there is nothing in it to read; leave it out to read the image")
    return None


def unreadable(item: RewardItem, margin: float) -> Failure | None:
    """A failure if the mask cannot be used, or its crop is too narrow to hold text."""
    wrong = unusable_mask(item)
    if wrong is not None:
        return wrong
    height, width = crop_for(item, margin).shape[:2]
    if max(height, width) > _LONGEST * min(height, width):
        return Failure("bad_item", f"no text fits in {width} x {height} pixels; use a less narrow mask")
    return None


def crop_for(item: RewardItem, margin: float) -> Pixels:
    """The mask box of the image, widened; the whole image without a mask. Check `unusable_mask` first."""
    if item.mask is None:
        return item.image
    left, top, right, bottom = widen(mask_box(item.mask), margin, item.image.shape[1], item.image.shape[0])
    return item.image[top:bottom, left:right]


def _bgr(pixels: Pixels) -> Pixels:
    return np.ascontiguousarray(pixels[..., ::-1])


def importlib_version(package: str) -> str:
    """Installed version of a package; "missing" without one."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"
