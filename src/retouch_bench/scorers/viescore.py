"""VIEScore (arXiv 2312.14867): a judge gives integers from 0 to 10 in two questions.

Semantic consistency (SC): for an edit, source and sample are shown, and the two integers are the success of the edit
and how little else changed; for text to image, the sample and one integer. Perceptual quality (PQ): the sample alone;
naturalness and freedom from artefacts. SC and PQ are the lowest of their integers, and O = sqrt(SC PQ).

The published code replaces a second answer without JSON by a random integer, and accepts numbers that are no integers
of the scale or more of them than requested; here such an answer is requested again, once, and is then a failure.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

from PIL import Image

from retouch.config.base import Count, NonNegative
from retouch.files import plain_json
from retouch.imaging.fitting import of_size
from retouch.rewards.base import Question
from retouch.rewards.protocol import RewardItem
from retouch.rewards.scorers.judge_client import Encoding, image_part
from retouch.rewards.scorers.judged import JudgeEntry, JudgeScorer, whole
from retouch.types import Failure, Outcome, Score

MOST = 10
"""Highest integer of an answer."""

_SEMANTIC = {"edit": ("edit_success", "preservation"), "text_to_image": ("prompt_following",)}
_QUALITY = ("naturalness", "artefact_free")
_SLOT = {"edit": "<instruction>", "text_to_image": "<prompt>"}


class VieScoreReward(JudgeEntry):
    """VIEScore (arXiv 2312.14867), in [0, 1]: a judge's integers from 0 to 10 for semantic consistency and perceptual
    quality; sqrt(SC PQ) / 10, where each is the lowest of its integers. Needs a source image with task=edit, and a
    judge as of `openai_judge`. Published numbers, as of GEdit-Bench, are `viescore.overall`, from 0 to 10."""

    scores_edits = True

    scorer: Literal["viescore"] = "viescore"
    task: Literal["edit", "text_to_image"] = "edit"
    """Question about semantic consistency: an edit of the source, or an image of the prompt."""
    encoding: Encoding = "png"
    """Images as the judge gets them: lossless, or as JPEG of quality 75, as in the published numbers of GPT-4.1."""
    temperature: NonNegative = 0.0
    """Sampling temperature of the answers. The published numbers of GPT-4.1 are at 1, the default of its endpoint;
    those of Qwen2.5-VL are greedy."""
    max_tokens: Count = 1400
    """Maximum length of an answer in tokens."""

    def required_images(self) -> frozenset[str]:
        return frozenset({"source"} if self.task == "edit" else ())

    def questions(self, group_size: int) -> tuple[Question, ...]:
        return tuple(self._question(images, text=600, tokens_out=150) for images in (None, 1))

    def make(self) -> VieScoreScorer:
        return VieScoreScorer(
            self, questions(), self.task, self.encoding, self.temperature, self.max_tokens, protocol="viescore"
        )


class VieScoreScorer(JudgeScorer[VieScoreReward]):
    """O / 10; its detail has SC, PQ and O from 0 to 10 and the integers."""

    def _first_question(self, item: RewardItem) -> object:
        return self._ask(item, True), self._ask(item, False)

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        tasks = [(item, semantic) for item in items for semantic in (True, False)]
        answers = self._answers(lambda task: self._ask(*task), tasks)
        return [self._outcome(answers[i : i + 2]) for i in range(0, len(answers), 2)]

    def _outcome(self, answers: Sequence[list[int] | Failure]) -> Outcome:
        both = whole(answers)
        if isinstance(both, Failure):
            return both
        semantic, quality = both
        sc, pq, overall = viescore(semantic, quality)
        parts = dict(zip((*_SEMANTIC[self.options.task], *_QUALITY), (*semantic, *quality), strict=True))
        return Score(
            overall / MOST, {"semantic_consistency": sc, "perceptual_quality": pq, "overall": overall, **parts}
        )

    def _ask(self, item: RewardItem, semantic: bool) -> list[int]:
        """The integers of one of the two questions."""
        o = self.options
        question = questions()[o.task if semantic else "quality"]
        shown = [item.image]
        if o.task == "edit":
            assert item.source is not None  # spec.needs
            sample = of_size(item.image, item.source, Image.Resampling.BICUBIC)  # as published
            shown = [item.source, sample] if semantic else [sample]
        text = question.replace(_SLOT[o.task], item.prompt) if semantic else question
        count = len(_SEMANTIC[o.task] if semantic else _QUALITY)
        return self._structured(
            [{"type": "text", "text": text}, *(image_part(pixels, o.encoding) for pixels in shown)],
            None,
            lambda answer: read_scores(answer, count),
            temperature=o.temperature,
            max_tokens=o.max_tokens,
        )


def viescore(semantic: Sequence[float], quality: Sequence[float]) -> tuple[float, float, float]:
    """(SC, PQ, O) of the integers of both questions."""
    sc, pq = min(semantic), min(quality)
    return sc, pq, math.sqrt(sc * pq)


def read_scores(text: str, count: int) -> list[int]:
    """The integers of an answer: `score` of its JSON object, or a bare list of them.

    Everything before the first and behind the last brace is ignored, as is a line break in a string; one integer needs
    no list.

    Raises:
        ValueError: no such object, not `count` integers, or one outside the scale.
    """
    scores = _scores(text)
    given = cast("list[Any]", scores) if isinstance(scores, list) else [scores]
    integers = all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= MOST for n in given)
    if len(given) != count or not integers:
        raise ValueError(f"score must be a list of {count} integers from 0 to {MOST}; given {json.dumps(scores)[:60]}")
    return given


def _scores(text: str) -> Any:
    start, end = text.find("{"), text.rfind("}") + 1
    if start == -1 or end == 0:
        start, end = text.find("["), text.rfind("]") + 1
    if start == -1 or end <= start:
        raise ValueError('there is no JSON object with "score" and "reasoning"')
    try:
        found: Any = plain_json.loads(text[start:end], strict=False, unique=True)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if isinstance(found, dict) and "score" not in found:
        raise ValueError("score is missing")
    return cast("dict[str, Any]", found)["score"] if isinstance(found, dict) else found


@cache
def questions() -> dict[str, str]:
    """The published questions `edit`, `text_to_image` and `quality`, with their source."""
    return json.loads(Path(__file__).with_name("viescore_rubric.json").read_text(encoding="utf-8"))
