"""Compressibility (DDPO, arXiv 2305.13301): a reward with a known optimum, for experiments."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Annotated, Literal

from PIL import Image
from pydantic import Field

from retouch.rewards.base import NO_NETWORK, PackageScorer, RewardEntry
from retouch.rewards.protocol import RewardItem
from retouch.types import Score

_MOST = 256.0  # one pixel is a file of some 630 bytes, most of them headers: 210 times its 24 bits


class JpegSizeReward(RewardEntry):
    """-(bits per pixel as JPEG) / 24 (DDPO, arXiv 2305.13301): its optimum is known; for experiments."""

    cpu_only = NO_NETWORK

    scorer: Literal["jpeg_size"] = "jpeg_size"
    quality: Annotated[int, Field(ge=1, le=95)] = 95
    """JPEG quality."""
    incompressible: bool = False
    """Reward a larger file instead of a smaller one."""

    def make(self) -> JpegSizeScorer:
        return JpegSizeScorer(self)


class JpegSizeScorer(PackageScorer[JpegSizeReward]):
    """About [-1, 0], except for thumbnails, which are mostly the file's headers: smooth images score high."""

    def __init__(self, options: JpegSizeReward) -> None:
        super().__init__(options)
        self.spec = replace(self.spec, range=(0.0, _MOST) if options.incompressible else (-_MOST, 0.0))

    def _one(self, item: RewardItem) -> Score:
        buffer = io.BytesIO()
        Image.fromarray(item.image).save(buffer, "JPEG", quality=self.options.quality)
        count = buffer.tell()
        sign = 1.0 if self.options.incompressible else -1.0
        return Score(sign * 8 * count / (24 * (item.image.shape[0] * item.image.shape[1])), {"bytes": count})
