"""UnifiedReward (arXiv 2503.05236): a judge of generated images, behind an OpenAI-compatible endpoint.

`form: axes` is the point score of version 2.0: alignment, coherence and style, each in [1, 5], averaged. `form: point`
is that of version 1: a list of elements, then one score in [1, 5]. `form: pair` is the pair score of version 2.0: for
the same three axes, two scores that sum to 1; both orders of every pair are asked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from retouch.rewards.protocol import RewardItem
from retouch.rewards.rubrics import PROMPT, rubric
from retouch.rewards.scorers.judge_client import image_part
from retouch.rewards.scorers.judge_replies import cut, read_by, text_of
from retouch.rewards.scorers.judged import AnswerError
from retouch.rewards.scorers.pairing import PairEntry, PairScorer
from retouch.types import Failure, Outcome, Score

AXES = ("alignment", "coherence", "style")
_LOWEST, _HIGHEST = 1.0, 5.0
_SUM_SLACK = 0.02  # the scores of a pair are text of a language model, with rounded digits
_INDENT = r"[^\S\n]*"  # within the line: over empty lines, the time would grow with their square
_NUMBER = r"([+-]?\d+(?:\.\d+)?)"
_MAX_TOKENS = 1024


class UnifiedRewardReward(PairEntry):
    """UnifiedReward of an image and its prompt, by a judge behind an OpenAI-compatible endpoint: a score in [1, 5], or
    the probability to be better than the other samples of the group."""

    value_range = (0.0, 5.0)
    licence = "MIT"

    scorer: Literal["unified_reward"] = "unified_reward"
    form: Literal["axes", "point", "pair"] = "axes"
    """Question to the judge: "axes" of version 2.0 (mean of alignment, coherence and style), "point" of version 1 (one
    score), both in [1, 5]; or "pair" of version 2.0, in [0, 1]."""

    def compares_pairs(self) -> bool:
        return self.form == "pair"

    def make(self) -> UnifiedRewardScorer:
        return UnifiedRewardScorer(self, rubric(f"unified_reward_{self.form}"), self.against, self.rounds)


class UnifiedRewardScorer(PairScorer[UnifiedRewardReward]):
    """The score of the chosen form; the scores of the axes are its detail."""

    def set_revision(self, revision: str) -> None:
        super().set_revision(revision)
        span = (0.0, 1.0) if self.options.form == "pair" else (_LOWEST, _HIGHEST)
        self.spec = replace(self.spec, range=span)

    def _first_question(self, item: RewardItem) -> object:
        return self.ask_pair(item, item) if self.options.form == "pair" else self._point(item)

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        if self.options.form == "pair":
            return self.score_pairs(items)
        return [one if isinstance(one, Failure) else _mean(one) for one in self._answers(self._point, items)]

    def ask_pair(self, first: RewardItem, second: RewardItem) -> float:
        shares = self._ask(first.prompt, [image_part(first.image), image_part(second.image)], read_pair)
        return sum(shares.values()) / len(shares)

    def _point(self, item: RewardItem) -> dict[str, float]:
        read = read_axes if self.options.form == "axes" else lambda text: {"score": read_point(text)}
        return self._ask(item.prompt, [image_part(item.image)], read)

    def _ask(
        self, prompt: str, images: list[dict[str, Any]], read: Callable[[str], dict[str, float]]
    ) -> dict[str, float]:
        """The result of `read` on the greedy answer of the judge to images, then the question, as the model was
        trained."""
        question = rubric(f"unified_reward_{self.options.form}").replace(PROMPT, prompt)
        content = [*images, {"type": "text", "text": question}]
        choice = self.judge.ask([{"role": "user", "content": content}], max_tokens=_MAX_TOKENS)
        text = text_of(choice)
        if text[-1:].isdigit() and (ending := cut(choice, text)):
            raise AnswerError(f"the last number may be incomplete{ending}")
        try:
            return read_by(read, choice)
        except ValueError as error:
            raise AnswerError(str(error)) from None


def read_axes(text: str) -> dict[str, float]:
    """Scores in [1, 5] by axis, from lines like "Alignment Score (1-5): 2.69".

    Raises:
        ValueError: an axis without a score or with two, or a score out of range.
    """
    return {
        axis: _in_range(
            axis, re.findall(rf"(?m)^{_INDENT}{axis.capitalize()} Score \(1-5\): {_NUMBER}\s*$", text), text
        )
        for axis in AXES
    }


def read_point(text: str) -> float:
    """The score in [1, 5] after "Final Score:".

    Raises:
        ValueError: no score, two of them, or one out of range.
    """
    return _in_range("Final Score", re.findall(rf"Final Score:\s*{_NUMBER}\s*$", text, re.MULTILINE), text)


def read_pair(text: str) -> dict[str, float]:
    """Shares of image 1 in [0, 1] by axis, from blocks like "Alignment Score: / Image 1: .44 / Image 2: .56".

    Raises:
        ValueError: an axis without two scores, or scores that do not sum to 1.
    """
    shares: dict[str, float] = {}
    for axis in AXES:
        block = rf"(?m)^{_INDENT}{axis.capitalize()} Score:\s*Image 1: {_NUMBER}\s*Image 2: {_NUMBER}\s*$"
        found = re.findall(block, text)
        if len(found) != 1:
            raise ValueError(f"the answer must have one pair of scores for {axis}; given {text[:80]!r}")
        first, second = map(float, found[0])
        if not (0 <= first <= 1 and 0 <= second <= 1 and abs(first + second - 1) <= _SUM_SLACK):
            raise ValueError(f"the scores for {axis} must sum to 1; given {first:g} and {second:g}")
        shares[axis] = first / (first + second)
    return shares


def _in_range(name: str, found: Sequence[str], text: str) -> float:
    if len(found) != 1:
        raise ValueError(f"the answer must have one score for {name}; given {text[:80]!r}")
    value = float(found[0])
    if not _LOWEST <= value <= _HIGHEST:
        raise ValueError(f"the score for {name} must be from 1 to 5; given {value:g}")
    return value


def _mean(scores: dict[str, float]) -> Score:
    return Score(sum(scores.values()) / len(scores), scores if len(scores) > 1 else {})
