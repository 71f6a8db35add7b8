"""EditScore (arXiv 2509.23909): a judge that was trained to score edits, behind an OpenAI-compatible endpoint.

Per pass, two questions with two scores each: success of the edit and freedom from over-editing, with source and sample;
naturalness and freedom from artefacts, with the sample alone. The pass scores sqrt(min of the first two * min of the
second two), in [0, 10]; the value is the mean over the passes.

Answers are read strictly. The published package replaces an answer that it cannot read by a random number or by 5, and
one out of range by 12.5; here the question is repeated once with another seed, and a second such answer is a failure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, Literal, cast

from retouch.config.base import Count, NonNegative
from retouch.errors import shown
from retouch.files import plain_json
from retouch.rewards.base import Question
from retouch.rewards.protocol import RewardItem
from retouch.rewards.rubrics import PROMPT, rubric
from retouch.rewards.scorers.judge_client import image_part, is_openai
from retouch.rewards.scorers.judge_replies import read_by
from retouch.rewards.scorers.judged import AnswerError, JudgeEntry, JudgeScorer, whole
from retouch.types import Failure, Outcome, Score

RANGE = 25
"""Highest score of the questions; the released models were trained with it."""

_TRIES = 2
_SEED = 42  # of the package: pass k has seed 42 + k
_SAMPLING = {"top_p": 0.9, "max_tokens": 512}
_TOP_K = 20


class EditScoreReward(JudgeEntry):
    """EditScore of an edit, in [0, 10]: a judge trained to score edits, behind an OpenAI-compatible endpoint. Needs a
    source image."""

    value_range = (0.0, 10.0)
    images = frozenset({"source"})
    scores_edits = True
    licence = "Apache-2.0"

    scorer: Literal["editscore"] = "editscore"
    passes: Count = 1
    """Number of passes that are averaged, two questions each: four are worth more than a larger model. If one of them
    fails, the item fails."""
    temperature: NonNegative = 0.7
    """Sampling temperature of the answers, as published; at 0 further passes repeat the first."""

    def questions(self, group_size: int) -> tuple[Question, ...]:
        return tuple(self._question(images, number=self.passes, text=600, tokens_out=150) for images in (2, 1))

    def make(self) -> EditScoreScorer:
        return EditScoreScorer(
            self, rubric("editscore_edit"), rubric("editscore_quality"), self.passes, self.temperature
        )


class EditScoreScorer(JudgeScorer[EditScoreReward]):
    """Mean overall score of the passes; the means of its parts, in [0, 10] too, are its detail."""

    first_prompt = "Change nothing."

    def _first_question(self, item: RewardItem) -> object:
        return self._pass(item, 0)

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        count = self.options.passes
        answers = self._answers(lambda task: self._pass(*task), [(item, k) for item in items for k in range(count)])
        return [outcome_of(answers[i : i + count]) for i in range(0, len(answers), count)]

    def _pass(self, item: RewardItem, number: int) -> list[float]:
        assert item.source is not None  # spec.needs
        asked = {"type": "text", "text": rubric("editscore_edit").replace(PROMPT, item.prompt)}
        edit = self._scores([image_part(item.source), image_part(item.image), asked], number)
        return edit + self._scores(
            [image_part(item.image), {"type": "text", "text": rubric("editscore_quality")}], number
        )

    def _scores(self, content: list[dict[str, Any]], number: int) -> list[float]:
        """The two scores of an answer.

        Raises:
            AnswerError: none of the tries has two scores in range.
        """
        options = {**_SAMPLING, "temperature": self.options.temperature}
        if not is_openai(self.judge.address):  # an extension of vLLM and SGLang
            options["top_k"] = _TOP_K
        problem = ""
        for attempt in range(_TRIES):
            seed = _SEED + number + attempt * self.options.passes
            choice = self.judge.ask([{"role": "user", "content": content}], seed=seed, **options)
            try:
                return read_by(read_scores, choice)
            except ValueError as error:
                problem = str(error)
        raise AnswerError(f"no scores in {_TRIES} answers: {problem}")


_FENCED = re.compile(r"```(?:json)?(.*)```", re.DOTALL)


def read_scores(text: str, count: int = 2, most: float = RANGE) -> list[float]:
    """The numbers under "score" of an answer {"reasoning": text, "score": [numbers]}, with or without a code fence.

    Raises:
        ValueError: another format, another number of scores, or a score outside [0, most].
    """
    fenced = _FENCED.fullmatch(text.strip())
    try:
        found: Any = plain_json.loads(fenced[1].strip() if fenced else text)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}; given {text[:60]!r}") from None
    if not isinstance(found, dict) or "score" not in found:
        raise ValueError(f"it must be an object with a score; given {text[:60]!r}")
    scores: Any = cast("dict[str, Any]", found)["score"]
    if not isinstance(scores, list) or len(cast("list[Any]", scores)) != count:
        raise ValueError(f"score must be a list of {count} numbers; given {shown(scores)}")
    for score in cast("list[Any]", scores):
        if isinstance(score, bool) or not isinstance(score, int | float) or not 0 <= score <= most:
            raise ValueError(f"a score must be a number from 0 to {most:g}; given {shown(score)}")
    return [float(score) for score in cast("list[Any]", scores)]


def overall(scores: Sequence[float], most: float = RANGE) -> float:
    """sqrt(min of the first two * min of the second two), in [0, 10].

    Args:
        scores: success of the edit, freedom from over-editing, naturalness, freedom from artefacts, in [0, most].
    """
    edit, quality = min(scores[:2]) * 10 / most, min(scores[2:]) * 10 / most
    return math.sqrt(edit * quality)


def outcome_of(passes: Sequence[Sequence[float] | Failure]) -> Outcome:
    """The mean of the passes of one item; a failure if one of them failed."""
    scored = whole(passes)
    if isinstance(scored, Failure):
        return scored
    columns = {
        "prompt_following": [one[0] for one in scored],
        "consistency": [one[1] for one in scored],
        "perceptual_quality": [min(one[2:]) for one in scored],
    }
    parts = {name: sum(column) / len(scored) * 10 / RANGE for name, column in columns.items()}
    return Score(sum(map(overall, scored)) / len(scored), parts)
