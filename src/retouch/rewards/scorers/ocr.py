"""Legibility of the target text: rapidocr (PP-OCR on onnxruntime; its weights are in the wheel), PaddleOCR, or a reader
of another lineage (`line_readers`).

The score is 1 - edit distance / longer length between the text read in the mask crop and the target text: it is
symmetric: missing and repeated letters both lower it. The recogniser's confidence alone is no reward: it is .999 on
nonsense.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import model_validator

from retouch.config.base import Unit
from retouch.imaging.lines import folded
from retouch.process.machine import installed_version
from retouch.rewards.protocol import Pixels, RewardItem, text_to_read
from retouch.rewards.scorers import line_readers
from retouch.rewards.scorers.reading import ReadingEntry, ReadingScorer, crop_for, unreadable
from retouch.rewards.text_distance import text_similarity
from retouch.types import Failure, Outcome, Score


class OcrReward(ReadingEntry):
    """Similarity of the text read in the mask crop to the target text, in [0, 1] (rapidocr)."""

    scorer: Literal["ocr"] = "ocr"
    engine: Literal["rapidocr", "paddleocr", "easyocr", "tesseract", "ddddocr"] = "rapidocr"
    """Library that reads. PaddleOCR 3 or newer must be installed separately, and downloads its models. EasyOCR's
    recogniser, tesseract and ddddocr (extra `readers`) read one English line, for gold rewards: set `detect: false`,
    and for ddddocr `case_sensitive: false`."""
    score: Literal["ned", "confidence"] = "ned"
    """Normalised edit distance, or the recogniser's confidence (which nonsense maximises too)."""
    case_sensitive: bool = True
    """Whether "Moon" and "MOON" differ."""
    crop_margin: Unit = 0.0
    """Widens the mask box by this fraction of its sides before reading."""
    detect: bool = True
    """Find the lines in the crop first; false reads the crop as one line: faster, for crops as large as their text."""

    @model_validator(mode="after")
    def _fits_the_engine(self) -> OcrReward:
        if self.engine not in line_readers.PACKAGES:
            return self
        if self.detect:
            raise ValueError(f"detect: given true, but {self.engine} reads a crop as one line; set detect=false")
        if self.language is not None:
            raise ValueError(f"language: given {self.language!r}, but {self.engine} reads English; leave language out")
        if self.engine == "ddddocr" and self.case_sensitive:
            raise ValueError(
                "case_sensitive: given true, but ddddocr does not distinguish capitals from small letters; set "
                "case_sensitive=false"
            )
        return self

    def finds_lines(self) -> bool:
        return self.detect

    def extras(self) -> frozenset[str]:
        return frozenset({"readers"}) if self.engine in line_readers.PACKAGES else super().extras()

    def reader(self) -> str:
        packages = line_readers.PACKAGES.get(self.engine)
        return " ".join([self.engine, *map(installed_version, packages)]) if packages else super().reader()

    def make(self) -> OcrScorer:
        return OcrScorer(self)


class OcrScorer(ReadingScorer[OcrReward]):
    """Reads the mask crop of each item."""

    def __init__(self, options: OcrReward) -> None:
        o = options
        super().__init__(o, f"score={o.score} case={o.case_sensitive} margin={o.crop_margin} detect={o.detect}")

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        margin = self.options.crop_margin
        texts = [unreadable(item, margin) or text_to_read(item) for item in items]
        readable = [i for i, text in enumerate(texts) if isinstance(text, str)]
        read = dict(zip(readable, self.read([crop_for(items[i], margin) for i in readable]), strict=True))
        return [text if isinstance(text, Failure) else self._compare(text, *read[i]) for i, text in enumerate(texts)]

    def read(self, crops: Sequence[Pixels]) -> list[tuple[str, float]]:
        """Text and mean confidence of each RGB crop; ("", 0.0) where nothing is found."""
        return self.read_texts(crops) if self.options.detect else self.read_lines(crops)

    def _compare(self, wanted: str, found: str, confidence: float) -> Outcome:
        wanted = folded(wanted, case_sensitive=self.options.case_sensitive)
        if (failure := self.beyond_reader(wanted)) is not None:
            return failure
        found = folded(found, case_sensitive=self.options.case_sensitive)
        similarity = text_similarity(wanted, found)
        detail = {
            "text": found,
            "ned": similarity,
            "exact": wanted == found,
            "confidence": confidence,
            "length_ratio": len(found) / len(wanted),
        }
        return Score(similarity if self.options.score == "ned" else confidence, detail)
