"""TextEdit's judge of a replaced text (arXiv 2603.09877; open-compass/TextEdit, eval_pipeline/vlm_metrics_eval_*.py): a
VLM receives the source, the edit that people made and the sample, and gives five integers from 1 to 5.

The question is this package's own. With `wording: published` it is the user's copy of TextEdit's. The published code
reads answers with a library that repairs JSON and drops those without scores; here such an answer is requested again,
once, and is then a failure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, cast

from PIL import Image

from retouch.config.base import Count, NonNegative, Text
from retouch.errors import shown
from retouch.files import plain_json
from retouch.imaging.fitting import of_size
from retouch.rewards.protocol import RewardItem, text_to_read
from retouch.rewards.scorers.copied_texts import copied_text
from retouch.rewards.scorers.judge_client import image_part
from retouch.rewards.scorers.judged import (
    PUBLISHED,
    JudgeEntry,
    JudgeScorer,
    as_integer,
    read_object,
    schema_of,
    uncropped,
)
from retouch.types import Failure, Outcome, Score

PARTS = ("text_accuracy", "text_preservation", "scene_integrity", "local_realism", "visual_coherence")
"""The five scores, in the order of the published Q1 to Q5."""

WEIGHTS = (0.4, 0.3, 0.1, 0.1, 0.1)
"""Published weight of each."""

SHARES = {5: 1.0, 4: 0.8, 3: 0.6, 2: 0.2, 1: 0.0}
"""Integer of the judge -> published share."""

_CUTOFF = 4
_NAMES = tuple(f"Q{number}" for number in range(1, 6))
_FENCED = re.compile(r"```(?:json)?\s*(.*?)\s*```", re.DOTALL)
_REASON = "reasoning"
_BEFORE, _AFTER = "{raw_text}", "{target_text}"
_WHERE = "eval_pipeline/vlm_metrics_eval_step1.py of github.com/open-compass/TextEdit"

_QUESTION = (
    'The first image contains the text "{raw_text}". In the second image a person replaced it by "{target_text}": this '
    "is the wanted result. The third image is a model's attempt at the same edit. Rate the third image by five "
    "integers from 1 (failed) to 5 (perfect).\n"
    "text_accuracy: the new text is spelled exactly as given and the old one is gone without remains.\n"
    "text_preservation: every other text is unchanged and legible.\n"
    "scene_integrity: objects, people and lines outside the edit keep their shape.\n"
    "local_realism: the edited area has no seams, smears or blurred patches.\n"
    "visual_coherence: font, colour, perspective, light and grain fit the scene.\n"
    "Write your reasoning first."
)


def shares_of(integers: Sequence[int], cutoff: bool = True) -> list[float]:
    """The published share of each of the five integers; with `cutoff`, a text accuracy below 4 sets the others to 0."""
    found = [SHARES[value] for value in integers]
    return [found[0], *([0.0] * 4)] if cutoff and integers[0] < _CUTOFF else found


def weighted(shares: Sequence[float]) -> float:
    """The published weighted mean of the five shares."""
    return sum(weight * share for weight, share in zip(WEIGHTS, shares, strict=True))


class TextEditJudgeReward(JudgeEntry):
    """Quality of a replaced text by the protocol of TextEdit's judge (arXiv 2603.09877), in [0, 1]: five integers from
    1 to 5, as shares, weighted .4 (text accuracy), .3 (other texts), .1, .1, .1. Needs the source image, the ground
    truth as reference, the target text, `metadata.source_text` and a judge as of `openai_judge`."""

    images = frozenset({"source", "reference"})
    published_in = _WHERE

    scorer: Literal["textedit_judge"] = "textedit_judge"
    cutoff: bool = True
    """Set the other four shares to 0 if the text accuracy is below 4, as in the published tables."""
    temperature: NonNegative = 0.0
    """Sampling temperature of the answers."""
    max_tokens: Count = 4096
    """Maximum length of an answer in tokens."""
    wording: Literal["own", "published"] = "own"
    """Question to the judge: this package's, answered by a JSON schema; or TextEdit's from `prompts`."""
    prompts: Annotated[Text | None, PUBLISHED] = None
    """For wording=published: your copy of TextEdit's `vlm_metrics_eval_step1.py`, which the package does not contain
    and does not run, or a text file with its question."""

    def advice(self, name: str) -> list[str]:
        return [*super().advice(name), *([uncropped(name)] if self.crop == "mask_box" else [])]

    def example_images(self) -> frozenset[str]:
        return self.required_images()

    def reads_text(self) -> bool:
        return True

    def make(self) -> TextEditJudgeScorer:
        return TextEditJudgeScorer(self)


class TextEditJudgeScorer(JudgeScorer[TextEditJudgeReward]):
    """The weighted mean; its detail has the five integers and their shares after the cutoff."""

    def __init__(self, options: TextEditJudgeReward) -> None:
        o, self.question = options, _QUESTION
        if o.wording == "published":
            prompts = o.prompts or ""
            copied = copied_text("textedit_judge", prompts, [_BEFORE, _AFTER], _WHERE)
            # a Python file holds a text for str.format
            self.question = copied.replace("{{", "{").replace("}}", "}") if prompts.endswith(".py") else copied
        super().__init__(o, self.question, o.cutoff, o.temperature, o.max_tokens)

    def _first_question(self, item: RewardItem) -> object:
        return self._ask((replace(item, reference=item.source), "A", "B"))

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        asked = [_texts(item) for item in items]
        usable = {i: (items[i], *texts) for i, texts in enumerate(asked) if not isinstance(texts, Failure)}
        answers = dict(zip(usable, self._answers(self._ask, list(usable.values())) if usable else [], strict=True))
        return [texts if isinstance(texts, Failure) else self._outcome(answers[i]) for i, texts in enumerate(asked)]

    def _outcome(self, integers: list[int] | Failure) -> Outcome:
        if isinstance(integers, Failure):
            return integers
        shares = shares_of(integers, self.options.cutoff)
        told = dict(zip(PARTS, integers, strict=True))
        return Score(weighted(shares), {**told, "shares": shares})

    def _ask(self, task: tuple[RewardItem, str, str]) -> list[int]:
        """The five integers of one item."""
        item, before, after = task
        assert item.source is not None and item.reference is not None  # spec.needs
        own = self.options.wording == "own"
        text = self.question.replace(_BEFORE, before).replace(_AFTER, after)
        images = (item.source, item.reference, of_size(item.image, item.source, Image.Resampling.LANCZOS))
        integer = {"type": "integer", "enum": sorted(SHARES)}
        schema = schema_of("scores", {_REASON: {"type": "string"}, **dict.fromkeys(PARTS, integer)})
        return self._structured(
            [{"type": "text", "text": text}, *map(image_part, images)],
            schema if own else None,
            read_own if own else read_published,
            temperature=self.options.temperature,
            max_tokens=self.options.max_tokens,
        )


def _texts(item: RewardItem) -> tuple[str, str] | Failure:
    """The text to replace, and the text to write."""
    after, before = text_to_read(item), item.metadata.get("source_text")
    if isinstance(after, Failure):
        return after
    if not isinstance(before, str) or not before.strip():
        return Failure("bad_item", f"metadata.source_text is {before!r}; set it to the text that is replaced")
    return before, after


def read_own(text: str) -> list[int]:
    """The integers of an answer by the schema.

    Raises:
        ValueError: another form.
    """
    found = read_object(text, [*PARTS, _REASON])
    return [_integer(as_integer(found[name]), name, found[name]) for name in PARTS]


def read_published(text: str) -> list[int]:
    """The integers under `score` of an answer {"score": {"Q1": 1-5, ...}, "reason": {...}}, with or without a code
    fence.

    Raises:
        ValueError: another form.
    """
    fenced = _FENCED.fullmatch(text.strip())
    try:
        found: Any = plain_json.loads(fenced[1] if fenced else text, unique=True)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    scores = cast("Mapping[str, Any]", found).get("score") if isinstance(found, dict) else None
    if not isinstance(scores, dict):
        raise ValueError('there is no object under "score"')
    given = cast("Mapping[str, Any]", scores)
    missing = [name for name in _NAMES if name not in given]
    if missing:
        raise ValueError(f"score has no {missing[0]}")
    return [_integer(given[name], name, given[name]) for name in _NAMES]


def _integer(value: object, name: str, given: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value not in SHARES:
        raise ValueError(f"{name} must be an integer from 1 to 5; given {shown(given)}")
    return value
