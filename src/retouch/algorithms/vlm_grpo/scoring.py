"""From completions to rewards: encode the completions, generate images with the frozen diffusion model, score them.

Legend: B completions, K images of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from PIL.Image import Image
from torch import Tensor

from retouch.algorithms.vlm_grpo.images import ImageRequest, generate_images, placed_on
from retouch.algorithms.vlm_grpo.responses import Responses, encode_response, generate_completions
from retouch.algorithms.vlm_grpo.run import VlmRun
from retouch.data.sampler import derive_seed
from retouch.families.image_encoder import picture_key
from retouch.families.qwen.spec import NEGATIVE
from retouch.lru import LruCache
from retouch.observe.grids import grid
from retouch.observe.timing import Stopwatch
from retouch.rewards.protocol import RewardItem
from retouch.rewards.table import Scores
from retouch.rollout.sampler import broken_rows, to_uint8
from retouch.training.evaluation import Evaluation, measures
from retouch.training.scoring import item_of, settle
from retouch.types import Example, Outcome, Score

KEPT_NEGATIVES = 64
"""Source images whose negative prompt's states are cached; a few MB each at released sizes."""


@dataclass(frozen=True)
class ScoredCompletion:
    """A completion with its K images and their rewards.

    Attributes:
        images: [K, H, W, 3] uint8.
        broken: indices of images that contain NaN or Inf.
        truncated: whether its condition was truncated.
        outcomes: K outcomes of each reward; empty without scoring.
        combined: combined score of each image; None where a weighted reward is missing.
    """

    example: Example
    text: str
    images: Tensor
    broken: Sequence[int]
    truncated: bool
    outcomes: Mapping[str, Sequence[Outcome]] = field(default_factory=dict[str, Sequence[Outcome]])
    combined: Sequence[float | None] = ()

    @property
    def reward(self) -> float | None:
        """Mean combined score; None if the reward of an image failed."""
        return None if None in self.combined else sum(v for v in self.combined if v is not None) / len(self.combined)


class CompletionScorer:
    """Scores completions by their images; caches the states of negative prompts that training does not change."""

    def __init__(self, run: VlmRun) -> None:
        self.run = run
        self.ends = {*run.end_tokens, run.tokenizer.pad_token_id}
        self._negatives: LruCache[str, Tensor] = LruCache(KEPT_NEGATIVES)  # by the image: ids repeat in other data sets

    def score(
        self,
        policy: Any,
        examples: Sequence[Example],
        responses: Responses,
        noise_seeds: Sequence[int],
        *,
        training: bool = True,
    ) -> tuple[list[ScoredCompletion], Scores]:
        """Generate images and score them.

        Args:
            policy: the text encoder in its current state, with whole weights.
            noise_seeds: of each completion; a group shares one.
            training: False for an evaluation, which has gold rewards and its own number of denoising steps.

        Raises:
            RewardOutage: rewards stayed unavailable.
            ResponseTooLong: a condition that does not fit.
        """
        run, each = self.run, self.run.algorithm.images_per_completion
        clock = run.clock if training else Stopwatch()  # all of an evaluation counts as "eval"
        steps = None if training else run.config.evaluation.num_steps
        generated = self.generate(policy, examples, responses, noise_seeds, clock, steps)
        ended = [bool(ids) and ids[-1] in self.ends for ids in responses.completion_ids]
        items = [item for one, end in zip(generated, ended, strict=True) for item in _items(one, end)]
        broken = [i * each + k for i, one in enumerate(generated) for k in one.broken]
        with clock.part("reward_wait"):
            pending = run.rewards.submit(items, broken=broken, training=training)
            [scores] = settle(run.rewards, [pending], run.config.reward_client, training=training)
        return _with_scores(generated, scores, each), scores

    def generate(
        self,
        policy: Any,
        examples: Sequence[Example],
        responses: Responses,
        noise_seeds: Sequence[int],
        clock: Stopwatch | None = None,
        steps: int | None = None,
    ) -> list[ScoredCompletion]:
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
                ImageRequest(text, seed, size_of(example), negative, sources_of(example))
                for example, text, seed, negative in zip(examples, states, noise_seeds, negatives, strict=True)
            ]
            rollout, offloaded = run.config.rollout, run.algorithm.offload_diffusion_model
            with placed_on(run.diffusion_model, policy.device) if offloaded else nullcontext():
                images = generate_images(
                    run.diffusion_model,
                    requests,
                    steps or rollout.num_steps,
                    run.guidance_scale,
                    run.algorithm.images_per_completion,
                    rollout.batch_size_per_device,
                    clock,
                )
        return [
            ScoredCompletion(example, text, to_uint8(of_one), broken_rows(of_one), cut)
            for example, text, of_one, cut in zip(examples, texts, images, truncated, strict=True)
        ]

    def complete(
        self, policy: Any, examples: Sequence[Example], seed: int, purpose: str, k: int, *, score: bool
    ) -> list[ScoredCompletion]:
        """Completions of examples and their images, `rollout.batch_size_per_device` at a time. The result depends on
        seed, purpose, example and `k` alone: up to rounding neither on the batch nor on the process.

        Args:
            policy: with whole weights, and able to `generate`.
        """
        run, found = self.run, list[ScoredCompletion]()
        options, size = run.generation_options, run.config.rollout.batch_size_per_device
        for start in range(0, len(examples), size):
            chunk = examples[start : start + size]
            tokens, noise = completion_seeds(purpose, seed, chunk, k)
            responses = generate_completions(policy, run, chunk, options, tokens)
            if score:
                found += self.score(policy, chunk, responses, noise, training=False)[0]
            else:
                found += self.generate(policy, chunk, responses, noise)
        return found

    def states(
        self, policy: Any, examples: Sequence[Example], texts: Sequence[str], responses: Responses
    ) -> tuple[list[Tensor], list[bool]]:
        """Text states [S, D] of each completion, and whether they were truncated."""
        if self.run.algorithm.conditioning == "rewrite_text":
            responses = self.run.prompts(examples, texts)
        return self._encode(policy, responses)

    def negatives(self, policy: Any, examples: Sequence[Example]) -> list[Tensor]:
        """States of the negative prompt with each example's source image."""
        base = self.run.algorithm.encodes_negatives == "base"
        if not base:
            self._negatives = LruCache(KEPT_NEGATIVES)
        keys = [" ".join(map(picture_key, sources_of(example))) for example in examples]
        by_key = dict(zip(keys, examples, strict=True))

        def encoded(missing: Sequence[str]) -> list[Tensor]:
            prompts = self.run.prompts([by_key[key] for key in missing], [NEGATIVE] * len(missing))
            return [state.cpu() for state in self._encode(policy, prompts, adapter=not base)[0]]

        return self._negatives.get_all(keys, encoded)

    def _encode(self, policy: Any, responses: Responses, *, adapter: bool = True) -> tuple[list[Tensor], list[bool]]:
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
    assert example.shape is not None  # data sets give a size to every example
    return example.shape


