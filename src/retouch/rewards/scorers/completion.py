"""Rewards of the text that a VLM writes before the image is generated (algorithm vlm_grpo); they read no image.

Each is in [0, 1] and scores the form only; the judge of the image scores the content. Give them a small weight beside
that judge, against malformed texts that score high.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from pydantic import model_validator

from retouch.config.base import Count
from retouch.rewards.base import NO_NETWORK, PackageScorer, RewardEntry
from retouch.rewards.protocol import RewardItem
from retouch.types import Failure, Outcome, Score

MISSING = Failure("bad_item", "metadata has no completion; only runs of vlm_grpo have one")


class ThinkFormatReward(RewardEntry):
    """1 for a completion that is a thought in its tags and an answer after them, else 0 (algorithm vlm_grpo)."""

    cpu_only = NO_NETWORK

    scorer: Literal["think_format"] = "think_format"

    def make(self) -> ThinkFormatScorer:
        return ThinkFormatScorer(self)


class CompletionQualityReward(RewardEntry):
    """Length and distinctness of a completion's answer, in [0, 1] (algorithm vlm_grpo); half of it if the answer was
    cut off at its limit."""

    cpu_only = NO_NETWORK

    scorer: Literal["completion_quality"] = "completion_quality"
    min_words: Count = 8
    """Shorter answers score in proportion."""
    max_words: Count = 300
    """Longer answers score in proportion."""

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> CompletionQualityReward:
        if self.min_words > self.max_words:
            raise ValueError(f"min_words: given {self.min_words}, more than max_words {self.max_words}; lower it")
        return self

    def make(self) -> CompletionQualityScorer:
        return CompletionQualityScorer(self, f"1 words={self.min_words}-{self.max_words}")


class ThinkFormatScorer(PackageScorer[ThinkFormatReward]):
    def _one(self, item: RewardItem) -> Outcome:
        text = item.metadata.get("completion")
        return Score(think_format(text)) if isinstance(text, str) else MISSING


class CompletionQualityScorer(PackageScorer[CompletionQualityReward]):
    def _one(self, item: RewardItem) -> Outcome:
        text = item.metadata.get("completion")
        if not isinstance(text, str):
            return MISSING
        finished = bool(item.metadata.get("finished", True))
        found = score_completion(text, finished, self.options.min_words, self.options.max_words)
        return Score(found.value, {"length": found.length, "distinctness": found.distinctness})


_THINK = re.compile(r"\s*<think>(?P<thought>.*?)</think>(?P<answer>.*)", re.DOTALL)

_REFUSAL = re.compile(
    r"\s*(?:unfortunately,? )?(?:sorry\b|as an ai\b"
    r"|(?:i['’]m|i am) (?:sorry|unable|not able)|i (?:can(?:not|['’]t)|won['’]t))",
    re.IGNORECASE,
)
_SPECIAL = re.compile(r"<\|[a-z_]+\|>")

_WITHOUT_SPACES = r"\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff"
"""Thai, Japanese, Chinese."""

_WORD = re.compile(rf"[{_WITHOUT_SPACES}]{{1,2}}|[^\W{_WITHOUT_SPACES}]+")

_NGRAM = 4
"""Length in words of the runs that are compared for repetition."""

_UNFINISHED = 0.5
"""Factor for a text that was cut off at the length limit."""


@dataclass(frozen=True)
class CompletionScore:
    """Quality of a completion and its parts.

    Attributes:
        value: 0 for a refusal or special tokens, else length * distinctness, halved if the text is unfinished.
        length: 1 within the bounds of words; below and above them it falls in proportion.
        distinctness: fraction of the runs of 4 words that are different; 1 for fewer words.
        refusal: whether the answer begins by declining.
        special: whether it contains tokens of a chat template.
        finished: whether it ended with the end-of-text token.
    """

    value: float
    length: float
    distinctness: float
    refusal: bool
    special: bool
    finished: bool


def think_format(text: str) -> float:
    """1 for `<think>thought</think>answer` with both non-empty and no further tag, white space around it allowed; else
    0."""
    match = _THINK.fullmatch(text)
    if match is None:
        return 0.0
    thought, answer = match["thought"], match["answer"]
    tags = any(tag in part for part in (thought, answer) for tag in ("<think>", "</think>"))
    return float(bool(thought.strip()) and bool(answer.strip()) and not tags)


def answer_of(text: str) -> str:
    """The text after the thought; the whole text if there is none."""
    match = _THINK.fullmatch(text)
    return (match["answer"] if match else text).strip()


def score_completion(text: str, finished: bool = True, min_words: int = 8, max_words: int = 300) -> CompletionScore:
    """How well-formed the answer of a completion is; its thought does not count.

    Args:
        finished: whether it ended with the end-of-text token instead of at the limit of generated tokens.
        min_words, max_words: bounds of the answer; in Chinese, Japanese and Thai, which write no spaces, two letters
            count as a word.

    Raises:
        ValueError: bounds that are not 0 < min_words <= max_words.
    """
    if not 0 < min_words <= max_words:
        raise ValueError(f"given min_words {min_words} and max_words {max_words}; set 0 < min_words <= max_words")
    answer = answer_of(text)
    words = _words(answer)
    length = min(1.0, len(words) / min_words, max_words / max(1, len(words)))
    distinctness = _distinctness(words)
    refusal, special = _REFUSAL.match(answer) is not None, _SPECIAL.search(answer) is not None
    value = 0.0 if refusal or special else length * distinctness * (1.0 if finished else _UNFINISHED)
    return CompletionScore(value, length, distinctness, refusal, special, finished)


def _words(text: str) -> list[str]:
    """Lower-case words without punctuation; two letters of a script without spaces are one."""
    return _WORD.findall(text.lower())


def _distinctness(words: list[str]) -> float:
    runs = [tuple(words[i : i + _NGRAM]) for i in range(len(words) - _NGRAM + 1)]
    return len(set(runs)) / len(runs) if runs else 1.0
