"""From completions to rewards: encode the completions, generate images with the frozen diffusion model, score them.

Legend: B completions, K images of each.
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

from retouch.algorithms.vlm_grpo.images import ImageRequest, generate_images, placed_on
from retouch.algorithms.vlm_grpo.responses import Responses, encode_response, generate_completions
from retouch.algorithms.vlm_grpo.run import VlmRun
from retouch.data.sampler import derive_seed
from retouch.families.qwen.base import NEGATIVE
from retouch.image_encoder import picture_key
from retouch.observe.grids import grid
from retouch.observe.timing import Stopwatch
from retouch.rewards.protocol import RewardItem
from retouch.rollout.sampler import broken_rows, to_uint8
from retouch.training.scoring import PendingBatch, items_of, settle
from retouch.training.evaluation import Evaluation, measures
from retouch.types import Example, Outcome, Score, Scores

KEPT_NEGATIVES = 64
"""Source images whose negative prompt's states are cached; a few MB each at released sizes."""


@dataclass(frozen=True)
class ScoredCompletions:
    """B completions with their images and rewards.

    Attributes:
        images: [K, H, W, 3] uint8 of each.
        scores: outcomes of B * K images, those of a completion next to each other.
        rewards: the mean combined score of each; None where any of its images lacks a reward with a weight.
        truncated: number of conditions that were truncated.
        broken: images that contain NaN or Inf.
    """

    examples: Sequence[Example]
    texts: Sequence[str]
    images: Sequence[Tensor]
    scores: Scores
    rewards: list[float | None]
    truncated: int
    broken: Sequence[int] = ()

    @property
    def images_each(self) -> int:
        return len(self.images[0])

    def first(self, count: int) -> ScoredCompletions:
        """The first `count` completions."""
        images = count * self.images_each
        outcomes = {name: column[:images] for name, column in self.scores.outcomes.items()}
        return replace(
            self,
            examples=self.examples[:count],
            texts=self.texts[:count],
            images=self.images[:count],
            scores=Scores(outcomes, self.scores.weights),
            rewards=self.rewards[:count],
            broken=[row for row in self.broken if row < images],
        )


