"""From completions to rewards: encode what was said, draw it with the frozen network, have the pictures scored.

Legend: B completions, K pictures of each.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
from PIL.Image import Image
from torch import Tensor

from retouch.algorithms.vlm_grpo.drawing import (
    Drawing,
    draw,
    drawing_on,
)
from retouch.algorithms.vlm_grpo.generation import (
    ends_of,
    generation_options,
    speak,
)
from retouch.algorithms.vlm_grpo.parts import (
    Parts,
    asked,
    chat_messages,
)
from retouch.algorithms.vlm_grpo.response import (
    Responses,
    encode_response,
)
from retouch.data.sampler import derive_seed
from retouch.families.qwen.base import NEGATIVE
from retouch.image_encoder import picture_key
from retouch.observe.grids import grid
from retouch.observe.timing import Stopwatch
from retouch.rewards.protocol import RewardItem
from retouch.rollout.sampler import (
    broken_rows,
    to_uint8,
)
from retouch.rollout.scorer import (
    PendingBatch,
    settle,
)
from retouch.training.evaluation import Evaluation
from retouch.types import Example, Failure, Outcome, Score, Scores

KEPT_NEGATIVES = 64
"""Pictures whose negative prompt's states are kept; some megabytes each at released sizes."""


@dataclass(frozen=True)
class Judged:
    """What became of B completions.

    Attributes:
        images: [K, H, W, 3] uint8 of each.
        scores: outcomes of B * K pictures, those of a completion together.
        rewards: the mean combined score of each; None where any of its pictures lacks a reward with a weight.
        truncated: how many conditions were cut.
        broken: pictures that were not drawn in finite numbers.
    """

    examples: Sequence[Example]
    texts: Sequence[str]
    images: Sequence[Tensor]
    scores: Scores
    rewards: list[float | None]
    truncated: int
    broken: Sequence[int] = ()

    @property
    def pictures_each(self) -> int:
        return len(self.images[0])


