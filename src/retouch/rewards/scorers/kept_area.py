"""Pixel errors of the unmasked region, as PSNR and MSE, in the usual form and in BrushBench's.

BrushBench (arXiv 2403.06976) divides the sum over three channels by the number of pixels: its MSE is three times the
usual one and its PSNR 4.77 dB lower; an MSE below 1e-10 counts as 1000 dB.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from retouch.rewards.base import NO_NETWORK, PackageScorer, RewardEntry
from retouch.rewards.protocol import RewardItem
from retouch.rewards.scorers.preservation import pasted, unmasked_difference
from retouch.types import Failure, Outcome, Score

_HIGHEST = 100.0
"""PSNR in dB of images without a difference: about 1e-10, the square of the smallest float32 difference to 1."""


class KeptAreaReward(RewardEntry):
    """PSNR of the unmasked region to the source in dB, at most 100; meant for the raw sample."""

    images = frozenset({"mask", "source"})
    value_range = (0.0, _HIGHEST)
    cpu_only = NO_NETWORK

    scorer: Literal["kept_area"] = "kept_area"
    paste_back: bool = False
    """True scores the composite, whose PSNR is 100 by construction."""

    def advice(self, name: str) -> list[str]:
        return [pasted(name, "100")] if self.paste_back else []

    def make(self) -> KeptAreaScorer:
        return KeptAreaScorer(self)


class KeptAreaScorer(PackageScorer[KeptAreaReward]):
    """PSNR; detail: `psnr`, `mse`, and as BrushBench computes them `brushbench_psnr`, `brushbench_mse`."""

    def _one(self, item: RewardItem) -> Outcome:
        difference = unmasked_difference(item)
        if isinstance(difference, Failure):
            return difference
        summed = float(((difference.astype(np.float64) / 255) ** 2).sum() / len(difference))  # over channels
        mse = summed / 3
        psnr = min(_HIGHEST, -10 * math.log10(mse)) if mse > 0 else _HIGHEST
        detail = {
            "psnr": psnr,
            "mse": mse,
            "brushbench_psnr": 1000.0 if summed < 1e-10 else -10 * math.log10(summed),
            "brushbench_mse": summed,
        }
        return Score(psnr, detail)
