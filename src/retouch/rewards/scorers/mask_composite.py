"""What was repainted by how it fits the prompt, what surrounds it by its seam, each by its share of the picture.

Large holes are judged by what is in them, small ones by how they join. The parts are brought to [0, 1] by fixed
bounds, because a scorer sees pictures and no groups; for parts that are normalised inside groups use entries `clip`
(with `crop: mask_box`) and `seam` with weights of your own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from retouch.config.errors import ConfigError
from retouch.imaging import MASK_THRESHOLD
from retouch.rewards.protocol import RewardItem, ScorerSpec
from retouch.rewards.scorers.clip import ClipScorer
from retouch.rewards.scorers.imscore import HpsV2Scorer
from retouch.rewards.scorers.seam import SeamScorer
from retouch.rewards.views import cropped
from retouch.types import Failure, Outcome, Score

_LEAST = 224  # pixels of a side: what the encoders see


class MaskCompositeScorer:
    """m · fit + (1 - m) · (1 + seam), m the share of the picture that is masked; in [0, 1].

    `fit` is the model's value for the box of the mask (of at least 224 pixels a side), from `low` to `high` brought to
    [0, 1].

    Args:
        judge: "clip", or "hpsv2" in an environment with imscore.
        path: of its model; empty takes its own default.
        low, high: values of the judge that count as 0 and as 1.
    """

    def __init__(
        self,
        judge: Literal["clip", "hpsv2"] = "clip",
        path: str = "",
        low: Annotated[float, Field(allow_inf_nan=False)] = 0.15,
        high: Annotated[float, Field(allow_inf_nan=False)] = 0.35,
    ) -> None:
        if high <= low:
            raise ConfigError(f"reward 'mask_composite': high: given {high:g}, but low is {low:g}; set high above it")
        made = ClipScorer if judge == "clip" else HpsV2Scorer
        self.judge = made(path) if path else made()
        self.low = low
        self.high = high
        self._seam = SeamScorer()
        self._set_spec()

    def load(self, device: str) -> None:
        """Load the judge.

        Raises:
            ConfigError: its library or model is missing.
        """
        self.judge.load(device)
        self._set_spec()

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        seams = self._seam.score(items)
        fits = self.judge.score([cropped(item, 0.0, _LEAST) for item in items])
        return [self._one(*row) for row in zip(items, fits, seams, strict=True)]

    def _one(self, item: RewardItem, fit: Outcome, seam: Outcome) -> Outcome:
        for part in (seam, fit):
            if isinstance(part, Failure):
                return part
        assert item.mask is not None and isinstance(fit, Score) and isinstance(seam, Score)  # spec.needs
        share = float((item.mask >= MASK_THRESHOLD).mean())
        held = float(np.clip((fit.value - self.low) / (self.high - self.low), 0, 1))
        detail = {"mask_share": share, "judge": fit.value, "seam": seam.value}
        return Score(share * held + (1 - share) * (1 + seam.value), detail)

    def _set_spec(self) -> None:
        revision = f"{self.judge.spec.revision} {self.low:g}..{self.high:g} seam {self._seam.spec.revision}"
        self.spec = ScorerSpec("mask_composite", (0.0, 1.0), frozenset({"mask"}), revision, self.judge.licence)
