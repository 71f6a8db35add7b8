"""How well a picture compresses: the reward of DDPO (arXiv 2305.13301), whose optimum is known, for trying things."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Annotated

from PIL import Image
from pydantic import Field

from retouch.rewards.protocol import Pixels, RewardItem, ScorerSpec
from retouch.types import Outcome, Score

_MOST = 256.0  # one pixel is a file of some 630 bytes, most of them headers: 210 times its 24 bits


class JpegSizeScorer:
    """-(bits a pixel of the picture as JPEG) / 24, in about [-1, 0] but for thumbnails, of which most is the
    file's headers: smooth pictures score high.

    Args:
        quality: of the JPEG.
        incompressible: raise the size instead of lowering it.
    """

    def __init__(self, quality: Annotated[int, Field(ge=1, le=95)] = 95, incompressible: bool = False) -> None:
        self.quality = quality
        self.sign = 1.0 if incompressible else -1.0
        span = (0.0, _MOST) if incompressible else (-_MOST, 0.0)
        revision = f"1 quality={quality} incompressible={incompressible}"
        self.spec = ScorerSpec("jpeg_size", span, frozenset(), revision, "Apache-2.0")

    def load(self, device: str) -> None:
        """Nothing to load."""

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        sizes = [jpeg_bytes(item.image, self.quality) for item in items]
        pixels = [item.image.shape[0] * item.image.shape[1] for item in items]
        return [Score(self.sign * 8 * n / (24 * p), {"bytes": n}) for n, p in zip(sizes, pixels, strict=True)]


def jpeg_bytes(image: Pixels, quality: int) -> int:
    """Bytes of the picture as JPEG."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG", quality=quality)
    return buffer.tell()
