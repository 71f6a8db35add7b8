"""Rewards of what a text encoder said before the picture was drawn (algorithm vlm_grpo); they look at no picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from retouch.rewards.completions import score_completion, think_format
from retouch.rewards.protocol import RewardItem, ScorerSpec
from retouch.types import Failure, Outcome, Score

MISSING = Failure("bad_item", "metadata has no completion; only runs of vlm_grpo have one")


class ThinkFormatScorer:
    """1 for a thought in its tags and an answer behind them, else 0."""

    def __init__(self) -> None:
        self.spec = ScorerSpec("think_format", (0.0, 1.0), frozenset(), "1", "Apache-2.0")

    def load(self, device: str) -> None:
        """Nothing to load."""

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        texts = [item.metadata.get("completion") for item in items]
        return [Score(think_format(text)) if isinstance(text, str) else MISSING for text in texts]


class CompletionQualityScorer:
    """Length and distinctness of the answer, in [0, 1]; half of it where the answer ran into its limit.

    Args:
        min_words, max_words: bounds of the answer.
    """

    def __init__(
        self, min_words: Annotated[int, Field(ge=1)] = 8, max_words: Annotated[int, Field(ge=1)] = 300
    ) -> None:
        self.min_words, self.max_words = min_words, max_words
        revision = f"1 words={min_words}-{max_words}"
        self.spec = ScorerSpec("completion_quality", (0.0, 1.0), frozenset(), revision, "Apache-2.0")

    def load(self, device: str) -> None:
        """Nothing to load."""

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        return [self._one(item) for item in items]

    def _one(self, item: RewardItem) -> Outcome:
        text = item.metadata.get("completion")
        if not isinstance(text, str):
            return MISSING
        found = score_completion(text, bool(item.metadata.get("finished", True)), self.min_words, self.max_words)
        return Score(found.value, {"length": found.length, "distinctness": found.distinctness})
