"""A vision-language model behind any OpenAI-compatible endpoint as the judge: OpenAI, vLLM, SGLang.

`logprobs` takes the expectation over the probabilities of the score tokens "0" .. "5": a fine-grained score from one
token. `rubric` asks for JSON by a schema, and asks once more, with the validation error, where the answer is another.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from retouch.config.errors import ConfigError
from retouch.rewards.judge import Budget, BudgetSpent, Judge, JudgeError, expectation, picture_part, read_verdict
from retouch.rewards.protocol import RewardItem, ScorerSpec
from retouch.types import Failure, Outcome, Score

logger = logging.getLogger(__name__)

_MOST = 5
_ANSWER = {
    "logprobs": f"Answer with one digit from 0 (not at all) to {_MOST} (perfectly) and nothing else.",
    "rubric": f'Answer with JSON: {{"score": integer from 0 (not at all) to {_MOST} (perfectly), "reason": text}}.',
}
_SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "verdict",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {
                "reason": {"type": "string"},
                "score": {"type": "integer", "minimum": 0, "maximum": _MOST},
            },
            "required": ["reason", "score"],
            "additionalProperties": False,
        },
    },
}

QUESTION = "How well does this picture show what was asked for? It was asked for: {prompt}"

_Positive = Annotated[float, Field(gt=0)]


class OpenAIJudgeScorer:
    """Value in [0, 1]: the judge's score over its highest. The key is taken from OPENAI_API_KEY.

    Args:
        model: as the endpoint names it; required.
        address: of the endpoint, with /v1.
        question: {prompt} stands for the item's prompt.
        mode: "logprobs" or "rubric".
        min_mass: of the score tokens together; below it the answer was something else, a failure.
        concurrency: questions under way at once.
        requests_per_minute, tokens_per_minute: of the endpoint, shared by all scorers of a process.
        budget_requests, budget_tokens, budget_dollars: limits of this process; what is asked beyond them is a failure.
        price_in, price_out: dollars for a million tokens.
        timeout_s: of one question, retries included.
    """

    def __init__(
        self,
        model: str = "",
        address: str = "https://api.openai.com/v1",
        question: str = QUESTION,
        mode: Literal["logprobs", "rubric"] = "logprobs",
        min_mass: Annotated[float, Field(ge=0, le=1)] = 0.5,
        concurrency: Annotated[int, Field(gt=0)] = 8,
        requests_per_minute: _Positive | None = None,
        tokens_per_minute: _Positive | None = None,
        budget_requests: Annotated[int, Field(gt=0)] | None = None,
        budget_tokens: Annotated[int, Field(gt=0)] | None = None,
        budget_dollars: _Positive | None = None,
        price_in: Annotated[float, Field(ge=0)] = 0.0,
        price_out: Annotated[float, Field(ge=0)] = 0.0,
        timeout_s: _Positive = 60.0,
    ) -> None:
        if not model:
            raise ConfigError("reward 'openai_judge': model: not set; name the model as the endpoint does")
        if "{prompt}" not in question:
            raise ConfigError(f"reward 'openai_judge': question: given {question!r}; it must contain {{prompt}}")
        if budget_dollars is not None and not price_in + price_out:
            raise ConfigError("reward 'openai_judge': budget_dollars needs price_in and price_out")
        self.question = question
        self.mode = mode
        self.min_mass = min_mass
        self.concurrency = concurrency
        self.budget = Budget(budget_requests, budget_tokens, budget_dollars, price_in, price_out)
        try:
            self.judge = Judge(address, model, self.budget, requests_per_minute, tokens_per_minute, timeout_s)
        except ValueError as error:
            raise ConfigError(f"reward 'openai_judge': address: {error}") from None
        self._set_spec(model)

    def load(self, device: str) -> None:
        """Ask a first question: what the endpoint cannot do is found before a run, not in it.

        Raises:
            ConfigError: no such model, a wrong key, no log-probabilities, or a schema that is ignored.
        """
        probe = RewardItem(0, "a grey square", np.full((64, 64, 3), 127, np.uint8))
        try:
            outcome = self._by_logprobs(probe, 0.0) if self.mode == "logprobs" else self._by_rubric(probe, again=False)
        except (JudgeError, BudgetSpent) as error:
            raise ConfigError(f"reward 'openai_judge': {error}") from None
        if isinstance(outcome, Failure):
            raise ConfigError(f"reward 'openai_judge': mode {self.mode!r} does not work there: {outcome.message}")
        self._set_spec(self.judge.served or self.judge.model)

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        with ThreadPoolExecutor(min(self.concurrency, len(items)), thread_name_prefix="judge") as pool:
            outcomes = list(pool.map(self._one, items))
        b = self.budget
        logger.info("judge: %d requests, %d + %d tokens, $%.4f", b.spent_requests, b.spent_in, b.spent_out, b.cost)
        return outcomes

    def _one(self, item: RewardItem) -> Outcome:
        try:
            return self._by_logprobs(item, self.min_mass) if self.mode == "logprobs" else self._by_rubric(item)
        except BudgetSpent as spent:
            return Failure("budget_spent", str(spent))
        except JudgeError as error:
            return Failure("unavailable" if error.retryable else "scorer_error", str(error), error.retryable)

    def _by_logprobs(self, item: RewardItem, min_mass: float) -> Outcome:
        choice = self.judge.ask(self._messages(item), max_tokens=1, logprobs=True, top_logprobs=20)
        try:
            top: list[Any] = choice["logprobs"]["content"][0]["top_logprobs"]
            value, mass = expectation(top, {str(k): k / _MOST for k in range(_MOST + 1)})
        except (KeyError, TypeError, IndexError, ValueError):
            return Failure("scorer_error", "the reply has no log-probabilities")
        if mass <= min_mass:
            said = choice["message"].get("content")
            return Failure("low_mass", f"the score tokens have {mass:.2f} of the probability; it said {said!r}")
        return Score(value, {"mass": mass})

    def _by_rubric(self, item: RewardItem, again: bool = True) -> Outcome:
        messages = self._messages(item)
        content = self.judge.ask(messages, response_format=_SCHEMA)["message"].get("content")
        try:
            score, reason = read_verdict(str(content), _MOST)
        except ValueError as error:
            if not again:
                return Failure("scorer_error", f"the answer does not keep to the schema: {error}")
            messages += [
                {"role": "assistant", "content": str(content)},
                {"role": "user", "content": f"That answer cannot be used: {error}. {_ANSWER['rubric']}"},
            ]
            content = self.judge.ask(messages, response_format=_SCHEMA)["message"].get("content")
            try:
                score, reason = read_verdict(str(content), _MOST)
            except ValueError as still:
                return Failure("scorer_error", f"the answer does not keep to the schema, twice: {still}")
        return Score(score / _MOST, {"reason": reason})

    def _messages(self, item: RewardItem) -> list[dict[str, Any]]:
        """The question before the picture: what all items share is a prefix that an engine may keep."""
        text = f"{self.question.replace('{prompt}', item.prompt)}\n{_ANSWER[self.mode]}"
        return [{"role": "user", "content": [{"type": "text", "text": text}, picture_part(item.image)]}]

    def _set_spec(self, served: str) -> None:
        text = json.dumps([self.question, self.mode, self.min_mass])
        digest = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
        revision = f"openai_judge {self.judge.model} served as {served} {digest}"
        self.spec = ScorerSpec("openai_judge", (0.0, 1.0), frozenset(), revision, "of the model")
