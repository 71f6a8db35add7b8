"""Quality of an edit by the protocol of Complex-Edit (arXiv 2504.13143): a judge gives integers from 0 to 10 for
instruction following and identity preservation, seeing the source and the sample, and for perceptual quality, seeing
the sample alone.

The questions are this package's own. With `wording: published` they are the user's copy of Complex-Edit's, whose code
has no licence, in its form: a system message, integers as text, and reasoning for the first question alone.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from retouch.config.base import Count, NonNegative, Text
from retouch.errors import ConfigError, shown
from retouch.files.disk import expanded
from retouch.rewards.base import Question
from retouch.rewards.protocol import Pixels, RewardItem
from retouch.rewards.scorers.copied_texts import parsed_file
from retouch.rewards.scorers.judge_client import image_part
from retouch.rewards.scorers.judged import (
    PUBLISHED,
    JudgeEntry,
    JudgeScorer,
    integer_schema,
    read_integers,
    read_object,
    schema_of,
    whole,
)
from retouch.types import Failure, Outcome, Score

_MOST = 10
_ALIGNMENT = ("instruction_following", "identity_preservation")
_QUALITY = ("perceptual_quality",)
_REASON = "reasoning"
_WEIGHTS = (0.6, 0.4)  # of alignment and perceptual quality

_ABOUT_ALIGNMENT = (
    "The first picture was edited by an instruction; the second picture is the result. The instruction: {prompt}\n"
    f"Compare the two and give two integers from 0 to {_MOST}.\n"
    "instruction_following: how much of what the instruction asks for was done, and done as asked. 0: nothing. "
    f"{_MOST}: all of it.\n"
    "identity_preservation: how well everything is kept that the instruction does not ask to change: persons, objects, "
    f"background, layout, style. 0: it is another picture. {_MOST}: nothing else changed. A change that the "
    "instruction asks for costs nothing here.\n"
    "Write your reasoning first."
)
_ABOUT_QUALITY = (
    "How good is this picture, as a picture? Look at sharpness, light, colours, composition, and for distorted "
    "shapes, seams, noise and unreadable text. What it should show does not matter here.\n"
    f"perceptual_quality: an integer from 0 (unusable) to {_MOST} (flawless). Write your reasoning first."
)

_PUBLISHED = {
    "prompt_alignment.py": ("ALIGNMENT_PROMPT_W_RUBRIC", "PROMPT_TEMPLATE"),
    "prompt_quality.py": ("PERCEPTUAL_QUALITY_PROMPT_W_RUBRIC_WO_INST",),
}
"""Files of the published code, and the texts in them that its evaluation sends."""

_INSTRUCTION_SLOT = "{instruction}"
_PUBLISHED_REASONING = "\nExplain your reasoning before answering the questions."
_PUBLISHED_TOKENS = 512
_WHERE = "complex_edit/eval of github.com/UCSC-VLAA/Complex-Edit"


@dataclass(frozen=True)
class PublishedTexts:
    """The published texts: system messages of both questions, and the text of the first with {instruction}."""

    alignment: str
    template: str
    quality: str


def combine(parts: dict[str, float], preset: str) -> float:
    """The reward of three parts in [0, 1]: .6 alignment, which is the mean of instruction following and identity
    preservation or, with `brief`, the former alone, and .4 perceptual quality."""
    following, kept = (parts[name] for name in _ALIGNMENT)
    alignment = following if preset == "brief" else (following + kept) / 2
    return _WEIGHTS[0] * alignment + _WEIGHTS[1] * parts["perceptual_quality"]


class ComplexEditReward(JudgeEntry):
    """Quality of an edit by the protocol of Complex-Edit (arXiv 2504.13143), in [0, 1]: a judge's integers from 0 to 10
    for instruction following, identity preservation and perceptual quality. Needs a source image and a judge as of
    `openai_judge`."""

    images = frozenset({"source"})
    published_in = _WHERE
    scores_edits = True
    RETIRED: ClassVar[Mapping[str, object]] = {"alignment_weight": 0.6, "quality_weight": 0.4}

    scorer: Literal["complex_edit"] = "complex_edit"
    preset: Literal["balanced", "brief"] = "balanced"
    """Definition of alignment, which counts .6 beside .4 of perceptual quality: the mean of instruction following and
    identity preservation, or the former alone, which rewards repainting everything."""
    samples: Count = 3
    """Answers that are averaged, two questions each; if one of them fails, the item fails."""
    temperature: NonNegative = 0.7
    """Sampling temperature of the answers; at 0 further samples repeat the first."""
    wording: Literal["own", "published"] = "own"
    """Questions to the judge: this package's, or Complex-Edit's from `prompts`. The published numbers are means over 20
    samples at temperature 1, and their overall is the mean of the three parts."""
    prompts: Annotated[Text | None, PUBLISHED] = None
    """For wording=published: your copy of the folder `complex_edit/eval` of the published code, with
    `prompt_alignment.py` and `prompt_quality.py`, which the package does not contain; they are not run."""

    def questions(self, group_size: int) -> tuple[Question, ...]:
        return (
            self._question(2, number=self.samples, text=260, tokens_out=90),
            self._question(1, number=self.samples, text=140, tokens_out=70),
        )

    def make(self) -> ComplexEditScorer:
        published = read_published(self.prompts or "") if self.wording == "published" else None
        texts = (published.alignment + published.template, published.quality) if published else None
        scorer = ComplexEditScorer(
            self,
            *(texts or (_ABOUT_ALIGNMENT, _ABOUT_QUALITY)),
            self.preset,
            _WEIGHTS,
            self.samples,
            self.temperature,
        )
        scorer.published = published
        return scorer


class ComplexEditScorer(JudgeScorer[ComplexEditReward]):
    """Weighted alignment and quality; the three parts, in [0, 1], are its detail."""

    published: PublishedTexts | None = None

    first_prompt = "change nothing"

    def _first_question(self, item: RewardItem) -> object:
        return self._sample(item, 0, again=False)

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        count = self.options.samples
        answers = self._answers(lambda task: self._sample(*task), [(item, k) for item in items for k in range(count)])
        return [self._outcome(answers[i : i + count]) for i in range(0, len(answers), count)]

    def _outcome(self, answers: Sequence[dict[str, Any] | Failure]) -> Outcome:
        """The mean of one item's samples."""
        given = whole(answers)
        if isinstance(given, Failure):
            return given
        parts = {name: sum(a[name] for a in given) / len(given) / _MOST for name in (*_ALIGNMENT, *_QUALITY)}
        return Score(combine(parts, self.options.preset), parts)

    def _sample(self, item: RewardItem, number: int, *, again: bool = True) -> dict[str, Any]:
        """The three integers of one pair of questions; the number is the seed."""
        assert item.source is not None  # spec.needs
        if self.published is not None:
            return self._sample_published(self.published, item, item.source, number, again)
        text = {"type": "text", "text": _ABOUT_ALIGNMENT.replace("{prompt}", item.prompt)}
        pair = [text, image_part(item.source), image_part(item.image)]
        alone = [{"type": "text", "text": _ABOUT_QUALITY}, image_part(item.image)]
        return {
            **self._integers(pair, _ALIGNMENT, number, again),
            **self._integers(alone, _QUALITY, number, again),
        }

    def _integers(self, content: list[dict[str, Any]], names: Sequence[str], seed: int, again: bool) -> dict[str, Any]:
        integer = integer_schema(_MOST)
        return self._structured(
            content,
            schema_of("scores", {_REASON: {"type": "string"}, **dict.fromkeys(names, integer)}),
            lambda text: read_integers(text, names, _MOST, also=[_REASON]),
            again=again,
            temperature=self.options.temperature,
            seed=seed,
        )

    def _sample_published(
        self, texts: PublishedTexts, item: RewardItem, source: Pixels, number: int, again: bool
    ) -> dict[str, Any]:
        question = {"type": "text", "text": texts.template.replace(_INSTRUCTION_SLOT, item.prompt)}
        pair = [_detailed(source), _detailed(item.image), question]
        found: dict[str, Any] = {}
        for system, content, names, reason in (
            (texts.alignment + _PUBLISHED_REASONING, pair, _ALIGNMENT, True),
            (texts.quality, pair[1:2], _QUALITY, False),
        ):
            integer = {"type": "string", "enum": [str(value) for value in range(_MOST + 1)]}
            also = {_REASON: {"type": "string"}} if reason else {}
            found |= self._structured(
                content,
                schema_of("scores", {**also, **dict.fromkeys(names, integer)}),
                lambda text, names=names, also=also: _read_as_text(text, names, [*also]),
                again=again,
                system=system,
                temperature=self.options.temperature,
                seed=number,
                max_tokens=_PUBLISHED_TOKENS,
            )
        return found


