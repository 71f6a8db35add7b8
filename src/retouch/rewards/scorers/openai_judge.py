"""A VLM behind any OpenAI-compatible endpoint (OpenAI, vLLM, SGLang) as the judge.

`logprobs` takes the expectation over the probabilities of the score tokens "0" .. "5": a fine-grained score from one
token. `rubric` requests JSON by a schema, and once more, with the validation error, if the answer does not match it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from retouch.config.base import Unit, containing
from retouch.rewards.protocol import RewardItem
from retouch.rewards.scorers.judge_client import JudgeError, image_part
from retouch.rewards.scorers.judge_replies import text_of
from retouch.rewards.scorers.judged import (
    LOGPROBS,
    AnswerError,
    JudgeEntry,
    JudgeScorer,
    integer_schema,
    read_integers,
    schema_of,
)
from retouch.types import Failure, Outcome, Score

_MOST = 5
_ANSWER = {
    "logprobs": f"Answer with one digit from 0 (not at all) to {_MOST} (perfectly) and nothing else.",
    "rubric": f'Answer with JSON: {{"score": integer from 0 (not at all) to {_MOST} (perfectly), "reason": text}}.',
}
_ROUNDING = 0.05  # of probabilities that an engine computes in 16 bits
_SCHEMA = schema_of("verdict", {"reason": {"type": "string"}, "score": integer_schema(_MOST)})


class OpenAIJudgeReward(JudgeEntry):
    """Score of a VLM behind an OpenAI-compatible endpoint (OpenAI, vLLM, SGLang), in [0, 1]. The API key is read from
    OPENAI_API_KEY."""

    scorer: Literal["openai_judge"] = "openai_judge"
    # its text is part of the revision, and another one gives other scores
    question: Annotated[str, containing("{prompt}", "the item's prompt")] = (
        "How well does this picture show what was asked for? It was asked for: {prompt}"
    )
    """Question to the judge; {prompt} stands for the item's prompt."""
    mode: Literal["logprobs", "rubric"] = "logprobs"
    """The expectation over the probabilities of the digits 0 to 5; or JSON with a score and a reason."""
    min_mass: Annotated[Unit, LOGPROBS] = 0.5
    """Minimum probability of the digits together; below it the judge answered something else, which is a failure."""

    def make(self) -> OpenAIJudgeScorer:
        return OpenAIJudgeScorer(self, self.question, self.mode, self.min_mass)


class OpenAIJudgeScorer(JudgeScorer[OpenAIJudgeReward]):
    """The judge's score divided by its maximum."""

    def _first_question(self, item: RewardItem) -> object:
        try:
            outcome = self._ask(item, 0.0, again=False)
        except AnswerError as error:
            outcome = Failure("scorer_error", str(error))
        if isinstance(outcome, Failure):
            raise JudgeError(f"mode {self.options.mode!r} does not work there: {outcome.message}")
        return outcome

    def _one(self, item: RewardItem) -> Outcome:
        return self._ask(item, self.options.min_mass)

    def _ask(self, item: RewardItem, min_mass: float, again: bool = True) -> Outcome:
        return self._by_logprobs(item, min_mass) if self.options.mode == "logprobs" else self._by_rubric(item, again)

    def _by_logprobs(self, item: RewardItem, min_mass: float) -> Outcome:
        messages = [{"role": "user", "content": self._content(item)}]
        choice = self.judge.ask(messages, max_tokens=1, logprobs=True, top_logprobs=20)
        try:
            top: list[Any] = choice["logprobs"]["content"][0]["top_logprobs"]
            value, mass = expectation(top, {str(k): k / _MOST for k in range(_MOST + 1)})
        except (KeyError, TypeError, IndexError, ValueError, OverflowError):
            return Failure("scorer_error", "the reply has no log-probabilities")
        if mass < min_mass or not mass:
            return Failure(
                "low_mass", f"the score tokens have {mass:.2f} of the probability; answer: {text_of(choice)!r}"
            )
        return Score(value, {"mass": mass})

    def _by_rubric(self, item: RewardItem, again: bool) -> Outcome:
        verdict = self._structured(
            self._content(item), _SCHEMA, lambda text: read_integers(text, ["score"], _MOST, ["reason"]), again=again
        )
        return Score(verdict["score"] / _MOST, {"reason": str(verdict["reason"])})

    def _content(self, item: RewardItem) -> list[dict[str, Any]]:
        """The question before the image: the prefix that all items share can stay in an engine's cache."""
        text = f"{self.options.question.replace('{prompt}', item.prompt)}\n{_ANSWER[self.options.mode]}"
        return [{"type": "text", "text": text}, image_part(item.image)]


def expectation(top: Sequence[Mapping[str, Any]], values: Mapping[str, float]) -> tuple[float, float]:
    """Mean of the values under the probabilities of their tokens, and the sum of these probabilities.

    Args:
        top: `top_logprobs` of one position: [{"token", "logprob"}].
        values: token, in lower case and without white space, -> its value. Variants of a token are summed.

    Raises:
        ValueError: no log-probabilities: some endpoints write 0 for each token, and their mean would be a score.
    """
    mass: dict[str, float] = dict.fromkeys(values, 0.0)
    for entry in top:
        word = str(entry["token"]).strip().lower()
        if word in mass:
            mass[word] += math.exp(float(entry["logprob"]))
    total = sum(mass.values())
    if not total <= 1 + _ROUNDING:
        raise ValueError(f"probabilities that sum to {total:g}")
    return (sum(values[word] * p for word, p in mass.items()) / total if total > 0 else 0.0), total