class CompletionScorer:
    """Scores completions by their images; caches the states of negative prompts that training does not change."""

    def __init__(self, run: VlmRun) -> None:
        self.run = run
        self.ends = {*run.end_tokens, run.tokenizer.pad_token_id}
        self._negatives: OrderedDict[str, Tensor] = OrderedDict()  # by the image: ids repeat in other data sets

    def score(
        self,
        policy: Any,
        examples: Sequence[Example],
        responses: Responses,
        noise_seeds: Sequence[int],
        *,
        training: bool = True,
    ) -> ScoredCompletions:
        """Generate images and score them.

        Args:
            policy: the text encoder in its current state, with whole weights.
            noise_seeds: of each completion; a group shares one.
            training: False for an evaluation, which has gold rewards and its own number of denoising steps.

        Raises:
            RewardOutage: rewards stayed unavailable.
            ResponseTooLong: a condition that does not fit.
        """
        run = self.run
        clock = run.clock if training else Stopwatch()  # all of an evaluation counts as "eval"
        steps = None if training else run.config.evaluation.num_steps
        generated = self.generate(policy, examples, responses, noise_seeds, clock, steps)
        ends = [bool(ids) and ids[-1] in self.ends for ids in responses.completion_ids]
        rows = zip(examples, generated.texts, ends, generated.images, strict=True)
        items = [item for row in rows for item in _items(*row)]
        with clock.part("reward_wait"):
            pending = PendingBatch(items, run.rewards.submit(items, training=training), generated.broken)
            [scores] = settle(run.rewards, [pending], run.config.reward_client, training=training)
        rewards = mean_rewards(scores, run.algorithm.images_per_completion)
        return replace(generated, scores=scores, rewards=rewards)

    def generate(
        self,
        policy: Any,
        examples: Sequence[Example],
        responses: Responses,
        noise_seeds: Sequence[int],
        clock: Stopwatch | None = None,
        steps: int | None = None,
    ) -> ScoredCompletions:
        """Generate images without scoring them.

        Args:
            steps: denoising steps; None is `rollout.num_steps`.
        """
        run, clock = self.run, clock or self.run.clock
        texts = run.tokenizer.batch_decode([list(ids) for ids in responses.completion_ids], skip_special_tokens=True)
        with clock.part("text"):
            states, truncated = self.states(policy, examples, texts, responses)
            negatives = self.negatives(policy, examples) if run.guidance_scale > 1 else [None] * len(examples)
        with clock.part("rollout"):
            requests = [
                ImageRequest(text, seed, size_of(example), negative, (example.source,) if example.source else ())
                for example, text, seed, negative in zip(examples, states, noise_seeds, negatives, strict=True)
            ]
            rollout, offloaded = run.config.rollout, run.algorithm.offload_diffusion_model
            with placed_on(run.diffusion_model, policy.device) if offloaded else nullcontext():
                generated = generate_images(
                    run.diffusion_model,
                    requests,
                    steps or rollout.num_steps,
                    run.guidance_scale,
                    run.algorithm.images_per_completion,
                    rollout.batch_size_per_device,
                    clock,
                )
        images = [to_uint8(rows) for rows in generated]
        broken = [i * len(rows) + row for i, rows in enumerate(generated) for row in broken_rows(rows)]
        return ScoredCompletions(examples, texts, images, Scores({}, {}), [None] * len(texts), truncated, broken)

    def complete(
        self, policy: Any, examples: Sequence[Example], seed: int, purpose: str, k: int, *, score: bool
    ) -> ScoredCompletions:
        """Completions of examples and their images, `rollout.batch_size_per_device` at a time. The result depends on
        seed, purpose, example and `k` alone: up to rounding neither on the batch nor on the process.

        Args:
            policy: with whole weights, and able to `generate`.
        """
        run, found = self.run, list[ScoredCompletions]()
        options, size = run.generation_options, run.config.rollout.batch_size_per_device
        for start in range(0, len(examples), size):
            chunk = examples[start : start + size]
            token_seeds = [derive_seed("say", purpose, seed, example.id, k) for example in chunk]
            noise = [derive_seed(purpose, seed, example.id, k) for example in chunk]
            responses = generate_completions(policy, run, chunk, options, token_seeds)
            if score:
                found.append(self.score(policy, chunk, responses, noise, training=False))
            else:
                found.append(self.generate(policy, chunk, responses, noise))
        return joined(found)

    def states(
        self, policy: Any, examples: Sequence[Example], texts: Sequence[str], responses: Responses
    ) -> tuple[list[Tensor], int]:
        """Text states [S, D] of each completion, and how many of them were truncated."""
        if self.run.algorithm.conditioning == "rewrite_text":
            responses = self.run.prompts(examples, texts)
        return self._encode(policy, responses)

    def negatives(self, policy: Any, examples: Sequence[Example]) -> list[Tensor]:
        """States of the negative prompt with each example's source image."""
        base = self.run.algorithm.encodes_negatives == "base"
        if not base:
            self._negatives.clear()
        keys = ["" if example.source is None else picture_key(example.source) for example in examples]
        missing = {key: e for key, e in zip(keys, examples, strict=True) if key not in self._negatives}
        if missing:
            prompts = self.run.prompts(list(missing.values()), [NEGATIVE] * len(missing))
            states, _ = self._encode(policy, prompts, adapter=not base)
            self._negatives |= dict(zip(missing, (state.cpu() for state in states), strict=True))
        for key in keys:
            self._negatives.move_to_end(key)
        found = [self._negatives[key] for key in keys]
        while len(self._negatives) > KEPT_NEGATIVES:
            self._negatives.popitem(last=False)
        return found

    def _encode(self, policy: Any, responses: Responses, *, adapter: bool = True) -> tuple[list[Tensor], int]:
        run = self.run
        return encode_response(
            policy,
            responses,
            pad_token_id=run.tokenizer.pad_token_id,
            drop=run.drop,
            limit=run.config.model.max_sequence_length,  # type: ignore[union-attr]
            truncate=run.algorithm.on_overflow == "truncate",
            batch_size=run.config.rollout.batch_size_per_device,
            adapter=adapter,
        )