class Judge:
    """Scores completions; keeps the states of negative prompts that stay the same."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.ends = {*ends_of(parts), parts.tokenizer.pad_token_id}
        self._negatives: OrderedDict[str, Tensor] = OrderedDict()  # by the picture: ids repeat in other data

    def __call__(
        self,
        policy: Any,
        examples: Sequence[Example],
        responses: Responses,
        noise_seeds: Sequence[int],
        *,
        training: bool = True,
    ) -> Judged:
        """Draw and score.

        Args:
            policy: the text encoder as it is now, with its weights at hand.
            noise_seeds: of each completion; a group shares one.
            training: false for an evaluation, which has its gold rewards and its own number of denoising steps.

        Raises:
            RewardOutage: nothing was trained on these.
            ResponseTooLong: a condition that does not fit.
        """
        parts = self.parts
        clock = parts.clock if training else Stopwatch()  # all of an evaluation counts as "eval"
        steps = None if training else parts.config.evaluation.num_steps
        drawn = self.draw_only(policy, examples, responses, noise_seeds, clock, steps)
        ends = [bool(ids) and ids[-1] in self.ends for ids in responses.completion_ids]
        rows = zip(examples, drawn.texts, ends, drawn.images, strict=True)
        items = [item for row in rows for item in items_of(*row)]
        with clock.part("reward_wait"):
            pending = PendingBatch(items, parts.rewards.submit(items, training=training), drawn.broken)
            [scores] = settle(parts.rewards, [pending], parts.config.reward_client, training=training)
        rewards = mean_rewards(scores, parts.algorithm.images_per_completion)
        return replace(drawn, scores=scores, rewards=rewards)

    def draw_only(
        self,
        policy: Any,
        examples: Sequence[Example],
        responses: Responses,
        noise_seeds: Sequence[int],
        clock: Stopwatch | None = None,
        steps: int | None = None,
    ) -> Judged:
        """The pictures, without any score.

        Args:
            steps: denoising steps; None is `rollout.num_steps`.
        """
        parts, clock = self.parts, clock or self.parts.clock
        texts = parts.tokenizer.batch_decode([list(ids) for ids in responses.completion_ids], skip_special_tokens=True)
        with clock.part("text"):
            states, truncated = self.states(policy, examples, texts, responses)
            negatives = self.negatives(policy, examples) if parts.guidance_scale > 1 else [None] * len(examples)
        with clock.part("rollout"):
            drawings = [
                Drawing(text, seed, size_of(example), negative, (example.source,) if example.source else ())
                for example, text, seed, negative in zip(examples, states, noise_seeds, negatives, strict=True)
            ]
            rollout, k = parts.config.rollout, parts.algorithm.images_per_completion
            at_hand = drawing_on(parts.painter, policy.device) if parts.algorithm.offload_painter else nullcontext()
            with at_hand:
                drawn = draw(
                    parts.painter,
                    drawings,
                    steps or rollout.num_steps,
                    parts.guidance_scale,
                    k,
                    rollout.batch_size_per_device,
                    clock,
                )
        images = [to_uint8(rows) for rows in drawn]
        broken = [i * len(rows) + row for i, rows in enumerate(drawn) for row in broken_rows(rows)]
        return Judged(examples, texts, images, Scores({}, {}), [None] * len(texts), truncated, broken)

    def states(
        self, policy: Any, examples: Sequence[Example], texts: Sequence[str], responses: Responses
    ) -> tuple[list[Tensor], int]:
        """Text states [S, D] of each completion, and how many of them were cut."""
        if self.parts.algorithm.conditioning == "rewrite_text":
            responses = self._asked(texts, examples)
        return self._encode(policy, responses)

    def negatives(self, policy: Any, examples: Sequence[Example]) -> list[Tensor]:
        """States of the negative prompt beside each example's pictures."""
        base = self.parts.algorithm.encodes_negatives == "base"
        if not base:
            self._negatives.clear()
        keys = ["" if example.source is None else picture_key(example.source) for example in examples]
        missing = {key: e for key, e in zip(keys, examples, strict=True) if key not in self._negatives}
        if missing:
            empty = self._asked([NEGATIVE] * len(missing), list(missing.values()))
            states, _ = self._encode(policy, empty, adapter=not base)
            self._negatives |= dict(zip(missing, (state.cpu() for state in states), strict=True))
        for key in keys:
            self._negatives.move_to_end(key)
        found = [self._negatives[key] for key in keys]
        while len(self._negatives) > KEPT_NEGATIVES:
            self._negatives.popitem(last=False)
        return found

    def _asked(self, texts: Sequence[str], examples: Sequence[Example]) -> Responses:
        """Texts in the place of the prompt, in the chat of the diffusion model."""
        parts = self.parts
        chats = [chat_messages(parts.task, text) for text in texts]
        return asked(parts.processor, parts.task, chats, [parts.shown(example) for example in examples])

    def _encode(self, policy: Any, responses: Responses, *, adapter: bool = True) -> tuple[list[Tensor], int]:
        parts = self.parts
        return encode_response(
            policy,
            responses,
            pad_token_id=parts.tokenizer.pad_token_id,
            drop=parts.drop,
            limit=parts.config.model.max_sequence_length,  # type: ignore[union-attr]
            truncate=parts.algorithm.on_overflow == "truncate",
            batch_size=parts.config.rollout.batch_size_per_device,
            adapter=adapter,
        )


def size_of(example: Example) -> tuple[int, int]:
    """(height, width) that an example is drawn at."""
    if example.source is not None:
        return example.source.height, example.source.width
    assert example.size is not None  # data sets give one to every example without a source
    return example.size


def items_of(example: Example, text: str, finished: bool, images: Tensor) -> list[RewardItem]:
    """What scorers see of the K pictures of a completion; in the metadata what was said, and whether to its end."""
    return [
        RewardItem(
            id=k,
            prompt=example.prompt,
            image=image.numpy(),
            mask=None if example.mask is None else np.asarray(example.mask),
            source=None if example.source is None else np.asarray(example.source),
            reference=None if example.reference is None else np.asarray(example.reference),
            group=example.id,
            metadata={**example.metadata, "completion": text, "finished": finished},
        )
        for k, image in enumerate(images)
    ]


def mean_rewards(scores: Scores, each: int) -> list[float | None]:
    """Mean combined score of every `each` pictures; None where one of them has none: a failure is never a number."""
    combined = scores.combined()
    groups = [combined[i : i + each] for i in range(0, len(combined), each)]
    return [None if None in group else sum(v for v in group if v is not None) / each for group in groups]


def reward_means(scores: Scores) -> dict[str, float]:
    """Mean of each reward over the pictures that have it, and how many failed."""
    means: dict[str, float] = {}
    for name in scores.outcomes:
        values = [value for value in scores.values(name) if value is not None]
        if values:
            means[f"reward/{name}"] = sum(values) / len(values)
        means[f"failed/{name}"] = float(len(scores) - len(values))
    return means


