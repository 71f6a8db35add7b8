"""LongText-Bench's reading of an image by a VLM, and its share of the asked words (arXiv 2507.22058; X-Omni,
textbench/summary_scores.py, Apache-2.0).

Both sides lose everything but ideographs, Latin letters, digits, white space and French accented letters; hyphens and
apostrophes join. English: lower case, a bag of words. Chinese: no white space, case kept, a bag of characters. The
score is the share of the asked units that the reading holds: order does not count and further text costs nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from pydantic import field_validator

from retouch.rewards.protocol import RewardItem, lines_to_read
from retouch.rewards.scorers.judge_client import image_part
from retouch.rewards.scorers.judged import JudgeEntry, JudgeScorer
from retouch.types import Failure, Outcome, Score

Language = Literal["en", "zh"]

# the published question (Apache-2.0, see NOTICE): its words are part of the protocol
_QUESTION = (
    "Recognize the text in the image, only reply with the text content, but avoid repeating previously mentioned "
    "content. If no text is recognized, please reply with 'No text recognized'."
)
_STOCK = "No text recognized."  # the published script removes this phrase, with its full stop, and no other
_MOST_TOKENS = 1024

_ACCENTED = "àâäéèêëîïôöùûüçÀÂÄÉÈÊËÎÏÔÖÙÛÜÇ"
_DELETED = re.compile(rf"[^\u4e00-\u9fa5a-zA-Z0-9\s{_ACCENTED}]")


@dataclass(frozen=True)
class Recall:
    """Asked units, words or characters, and how many of them the reading holds."""

    matched: int
    asked: int


def recall(asked: Sequence[str], reading: str, language: Language) -> Recall:
    """The counts of one image, from the asked lines and the reader's answer."""
    wanted, found = (_units(text, language) for text in (" ".join(asked), reading.replace(_STOCK, "")))
    return Recall((Counter(wanted) & Counter(found)).total(), len(wanted))


def _units(text: str, language: Language) -> list[str]:
    cleaned = _DELETED.sub("", text)
    return cleaned.lower().split() if language == "en" else list("".join(cleaned.split()))


class LongTextReward(JudgeEntry):
    """Share of the asked words (Chinese: characters) that a VLM behind an OpenAI-compatible endpoint reads in the
    image, as LongText-Bench counts them, in [0, 1]. The benchmark's reader is Qwen2.5-VL-7B-Instruct."""

    scorer: Literal["longtext"] = "longtext"
    language: Language = "en"
    """"en" counts words without case, "zh" characters."""
    question: str = _QUESTION
    """Question to the reader; another one is another protocol."""

    @field_validator("question")
    @classmethod
    def _asks_something(cls, question: str) -> str:
        if not question.strip():
            raise ValueError("given an empty question; leave it out for the benchmark's")
        return question

    def reads_text(self) -> bool:
        return True

    def make(self) -> LongTextScorer:
        return LongTextScorer(self, self.question, self.language)


class LongTextScorer(JudgeScorer[LongTextReward]):
    """Asks the reader for the text of each image."""

    def _first_question(self, item: RewardItem) -> object:
        return self._read(item)

    def _one(self, item: RewardItem) -> Outcome:
        asked = lines_to_read(item)
        if isinstance(asked, Failure):
            return asked
        language = item.metadata.get("language")
        if language in get_args(Language) and language != self.options.language:
            return Failure("bad_item", f"its texts are of language {language!r}; set language={language} in the reward")
        answer = self._read(item)
        found = recall([line.text for line in asked], answer, self.options.language)
        if not found.asked:
            text = " ".join(line.text for line in asked)
            return Failure("bad_item", f"nothing is left of {text!r} once it is cleaned; check language")
        return Score(found.matched / found.asked, {"text": answer, "matched": found.matched, "asked": found.asked})

    def _read(self, item: RewardItem) -> str:
        content = [image_part(item.image), {"type": "text", "text": self.options.question}]
        return self._structured(content, None, str, max_tokens=_MOST_TOKENS)
