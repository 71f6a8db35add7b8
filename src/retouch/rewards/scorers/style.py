"""Similarity of the text's style to the style reference by an image encoder, gated by legibility.

The encoder alone is a poor judge: a copy of the reference, letters included, would score highest. The similarity
therefore counts in full only if the masked region reads as the target text; below `gate` it is scaled by the reading.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from PIL import Image
from pydantic import Field

from retouch.config.base import Text, Unit
from retouch.config.reads import ReadIf
from retouch.rewards.base import PackageScorer, RewardEntry
from retouch.rewards.protocol import RewardItem
from retouch.rewards.scorers.ocr import OcrReward
from retouch.rewards.scorers.reading import crop_for, unusable_mask
from retouch.rewards.scorers.weights import model_path, version_of
from retouch.types import Failure, Outcome, Score

if TYPE_CHECKING:
    from retouch.families.image_encoder import ImageEncoder


READING = ReadIf(
    "with a `gate` above 0", lambda own: own.gate, "but gate is 0: nothing is read; leave it out", warns=True
)


class StyleReward(RewardEntry):
    """Similarity of the masked region to the style reference by an image encoder, gated by how legible its text is."""

    images = frozenset({"reference"})

    scorer: Literal["style"] = "style"
    image_encoder: Text = "google/siglip-so400m-patch14-384"
    """Hub id or folder of a SigLIP or CLIP; "tiny" is the one in the package. An encoder other than the one the
    adapter is trained on is harder to exploit."""
    weights_variant: Text | None = None
    """Variant of the encoder's weight files to read where it has them: "fp16" for `*.fp16.safetensors`."""
    gate: Unit = 0.5
    """Reading (as of the ocr reward) from which the similarity counts in full, below it in proportion; 0 disables
    reading."""
    detect: Annotated[bool, READING] = True
    """For the reading: find the lines in the crop first; false reads the crop as one line."""
    threads: Annotated[int, Field(ge=0, le=1024), READING] = 0
    """CPU threads of the recogniser; 0 uses all cores."""

    def make(self) -> StyleScorer:
        return StyleScorer(self)

    def reads_text(self) -> bool:
        return self.is_made_here and self.gate > 0  # the gate of a running server is the server's

    def lacking(self, text: str) -> list[str]:
        return OcrReward().lacking(text) if self.reads_text() else []

    def extras(self) -> frozenset[str]:
        return frozenset({"ocr"} if self.gate > 0 else ())


class StyleScorer(PackageScorer[StyleReward]):
    """max(0, cosine) between the embeddings of masked region and reference, times min(1, NED / gate)."""

    def __init__(self, options: StyleReward) -> None:
        self._reader = OcrReward(detect=options.detect, threads=options.threads).make() if options.gate else None
        reading = f" {self._reader.spec.revision}" if self._reader else ""
        encoder = options.image_encoder + (f" {options.weights_variant}" if options.weights_variant else "")
        super().__init__(options, f"{encoder} 2 gate={options.gate}{reading}")  # 2: CLIP's normalization
        self._encoder: ImageEncoder | None = None

    def load(self, device: str) -> None:
        """Load the encoder and, if there is a gate, the recogniser.

        Raises:
            ConfigError: no such encoder, or rapidocr is not installed.
        """
        from retouch.families.image_encoder import TINY, ImageEncoder

        path, variant = model_path(self.options.image_encoder), self.options.weights_variant
        self._encoder = ImageEncoder.load(path, where="image_encoder", variant=variant, resident=True)
        self._encoder.to(device)
        self.set_revision(f"{version_of(str(TINY) if path == 'tiny' else path)} {self.spec.revision}")
        if self._reader is not None:
            self._reader.load(device)

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        readings = self._reader.score(items) if self._reader is not None else [unusable_mask(item) for item in items]
        return [self._gated_similarity(item, reading) for item, reading in zip(items, readings, strict=True)]

    def _gated_similarity(self, item: RewardItem, reading: Outcome | None) -> Outcome:
        if isinstance(reading, Failure):
            return reading
        assert item.reference is not None and self._encoder is not None  # spec.needs
        region, reference = self._encoder([Image.fromarray(crop_for(item, 0.0)), Image.fromarray(item.reference)])
        cosine = float(region @ reference / (region.norm() * reference.norm()))
        if not math.isfinite(cosine):  # max would make it 0
            return Failure("scorer_error", "the embedding of the region or of the reference contains NaN or Inf")
        similarity = max(0.0, cosine)
        if reading is None:
            return Score(similarity, {"similarity": similarity})
        ned = reading.value
        return Score(similarity * min(1.0, ned / self.options.gate), {"similarity": similarity, "ned": ned})
