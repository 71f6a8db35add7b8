"""A VLM that compares two images for a task by a criterion, as the reward of OneReward (arXiv 2508.21066) does.

The question names the task and the criterion: one judge serves several tasks, and each criterion can be a reward with
its own weight and advantage. The questions are this package's own; OneReward's judge is not released.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from retouch.config.base import Unit
from retouch.rewards.protocol import RewardItem
from retouch.rewards.scorers.judge_client import JudgeError, image_part
from retouch.rewards.scorers.judge_replies import read_by
from retouch.rewards.scorers.judged import LOGPROBS, AnswerError
from retouch.rewards.scorers.openai_judge import expectation
from retouch.rewards.scorers.pairing import PairEntry, PairScorer
from retouch.types import Outcome

Task = Literal["generate", "edit", "fill", "extend", "remove", "write"]
Criterion = Literal["overall", "alignment", "consistency", "structure", "aesthetics", "text"]

_TASKS: dict[Task, str] = {
    "generate": "Two images were generated from a prompt.",
    "edit": "An image was edited by an instruction. Two results are shown.",
    "fill": "A region of an image was filled with new content by a prompt. Two results are shown.",
    "extend": "An image was extended beyond its borders by a prompt. Two results are shown.",
    "remove": "An object was removed from an image. Two results are shown.",
    "write": "A text was written into a region of an image. Two results are shown.",
}
_CRITERIA: dict[Criterion, str] = {
    "overall": "Which one is better as a whole?",
    "alignment": "Which one fits the prompt better? Ignore the quality of the image.",
    "consistency": "Which one fits better to the rest of the image, in light, colour, style and perspective, and "
    "without a visible border?",
    "structure": "Which one has better shapes: whole objects, correct anatomy, straight lines, no artefacts?",
    "aesthetics": "Which one looks better: composition, light, colour and detail?",
    "text": "In which one is the text closer to the requested text, letter by letter, and easier to read?",
}
_ANSWER = "Answer with 1 if the first image is better, or with 2 if the second image is better, and nothing else."
_VALUES = {"1": 1.0, "2": 0.0}


class PairwiseReward(PairEntry):
    """Probability that a VLM judge prefers a sample over the other samples of its group, or over a reference image, in
    [0, 1]; every pair is asked in both orders."""

    RETIRED: ClassVar[Mapping[str, object]] = {"show_source": True}

    scorer: Literal["pairwise"] = "pairwise"
    task: Task = "generate"
    """Task that made the images: "generate" a whole image, "edit" by an instruction, "fill" a region, "extend" beyond
    the borders, "remove" an object, or "write" a text. For all but "generate" the judge receives the source image."""
    criterion: Criterion = "overall"
    """Criterion of the comparison; add one entry per criterion."""
    mode: Literal["logprobs", "text"] = "logprobs"
    """Probability of the answer 1 against 2 from their log-probabilities; or the answer itself, which is 0 or 1."""
    min_mass: Annotated[Unit, LOGPROBS] = 0.5
    """Minimum probability of the two answers together; below it the judge answered something else, which is a
    failure."""

    def shows_source(self) -> bool:
        """Whether the judge receives the source image."""
        return self.task != "generate"

    def required_images(self) -> frozenset[str]:
        return super().required_images() | ({"source"} if self.shows_source() else set())

    def make(self) -> PairwiseScorer:
        question = f"{_TASKS[self.task]} {_CRITERIA[self.criterion]}"
        return PairwiseScorer(
            self, question, _ANSWER, self.mode, self.min_mass, self.against, self.rounds, self.shows_source()
        )


class PairwiseScorer(PairScorer[PairwiseReward]):
    """The probability of "1", both orders averaged."""

    def _first_question(self, item: RewardItem) -> object:
        other = replace(item, id=1, image=np.full_like(item.image, 255))
        try:
            return self._probability(item, other, min_mass=0.0)
        except JudgeError as error:
            raise JudgeError(f"{error}; mode is {self.options.mode!r}", error.retryable) from None

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        return self.score_pairs(items)

    def ask_pair(self, first: RewardItem, second: RewardItem) -> float:
        return self._probability(first, second, self.options.min_mass)

    def _probability(self, first: RewardItem, second: RewardItem, min_mass: float) -> float:
        messages = [{"role": "user", "content": self._content(first, second)}]
        if self.options.mode == "text":
            try:
                return read_by(read_choice, self.judge.ask(messages, max_tokens=4))
            except ValueError as error:
                raise AnswerError(str(error)) from None
        choice = self.judge.ask(messages, max_tokens=1, logprobs=True, top_logprobs=20)
        try:
            top: list[Any] = choice["logprobs"]["content"][0]["top_logprobs"]
            value, mass = expectation(top, _VALUES)
        except (KeyError, TypeError, IndexError, ValueError, OverflowError):
            raise JudgeError("the reply has no log-probabilities") from None
        if mass < min_mass or not mass or not math.isfinite(value):
            raise JudgeError(f"the answers 1 and 2 have {mass:.2f} of the probability; set another model or mode=text")
        return value

    def _content(self, first: RewardItem, second: RewardItem) -> list[dict[str, Any]]:
        """The question, then the images, each after its name."""
        o = self.options
        asked = f"{_TASKS[o.task]} {_CRITERIA[o.criterion]}\nThe prompt: {first.prompt}"
        parts: list[dict[str, Any]] = [{"type": "text", "text": asked}]
        images = [("Image 1:", first.image), ("Image 2:", second.image)]
        if o.shows_source():
            assert first.source is not None  # spec.needs
            images = [("The original image:", first.source), *images]
        for name, pixels in images:
            parts += [{"type": "text", "text": name}, image_part(pixels)]
        return [*parts, {"type": "text", "text": _ANSWER}]


_CHOICE = re.compile(r"\W{0,20}(?:(?:answer|image)\W{1,20}){0,2}([12])(?:\.0)?\W{0,20}", re.IGNORECASE)


def read_choice(text: str) -> float:
    """The probability of the first image in an answer of one digit, whatever marks stand around it.

    Raises:
        ValueError: another answer.
    """
    found = _CHOICE.fullmatch(text)
    if found is None:
        raise ValueError(f"the answer must be 1 or 2; given {text[:40]!r}")
    return _VALUES[found[1]]