def sources_of(example: Example) -> tuple[Image, ...]:
    """The source images of an example, first the one that is edited."""
    return () if example.source is None else (example.source, *example.more_images)


def _items(completion: ScoredCompletion, ended: bool) -> list[RewardItem]:
    """Reward items of the images of a completion; the metadata holds the completion and whether it has ended."""
    example, images = completion.example, completion.images
    about = {"completion": completion.text, "finished": ended}
    items = [item_of(example, image.numpy(), number) for number, image in enumerate(images)]
    return [replace(item, metadata={**item.metadata, **about}) for item in items]


def _with_scores(generated: Sequence[ScoredCompletion], scores: Scores, each: int) -> list[ScoredCompletion]:
    """Completions with their scores of `each` consecutive images."""
    combined, found = scores.combined(), list[ScoredCompletion]()
    for i, completion in enumerate(generated):
        own = slice(i * each, (i + 1) * each)
        outcomes = {name: column[own] for name, column in scores.outcomes.items()}
        found.append(replace(completion, outcomes=outcomes, combined=combined[own]))
    return found


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
    """Noise seeds of completions: equal within an example, and new each time the example is used."""
    return [derive_seed(seed, purpose, example.id, number) for example in examples]


def completion_seeds(purpose: str, seed: int, examples: Sequence[Example], k: int) -> tuple[list[int], list[int]]:
    """(Seeds of the tokens, seeds of the noise) of the k-th completion of each example, see
    `CompletionScorer.complete`."""
    noise = [(purpose, seed, example.id, k) for example in examples]
    return [derive_seed("say", *key) for key in noise], [derive_seed(*key) for key in noise]


# --- what an evaluation shows ---


def evaluation_of(rounds: Sequence[Sequence[ScoredCompletion]]) -> Evaluation:
    """A row for every image of one or more rounds over the same examples; `read` holds the completion."""
    rows: list[dict[str, Any]] = []
    for number, completions in enumerate(rounds):
        for one in completions:
            for k, total in enumerate(one.combined):
                row: dict[str, Any] = {"example": one.example.id, "index": number * len(one.images) + k, "text": None}
                for name, column in one.outcomes.items():
                    row |= measures(name, column[k])
                rows.append({**row, "combined": total, "read": one.text})
    images = [image.numpy() for completions in rounds for one in completions for image in one.images]
    return Evaluation(rows, images, images)


def scored_grid(completions: Sequence[ScoredCompletion]) -> Image:
    """A row for each completion: source with its prompt, first image with the completion, scores."""
    cells: list[list[tuple[Any, str]]] = []
    for one in completions:
        first = one.images[0].numpy()
        outcomes = {name: column[0] for name, column in one.outcomes.items()}
        parts = [f"{n} {f'{o.value:.2f}' if isinstance(o, Score) else o.code}" for n, o in outcomes.items()]
        label = "failed" if one.reward is None else f"{one.reward:.2f}"
        if len(parts) > 1:
            label += f": {', '.join(parts)}"
        source = first * 0 + 255 if one.example.source is None else one.example.source
        cells.append([(source, one.example.prompt), (first, one.text), (np.full_like(first, 255), label)])
    return grid(cells, ["source", "edit", "scores"])