def read_published(folder: str) -> PublishedTexts:
    """The texts of the user's copy, whose files are parsed and not run.

    Raises:
        ConfigError: a file or a text is missing.
    """
    found: dict[str, str] = {}
    for file, names in _PUBLISHED.items():
        path = expanded(folder) / file
        try:
            tree = parsed_file(path)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"reward 'complex_edit': prompts: given {folder!r}, whose {file} cannot be read ({error}); set it to "
                f"your copy of {_WHERE}"
            ) from None
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                texts = {one.id: node.value.value for one in node.targets if isinstance(one, ast.Name)}
                found |= {name: text for name, text in texts.items() if name in names and isinstance(text, str)}
        missing = [name for name in names if name not in found]
        if missing:
            raise ConfigError(
                f"reward 'complex_edit': prompts: given {folder!r}, whose {file} has no text {missing[0]}; set it to "
                f"your copy of {_WHERE}"
            )
    (alignment, template), (quality,) = ([found[name] for name in names] for names in _PUBLISHED.values())
    if _INSTRUCTION_SLOT not in template:
        raise ConfigError(
            f"reward 'complex_edit': prompts: given {folder!r}, whose PROMPT_TEMPLATE does not contain "
            f"{_INSTRUCTION_SLOT}; set it to your copy of {_WHERE}"
        )
    return PublishedTexts(alignment, template, quality)


def _detailed(pixels: Pixels) -> dict[str, Any]:
    part = image_part(pixels)
    return {**part, "image_url": {**part["image_url"], "detail": "high"}}


def _read_as_text(text: str, names: Sequence[str], also: Sequence[str]) -> dict[str, Any]:
    """The object of an answer: integers from 0 to 10 as text under `names`.

    Raises:
        ValueError: not the schema, or no such integer.
    """
    found = read_object(text, [*names, *also])
    for name in names:
        value = found[name]
        if value not in map(str, range(_MOST + 1)):
            raise ValueError(f'{name} must be a text from "0" to "{_MOST}"; given {shown(value)}')
        found[name] = int(value)
    return found
