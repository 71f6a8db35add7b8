"""Rewards of the text that a vision-language model writes before a picture is drawn: pure functions, no torch.

Each is in [0, 1]. They see form alone: whether the text says the right thing is for the judge of the picture to tell.
Their use is as a small weight beside the judge, against texts that score by being broken.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

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
"""Words that are compared as one for repetition."""

_UNFINISHED = 0.5
"""What is left of a text that ran into the length limit."""


@dataclass(frozen=True)
class CompletionScore:
    """The quality of a completion and what it was made of.

    Attributes:
        value: 0 for a refusal or special tokens, else length * distinctness, halved where the text is unfinished.
        length: 1 inside the bounds of words; below and above them it falls in proportion.
        distinctness: share of the runs of 4 words that are different; 1 for fewer words.
        refusal: begins by declining.
        special: holds tokens of a chat template, which belong between texts.
        finished: ended by itself.
    """

    value: float
    length: float
    distinctness: float
    refusal: bool
    special: bool
    finished: bool


def think_format(text: str) -> float:
    """1 for `<think>thought</think>answer` with both there and no further tag, white space around it aside; else 0."""
    match = _THINK.fullmatch(text)
    if match is None:
        return 0.0
    thought, answer = match["thought"], match["answer"]
    tags = any(tag in part for part in (thought, answer) for tag in ("<think>", "</think>"))
    return float(bool(thought.strip()) and bool(answer.strip()) and not tags)


def answer_of(text: str) -> str:
    """What follows the thought; the whole text where there is none."""
    match = _THINK.fullmatch(text)
    return (match["answer"] if match else text).strip()


def completion_quality(text: str, finished: bool = True, min_words: int = 8, max_words: int = 300) -> float:
    """`score_completion(...).value`."""
    return score_completion(text, finished, min_words, max_words).value


def score_completion(text: str, finished: bool = True, min_words: int = 8, max_words: int = 300) -> CompletionScore:
    """How well-formed the answer of a completion is; its thought does not count.

    Args:
        finished: whether it ended with the end-of-text token, and not at the limit of generated tokens.
        min_words, max_words: bounds of the answer; Chinese, Japanese and Thai, which write no spaces, count a word for
            every two letters.

    Raises:
        ValueError: bounds that are none.
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