def size_of(example: Example) -> tuple[int, int]:
    """(height, width) of the image that is generated for an example."""
    if example.source is not None:
        return example.source.height, example.source.width
    assert example.size is not None  # data sets give one to every example without a source
    return example.size


def _items(example: Example, text: str, finished: bool, images: Tensor) -> list[RewardItem]:
    """Reward items of the K images of a completion; the metadata holds the completion and whether it has ended."""
    items = items_of([example] * len(images), images, [example.id] * len(images))
    return [replace(item, metadata={**item.metadata, "completion": text, "finished": finished}) for item in items]


def mean_rewards(scores: Scores, each: int) -> list[float | None]:
    """Mean combined score of every `each` images; None where one of them has none: a failure is never a number."""
    combined = scores.combined()
    groups = [combined[i : i + each] for i in range(0, len(combined), each)]
    return [None if None in group else sum(v for v in group if v is not None) / each for group in groups]


def reward_means(scores: Scores) -> dict[str, float]:
    """Mean of each reward over the images that have it, and the number of images without it."""
    means: dict[str, float] = {}
    for name in scores.outcomes:
        values = [value for value in scores.values(name) if value is not None]
        if values:
            means[f"reward/{name}"] = sum(values) / len(values)
        means[f"failed/{name}"] = float(len(scores) - len(values))
    return means


def noise_seeds(purpose: str, seed: int, examples: Sequence[Example], number: int) -> list[int]:
    """Noise seeds of completions: the same for all of one example, another each time the example comes up."""
    return [derive_seed(seed, purpose, example.id, number) for example in examples]


def joined(parts: Sequence[ScoredCompletions]) -> ScoredCompletions:
    """Several batches as one."""
    first = parts[0]
    outcomes: dict[str, list[Outcome]] = {
        name: [outcome for part in parts for outcome in part.scores.outcomes[name]] for name in first.scores.outcomes
    }
    starts = list(accumulate((len(part.texts) * part.images_each for part in parts[:-1]), initial=0))
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


# --- what an evaluation shows ---


def evaluation_of(rounds: Sequence[ScoredCompletions]) -> Evaluation:
    """A row for every image of one or more rounds over the same examples; `read` holds the completion."""
    rows: list[dict[str, Any]] = []
    for number, scored in enumerate(rounds):
        each, combined = scored.images_each, scored.scores.combined()
        for at, total in enumerate(combined):
            i, k = divmod(at, each)
            row: dict[str, Any] = {"example": scored.examples[i].id, "index": number * each + k, "text": None}
            for name, column in scored.scores.outcomes.items():
                row |= measures(name, column[at])
            rows.append({**row, "combined": total, "read": scored.texts[i]})
    images = [image.numpy() for scored in rounds for of_one in scored.images for image in of_one]
    return Evaluation(rows, images)


def scored_grid(scored: ScoredCompletions, rows: int) -> Image:
    """A row for each completion: source with its prompt, first image with the completion, scores."""
    cells: list[list[tuple[Any, str]]] = []
    for i, (example, text) in list(enumerate(zip(scored.examples, scored.texts, strict=True)))[:rows]:
        first = scored.images[i][0].numpy()
        outcomes = {name: column[i * scored.images_each] for name, column in scored.scores.outcomes.items()}
        parts = [f"{n} {f'{o.value:.2f}' if isinstance(o, Score) else o.code}" for n, o in outcomes.items()]
        reward = scored.rewards[i]
        label = "failed" if reward is None else f"{reward:.2f}"
        if len(parts) > 1:
            label += f": {', '.join(parts)}"
        source = first * 0 + 255 if example.source is None else example.source
        cells.append([(source, example.prompt), (first, text), (np.full_like(first, 255), label)])
    return grid(cells, ["source", "edit", "scores"])