def evaluation_of(rounds: Sequence[Judged]) -> Evaluation:
    """A row for every picture of one or more rounds over the same examples: what was said stands under `read`."""
    rows: list[dict[str, Any]] = []
    for number, judged in enumerate(rounds):
        each, combined = judged.pictures_each, judged.scores.combined()
        for at, total in enumerate(combined):
            i, k = divmod(at, each)
            row: dict[str, Any] = {"example": judged.examples[i].id, "index": number * each + k, "text": None}
            for name, column in judged.scores.outcomes.items():
                row |= _measure(name, column[at])
            rows.append({**row, "combined": total, "read": judged.texts[i]})
    pictures = [picture.numpy() for judged in rounds for images in judged.images for picture in images]
    return Evaluation(rows, pictures)


def judged_grid(judged: Judged, rows: int = 8) -> Image:
    """Source with its instruction, edit with what was said, and the scores, a completion a row."""
    cells: list[list[tuple[Any, str]]] = []
    for i, (example, text) in list(enumerate(zip(judged.examples, judged.texts, strict=True)))[:rows]:
        first = judged.images[i][0].numpy()
        at = i * judged.pictures_each
        told = [f"{n} {_short(column[at])}" for n, column in judged.scores.outcomes.items()]
        source = first * 0 + 255 if example.source is None else example.source
        reward = judged.rewards[i]
        cells.append([(source, example.prompt), (first, text), *_words(told, reward, first)])
    return grid(cells, ["source", "edit", "scores"])


def first_of(judged: Judged, count: int) -> Judged:
    """The first `count` completions."""
    pictures = count * judged.pictures_each
    outcomes = {name: column[:pictures] for name, column in judged.scores.outcomes.items()}
    return replace(
        judged,
        examples=judged.examples[:count],
        texts=judged.texts[:count],
        images=judged.images[:count],
        scores=Scores(outcomes, judged.scores.weights),
        rewards=judged.rewards[:count],
        broken=[row for row in judged.broken if row < pictures],
    )


def joined(parts: Sequence[Judged]) -> Judged:
    """Several batches as one."""
    first = parts[0]
    outcomes: dict[str, list[Outcome]] = {
        name: [outcome for part in parts for outcome in part.scores.outcomes[name]] for name in first.scores.outcomes
    }
    starts = list(accumulate((len(part.texts) * part.pictures_each for part in parts[:-1]), initial=0))
    return replace(
        first,
        examples=[e for part in parts for e in part.examples],
        texts=[t for part in parts for t in part.texts],
        images=[image for part in parts for image in part.images],
        scores=Scores(outcomes, first.scores.weights),
        rewards=[r for part in parts for r in part.rewards],
        truncated=sum(part.truncated for part in parts),
        broken=[start + row for start, part in zip(starts, parts, strict=True) for row in part.broken],
    )


def _words(told: Sequence[str], reward: float | None, like: Any) -> list[tuple[Any, str]]:
    """A blank picture that carries the scores in its label."""
    total = "failed" if reward is None else f"{reward:.2f}"
    return [(np.full_like(like, 255), f"{total}: {', '.join(told)}" if len(told) > 1 else total)]


def _measure(name: str, outcome: Outcome) -> dict[str, Any]:
    if isinstance(outcome, Failure):
        return {name: None}
    detail = {f"{name}.{k}": v for k, v in outcome.detail.items() if isinstance(v, int | float)}
    return {name: outcome.value, **detail}


def _short(outcome: Outcome) -> str:
    return f"{outcome.value:.2f}" if isinstance(outcome, Score) else outcome.code


def seeds_of(purpose: str, seed: int, examples: Sequence[Example], number: int) -> list[int]:
    """Noise seeds of completions: one for all that are about an example, another each time it comes up."""
    return [derive_seed(seed, purpose, example.id, number) for example in examples]


def answer(
    judge: Judge, policy: Any, examples: Sequence[Example], seed: int, purpose: str, k: int, *, score: bool
) -> Judged:
    """Answers to examples and their pictures, `rollout.batch_size_per_device` at a time. What is drawn depends on seed,
    purpose, example and `k` alone: but for rounding neither on the batch nor on the process.

    Args:
        policy: with its weights at hand, and able to `generate`.
    """
    parts, found = judge.parts, list[Judged]()
    options, size = generation_options(parts), parts.config.rollout.batch_size_per_device
    for start in range(0, len(examples), size):
        chunk = examples[start : start + size]
        words = [derive_seed("say", purpose, seed, example.id, k) for example in chunk]
        noise = [derive_seed(purpose, seed, example.id, k) for example in chunk]
        said = speak(policy, parts, chunk, options, words)
        if score:
            found.append(judge(policy, chunk, said, noise, training=False))
        else:
            found.append(judge.draw_only(policy, chunk, said, noise))
    return joined(found)
