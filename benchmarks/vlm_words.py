"""Do the words still decide what is drawn, after training? The editor reads states, and those of the prompt may drift
so far that they say the answer by themselves.

Drawn are the held-out tasks of a finished run by its last weights and by the base, from the noise of its evaluations:
with a blank completion, and with the completions of other tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from retouch.algorithms.vlm_grpo.responses import Responses, generate_completions
from retouch.algorithms.vlm_grpo.run import VlmRun
from retouch.algorithms.vlm_grpo.scoring import CompletionScorer, completion_seeds
from retouch.algorithms.vlm_grpo.use import evaluated_dtype, open_trained
from retouch.config import RunConfig
from retouch.config.needs import needed_pictures
from retouch.data.dataset import Dataset, load_dataset
from retouch.rewards.table import RewardTable
from retouch.tiny.edits import (
    COLOURS,
    colour_share,
)
from retouch.types import Example


def words_decide(config: RunConfig, weights: Path | None, read: Sequence[str]) -> dict[str, Any]:
    """What the pictures show when the completions are not the policy's own.

    Args:
        weights: of a checkpoint; None: the base.
        read: what the run's evaluation of these weights read.

    Returns:
        "blank": with nothing said, share of tasks drawn in the colour that they ask for ("as_asked") and in the one
        that they had ("as_it_was"). "moved": of the tasks that are given the completion of another one, if it says
        another colour than their own completion and than they ask for, how many ("tasks") and the share of them drawn
        in the colour of the words ("as_said") and in that of the instruction ("as_asked").

    Raises:
        ValueError: these weights do not say again what was read.
    """
    assert config.evaluation.data is not None
    data = load_dataset(config.evaluation.data, "evaluation.data", needed_pictures(config, training=False))
    rewards = RewardTable({}, config.reward_client)
    parts = open_trained(config, data, weights, rewards, "cpu", evaluated_dtype(config, [weights]))
    said = spoken(parts, data)
    if parts.tokenizer.batch_decode([list(ids) for ids in said], skip_special_tokens=True) != list(read):
        raise ValueError(f"{weights or 'base'}: its answers are not those of the run's evaluation")
    wanted = [str(example.metadata["colour"]) for example in data]
    had = [colour_of(np.asarray(example.source), np.asarray(example.mask)) for example in data]
    blank = shown(parts, data, [[parts.tokenizer.eos_token_id]] * len(data))
    giver = {to: by for to, by in moved(read).items() if read[by] != wanted[to]}
    told = shown(parts, data, [said[giver.get(i, i)] for i in range(len(data))])
    return {
        "blank": {"as_asked": _share(blank, wanted), "as_it_was": _share(blank, had)},
        "moved": {
            "tasks": len(giver),
            "as_said": _share([told[to] for to in giver], [read[by] for by in giver.values()]),
            "as_asked": _share([told[to] for to in giver], [wanted[to] for to in giver]),
        },
    }


def spoken(parts: VlmRun, data: Dataset) -> list[Sequence[int]]:
    """The ids that the policy generates for each example."""
    batch, found = parts.config.rollout.batch_size_per_device, list[Sequence[int]]()
    for start in range(0, len(data), batch):
        chunk = data[start : start + batch]
        options = parts.generation_options
        tokens, _ = completion_seeds("eval", 0, chunk, 0)
        found += generate_completions(parts.policy, parts, chunk, options, tokens).completion_ids
    return found


def shown(parts: VlmRun, data: Dataset, completions: Sequence[Sequence[int]]) -> list[str | None]:
    """The colour that more than half of each shape is drawn in after a completion; None: no colour of the task."""
    batch, judge, drawn = parts.config.rollout.batch_size_per_device, CompletionScorer(parts), []
    for start in range(0, len(data), batch):
        chunk = data[start : start + batch]
        given = replace(questions(parts, chunk), completion_ids=completions[start : start + batch])
        drawn += judge.generate(parts.policy, chunk, given, completion_seeds("eval", 0, chunk, 0)[1])
    pairs = zip(data, (one.images for one in drawn), strict=True)
    return [colour_of(image[0].numpy(), np.asarray(example.mask)) for example, image in pairs]


def questions(parts: VlmRun, examples: Sequence[Example]) -> Responses:
    """Examples as the policy is asked them."""
    return parts.prompts(examples)


def colour_of(image: Any, mask: Any) -> str | None:
    """The colour of more than half of a shape."""
    return next((colour for colour in COLOURS if colour_share(image, mask, colour) > 0.5), None)


def moved(read: Sequence[str]) -> dict[int, int]:
    """Row -> the row whose completion it gets: those that said a colour, by colour, turned by the most frequent one's
    count, so that everyone gets another word unless that one is the word of most."""
    by_word = sorted((i for i, word in enumerate(read) if word in COLOURS), key=lambda i: read[i])
    turn = max(sum(read[i] == colour for i in by_word) for colour in COLOURS)
    pairs = ((to, by_word[(at + turn) % len(by_word)]) for at, to in enumerate(by_word))
    return {to: by for to, by in pairs if read[to] != read[by]}


def _share(drawn: Sequence[str | None], colours: Sequence[str | None]) -> float:
    return round(float(np.mean([a == b for a, b in zip(drawn, colours, strict=True)])), 4)
