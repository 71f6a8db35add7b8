"""The masked region is scored by its fit to the prompt, the rest by the seam, each weighted by its share of the image.

Large masks are scored mostly by their content, small ones by the seam. The parts are scaled to [0, 1] by fixed bounds,
because a scorer receives images and no groups; for parts that are normalised within groups use entries `clip` (with
`crop: mask_box`) and `seam` with weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from pydantic import model_validator

from retouch.imaging.masks import MASK_THRESHOLD
from retouch.rewards.base import PackageScorer, RewardEntry
from retouch.rewards.protocol import RewardItem
from retouch.rewards.scorers.clip import ClipReward
from retouch.rewards.scorers.hps import HpsV2Reward
from retouch.rewards.scorers.seam import SeamReward
from retouch.rewards.views import cropped
from retouch.types import Failure, Outcome, Score

_LEAST = 224  # pixels of a side: what the encoders see


class MaskCompositeReward(RewardEntry):
    """masked share x fit of the mask box to the prompt + unmasked share x (1 + seam), in [0, 1]."""

    images = frozenset({"mask"})

    scorer: Literal["mask_composite"] = "mask_composite"
    paste_back: bool = False
    """True scores the hard edge that pasting creates."""
    judge: Literal["clip", "hpsv2"] = "clip"
    """Model that scores the mask box."""
    path: str = ""
    """Hub id or folder of that model; empty uses its default."""
    low: float = 0.15
    """Value of the model that counts as 0."""
    high: float = 0.35
    """Value of the model that counts as 1."""

    @model_validator(mode="after")
    def _bounds_in_order(self) -> MaskCompositeReward:
        if self.high <= self.low:
            raise ValueError(f"high: given {self.high:g}, but low is {self.low:g}; set high above it")
        return self

    def judge_options(self) -> ClipReward | HpsV2Reward:
        """The entry of the model that scores the mask box."""
        given: dict[str, Any] = {"path": self.path} if self.path else {}
        return ClipReward(**given) if self.judge == "clip" else HpsV2Reward(**given)

    def models(self) -> dict[str, str]:
        return {"path": self.judge_options().path}

    def make(self) -> MaskCompositeScorer:
        return MaskCompositeScorer(self)


class MaskCompositeScorer(PackageScorer[MaskCompositeReward]):
    """m * fit + (1 - m) * (1 + seam), m the masked share of the image; in [0, 1].

    `fit` is the model's value for the mask box (of at least 224 pixels a side), scaled from [low, high] to [0, 1].
    """

    def __init__(self, options: MaskCompositeReward) -> None:
        self.judge = options.judge_options().make()
        self._seam = SeamReward().make()
        super().__init__(options)
        self._describe()

    def load(self, device: str) -> None:
        """Load the model.

        Raises:
            ConfigError: its library or weights are missing.
        """
        self.judge.load(device)
        self._describe()

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        seams = self._seam.score(items)
        # without the source, which nothing scores, and of which another size would leave the image whole
        fits = self.judge.score([cropped(replace(item, source=None), 0.0, _LEAST) for item in items])
        return [self._measured(*row) for row in zip(items, fits, seams, strict=True)]

    def _measured(self, item: RewardItem, fit: Outcome, seam: Outcome) -> Outcome:
        for part in (seam, fit):
            if isinstance(part, Failure):
                return part
        assert item.mask is not None and isinstance(fit, Score) and isinstance(seam, Score)  # spec.needs
        low, high = self.options.low, self.options.high
        share = float((item.mask >= MASK_THRESHOLD).mean())
        scaled = float(np.clip((fit.value - low) / (high - low), 0, 1))
        detail = {"mask_share": share, "judge": fit.value, "seam": seam.value}
        return Score(share * scaled + (1 - share) * (1 + seam.value), detail)

    def _describe(self) -> None:
        bounds = f"{self.options.low:g}..{self.options.high:g}"
        self.set_revision(f"{self.judge.spec.revision} {bounds} seam {self._seam.spec.revision}")
        self.spec = replace(self.spec, licence=self.judge.spec.licence)
