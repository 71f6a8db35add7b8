"""CLIP-R-precision (Park et al., NeurIPS 2021 data sets and benchmarks): does CLIP find the prompt of an image among
the prompts of others?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

from retouch.lru import LruCache
from retouch.rewards.base import PackageScorer, RewardEntry
from retouch.rewards.protocol import RewardItem
from retouch.rewards.scorers.clip import ClipTowers
from retouch.types import Failure, Outcome, Score

if TYPE_CHECKING:
    from torch import Tensor

OTHERS = "other_prompts"
"""Key of an item's metadata: the prompts that compete with its own."""

_MOST = 1000


class ClipRPrecisionReward(RewardEntry):
    """1 if the prompt has a higher CLIP cosine with the image than each of `metadata.other_prompts`, else 0. The mean
    is CLIP-R-precision, usually among 100 prompts."""

    licence = "MIT"

    scorer: Literal["clip_r_precision"] = "clip_r_precision"
    path: str = "openai/clip-vit-large-patch14"
    """Hub id or folder of a `CLIPModel`."""
    processor: str = ""
    """Hub id or folder of its processor, if it is elsewhere."""

    def make(self) -> ClipRPrecisionScorer:
        return ClipRPrecisionScorer(self)


class ClipRPrecisionScorer(PackageScorer[ClipRPrecisionReward]):
    """Ranks the prompt of each image; embeddings of texts are kept, because the items of a benchmark share them."""

    def __init__(self, options: ClipRPrecisionReward) -> None:
        super().__init__(options, f"clip_r_precision {options.path}")
        self._towers: ClipTowers | None = None
        self._kept: LruCache[str, Tensor] = LruCache(10 * _MOST)

    def load(self, device: str) -> None:
        o = self.options
        self._towers = ClipTowers(o.path, o.processor, device)
        self.set_revision(f"clip_r_precision {self._towers.revision}")

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        return [self._ranked(item) for item in items]

    def _ranked(self, item: RewardItem) -> Outcome:
        own, others = item.prompt, other_prompts(item.metadata, item.prompt)
        if isinstance(others, Failure):
            return others
        towers = self._towers
        assert towers is not None
        seen = towers.of_images([item.image])[0]
        vectors = self._kept.get_all([own, *others], lambda texts: (towers.of_texts([text])[0] for text in texts))
        cosines = [float(seen @ vector) for vector in vectors]
        if not all(map(math.isfinite, cosines)):  # no comparison with NaN holds: the rank would be 1
            return Failure("scorer_error", "the embedding of the image or of a prompt contains NaN or Inf")
        rank = rank_of_first(cosines)
        return Score(float(rank == 1), {"rank": rank, "prompts": len(cosines)})


def rank_of_first(cosines: Sequence[float]) -> int:
    """Place of the first among all, from 1: the number of higher ones and 1."""
    return 1 + sum(other > cosines[0] for other in cosines[1:])


def other_prompts(metadata: Mapping[str, Any], own: str) -> list[str] | Failure:
    """The prompts that compete with an item's own; a failure without any, because the rank among none is 1."""
    given = metadata.get(OTHERS)
    listed = cast("list[Any]", given) if isinstance(given, list) else []
    if not 0 < len(listed) <= _MOST or not all(isinstance(text, str) for text in listed):
        return Failure("bad_item", f"metadata.{OTHERS} must be a list of 1 to {_MOST} texts")
    others = [text for text in cast("list[str]", listed) if text != own]
    return others or Failure("bad_item", f"metadata.{OTHERS} holds no text but the prompt itself")
