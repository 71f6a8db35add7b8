"""TextPecker (arXiv 2602.20903): a VLM transcribes the image; it marks broken characters `<#>`, and words `<###>`.

quality = clip(1 - amplification · marks / characters, 0, 1), where the characters of the transcript include marks and
brackets, as published; semantic = 1 - GNED, the best one-to-one matching of transcribed with asked words by normalised
edit distance, unmatched words counting 1. The value is their weighted mean.

The published parser differs on these replies; this one does not share the behaviour:

- No JSON, or no `recognized_text`: published quality 0 and semantic 0, or text found by a pattern; here a failure.
- Chinese beside Latin text without a space: published, a Latin word at the end is lost, and one at the start moves
  behind the next Chinese character; here both are kept, in order.
- Apostrophes and quotes: published, two of them anywhere remove all; here only quotes around words are removed.
- Commas and ，。！？: published, removed from the transcript and not from the target; here from both.
- "#" in the target: published, a defect; here only `<#>` and `<###>` are, if the target has a "#".
- The image: published, JPEG; here PNG.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import numpy as np
from pydantic import Field

from retouch.config.base import Count, Unit
from retouch.errors import shown
from retouch.files import plain_json
from retouch.rewards.matching import assignment
from retouch.rewards.protocol import RewardItem, lines_to_read
from retouch.rewards.scorers.judge_client import image_part
from retouch.rewards.scorers.judged import JudgeEntry, JudgeScorer
from retouch.rewards.text_distance import text_similarity
from retouch.types import Failure, Outcome, Score

QUESTION = Path(__file__).with_name("textpecker_question.txt")
"""The question that the published models were trained to answer."""

_MARK = re.compile(r"<#+>")
_STOPS = re.compile("[，。！？,]+")
_OPENING, _CLOSING = "\"'“‘〝", "\"'”’〞"
_BROKEN = "\ufffd"  # in place of "#" in a mark where the target has a "#": equal to no character of it


class TextPeckerReward(JudgeEntry):
    """Structure and content of all text in the image by a TextPecker model (arXiv 2602.20903) behind an
    OpenAI-compatible endpoint, in [0, 1]."""

    scorer: Literal["textpecker"] = "textpecker"
    amplification: Annotated[float, Field(gt=0)] = 5.0
    """Factor on the share of marks in the quality: 5 in the published training, 1 in the published evaluation."""
    semantic_weight: Unit = 0.5
    """Weight of the semantic score; the quality has the rest."""
    repetition_penalty: Annotated[float, Field(ge=1)] = 1.2
    """Penalty on repeated tokens in the model's decoding, as published; 1 is not sent. It works against texts that
    repeat words, and not every endpoint has it."""
    max_tokens: Count = 2048
    """Maximum length of a reply in tokens; a longer one is a failure."""

    def make(self) -> TextPeckerScorer:
        return TextPeckerScorer(
            self, QUESTION.read_text(encoding="utf-8"), self.amplification, self.semantic_weight,
            self.repetition_penalty, self.max_tokens,
        )  # fmt: skip

    def reads_text(self) -> bool:
        return True


class TextPeckerScorer(JudgeScorer[TextPeckerReward]):
    """Weighted mean of quality and semantic score; its detail: transcript, both scores, number of marks."""

    def _first_question(self, item: RewardItem) -> object:
        return self._transcript(item)

    def _one(self, item: RewardItem) -> Outcome:
        lines = lines_to_read(item)  # all, because the transcript is of all text in the image
        if isinstance(lines, Failure):
            return lines
        # a space in every script, as in `read_transcript`: without one, lines of kana or Thai are one unit
        asked = " ".join(line.text for line in lines)
        answer, o = self._transcript(item), self.options
        parts = {"quality": quality(answer, asked, o.amplification), "semantic": semantic(answer, asked)}
        value = (1 - o.semantic_weight) * parts["quality"] + o.semantic_weight * parts["semantic"]
        return Score(value, {"text": answer, "marks": marks(answer, asked), **parts})

    def _transcript(self, item: RewardItem) -> str:
        question = {"type": "text", "text": QUESTION.read_text(encoding="utf-8")}
        penalty = self.options.repetition_penalty
        options: dict[str, Any] = {} if penalty == 1 else {"repetition_penalty": penalty}
        # asked once: the model was trained on this one question
        return self._structured(
            [image_part(item.image), question], None, read_transcript, again=False,
            max_tokens=self.options.max_tokens, **options,
        )  # fmt: skip


def read_transcript(reply: str) -> str:
    """`recognized_text` of a reply: the first JSON object in it, whatever stands around it.

    Raises:
        ValueError: no object, or no text in it.
    """
    text = plain_json.first_object(reply).get("recognized_text")
    if isinstance(text, list) and all(isinstance(line, str) for line in cast("list[Any]", text)):
        return " ".join(cast("list[str]", text))
    if not isinstance(text, str):
        raise ValueError(f"recognized_text must be a text or a list of texts; given {shown(text)}")
    return text


def quality(transcript: str, asked: str, amplification: float) -> float:
    """1 - amplification · share of marks among the characters, in [0, 1]; 0 without any character.

    A mark of a word counts 3 and has 5 characters, one of a letter 1 and 3.
    """
    characters = sum(len(word) for word in words(transcript))
    if not characters:
        return 0.0
    return min(1.0, max(0.0, 1 - amplification * marks(transcript, asked) / characters))


def marks(transcript: str, asked: str) -> int:
    """Number of "#" that mark a defect: all of them, or those in `<#>` and `<###>` if the target has a "#"."""
    if "#" not in asked:
        return transcript.count("#")
    return sum(len(mark) - 2 for mark in _MARK.findall(transcript))


def semantic(transcript: str, asked: str) -> float:
    """1 - GNED of the transcript and the target, without regard to case and order."""
    literal = "#" in asked
    shown = _MARK.sub(lambda mark: (_BROKEN if literal else "#") * (len(mark[0]) - 2), transcript)
    found, wanted = units(shown), units(asked)
    if not found or not wanted:
        return float(not found and not wanted)
    likeness = np.array([[text_similarity(a, b) for b in wanted] for a in found])
    matched = sum(likeness[row, column] for row, column in enumerate(assignment(likeness)) if column >= 0)
    return float(matched) / max(likeness.shape)


def words(text: str) -> list[str]:
    """Words between white space and stops, without the quotes around them."""
    found = []
    for word in _STOPS.sub(" ", text).split():
        if word[0] in _OPENING:
            word = word[1:]
        if word and word[-1] in _CLOSING:
            word = word[:-1]
        found.append(word)
    return [word for word in found if word]


def units(text: str) -> list[str]:
    """Lower-case words; each Chinese character (U+4E00 to U+9FFF) is a unit."""
    return [unit for word in words(text.lower()) for unit in re.findall("[\u4e00-\u9fff]|[^\u4e00-\u9fff]+", word)]
