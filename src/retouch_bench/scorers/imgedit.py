"""ImgEdit-Bench (arXiv 2505.20275): a judge receives source, sample and the question of the edit's type, and
answers in three lines `name: 1-5`; the score is their mean.

The questions are not part of the package, because the code they are published in has no licence: `prompts` is the
user's copy of `Benchmark/Basic/prompts.json`. The published code averages every line that looks like `name: digits`,
two or four of them as well, and drops an answer without any; here an answer that does not have the three lines of its
question is requested again, once, and is then a failure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

from retouch.config.base import Count, NonNegative, Text
from retouch.errors import ConfigError, shown
from retouch.files import plain_json
from retouch.files.disk import expanded
from retouch.rewards.protocol import RewardItem
from retouch.rewards.scorers.judge_client import Encoding, image_part
from retouch.rewards.scorers.judged import JudgeEntry, JudgeScorer
from retouch.types import Failure, Outcome, Score

TYPES = ("add", "adjust", "extract", "replace", "remove", "background", "style", "compose", "action")
"""Types of edits, in the order of published tables, where "compose" is called hybrid."""

MOST = 5
"""Highest integer of a line; the lowest is 1."""

_PARTS = ("instruction_adherence", "editing_quality", "detail_preservation")
_SLOT = "<edit_prompt>"
_WHERE = "Benchmark/Basic/prompts.json of github.com/PKU-YuanGroup/ImgEdit"


class ImgEditReward(JudgeEntry):
    """Quality of an edit by the protocol of ImgEdit-Bench (arXiv 2505.20275), in [0.2, 1]: the mean of a judge's three
    integers from 1 to 5, divided by 5. Needs a source image, `metadata.edit_type` (one of the nine types of the
    benchmark) and a judge as of `openai_judge`. Published numbers are `imgedit.mean`, from 1 to 5."""

    images = frozenset({"source"})
    published_in = _WHERE
    scores_edits = True

    scorer: Literal["imgedit"] = "imgedit"
    prompts: Text | None = None
    """Your copy of the published questions, which the package does not contain: `Benchmark/Basic/prompts.json`, an
    object of type and question."""
    encoding: Encoding = "png"
    """Images as the judge gets them: lossless, or as JPEG of quality 75."""
    temperature: NonNegative = 0.0
    """Sampling temperature of the answers; the published code leaves it at the default of the endpoint, 1 at OpenAI."""
    max_tokens: Count = 512
    """Maximum length of an answer in tokens."""

    def make(self) -> ImgEditScorer:
        return ImgEditScorer(self)


class ImgEditScorer(JudgeScorer[ImgEditReward]):
    """The mean / 5; its detail has the mean, rounded to 2 places as published, and the three integers."""

    def __init__(self, options: ImgEditReward) -> None:
        self.questions = read_questions(options.prompts or "")
        super().__init__(options, self.questions, options.encoding, options.temperature, options.max_tokens)

    first_prompt = "change nothing"

    def _first_question(self, item: RewardItem) -> object:
        return self._ask(replace(item, metadata={"edit_type": next(iter(self.questions))}))

    def _one(self, item: RewardItem) -> Outcome:
        kind = item.metadata.get("edit_type")
        if not isinstance(kind, str) or kind not in self.questions:
            return Failure("bad_item", f"metadata.edit_type must be one of {', '.join(self.questions)}; given {kind!r}")
        given = self._ask(item)
        mean = sum(given) / len(given)
        return Score(mean / MOST, {"mean": round(mean, 2), **dict(zip(_PARTS, given, strict=True))})

    def _ask(self, item: RewardItem) -> list[int]:
        assert item.source is not None  # spec.needs
        question = self.questions[item.metadata["edit_type"]]
        pair = [image_part(pixels, self.options.encoding) for pixels in (item.source, item.image)]
        return self._structured(
            [{"type": "text", "text": question.replace(_SLOT, item.prompt)}, *pair],
            None,
            lambda answer: read_lines(answer, names_of(question)),
            temperature=self.options.temperature,
            max_tokens=self.options.max_tokens,
        )


def names_of(question: str) -> list[str]:
    """The names of the lines that a question requests, in its order."""
    return re.findall(r"^(.+): A number from 1 to 5\.$", question, re.MULTILINE)


def read_lines(text: str, names: Sequence[str]) -> list[int]:
    """The integers of the lines `name: 1-5`, in the order of `names`.

    Raises:
        ValueError: a name without a line or with two, an integer outside the scale, or a line with another name.
    """
    found: dict[str, int] = {}
    by_key = {name.casefold(): name for name in names}
    for line in text.splitlines():
        name, separator, value = line.strip().rpartition(": ")
        if not separator or not (value.isascii() and value.isdecimal()):
            continue
        key = name.casefold()
        if key not in by_key or by_key[key] in found:
            raise ValueError(f"{shown(name)} is {'given twice' if key in by_key else 'no line of the required format'}")
        if not 1 <= int(value) <= MOST:
            raise ValueError(f"{name} must be a number from 1 to {MOST}; given {value[:40]}")
        found[by_key[key]] = int(value)
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(f"there is no line {missing[0] + ': ' + 'N'!r} with N from 1 to {MOST}")
    return [found[name] for name in names]


def read_questions(path: str) -> dict[str, str]:
    """Type -> question of the user's copy.

    Raises:
        ConfigError: no such file, not JSON, or a question without its place for the instruction or its three lines.
    """
    file, where = expanded(path), f"reward 'imgedit': prompts: given {path!r}"
    try:
        content: Any = plain_json.loads(file.read_text(encoding="utf-8"))
    except OSError:
        raise ConfigError(f"{where}, which is no file; set it to your copy of {_WHERE}") from None
    except ValueError as error:
        raise ConfigError(f"{where}, which is not JSON: {error}; give {_WHERE}") from None
    given = cast("Mapping[str, Any]", content) if isinstance(content, dict) else {}
    questions = {kind: given[kind] for kind in TYPES if isinstance(given.get(kind), str)}
    bad = [kind for kind, text in questions.items() if _SLOT not in text or len(names_of(text)) != len(_PARTS)]
    missing = [kind for kind in TYPES if kind not in questions]
    if missing or bad:
        problem = f"has no question for {', '.join(missing)}" if missing else f"has a broken question for {bad[0]}"
        raise ConfigError(
            f"{where}, which {problem}: each of {', '.join(TYPES)} needs a text with {_SLOT} and three lines "
            f"'NAME: A number from 1 to 5.'; give {_WHERE}"
        )
    return questions
