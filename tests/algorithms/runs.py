"""Training small runs, looking at what they did, and a reward that a test writes itself."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from retouch.config import RunConfig
from retouch.observe.run_dir import read_metrics
from retouch.registry import load_attribute
from retouch.rewards.protocol import RewardItem, ScorerSpec
from retouch.training.build import (
    Run,
    build,
)
from retouch.types import Outcome, Score

Config = Callable[..., RunConfig]
"""Dotted overrides with `__` for dots -> a run."""

Rule = Callable[[RewardItem], Outcome]
"""A reward."""

Use = Callable[[Rule], None]
"""What the fixture `scripted` is: scores by this rule from now on."""


def train(config: RunConfig, base: dict[str, Tensor] | None = None) -> tuple[Run, list[dict[str, Any]]]:
    """Run it to its end -> the closed run, and its records; the weights it begins with go into `base`."""
    run = build(config)
    if base is not None:
        base.update(weights(run))
    try:
        load_attribute(config.algorithm.recipe)(run)
    finally:
        run.close()
    return run, read_metrics(run.dir.path / "metrics.jsonl")


def by_group(rule: Callable[[int, RewardItem], Outcome]) -> tuple[Rule, list[int]]:
    """A reward by the number of the item's group, in the order in which training comes to them -> it, and the groups
    so far. Items of evaluations, which have groups of their own, are judged by brightness."""
    seen: list[int] = []

    def numbered(item: RewardItem) -> Outcome:
        group = int(item.group or 0)
        if group >= 200:  # an evaluation
            return brightness(item)
        if group not in seen:
            seen.append(group)
        return rule(seen.index(group), item)

    return numbered, seen


def of_kind(records: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [r for r in records if r["kind"] == kind]


def weights(run: Run) -> dict[str, Tensor]:
    return {n: t.clone() for n, t in run.policy.state().items()}


def same_weights(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether the tensors of the first are those of the second, to the bit."""
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def base_weights(config: RunConfig) -> dict[str, Tensor]:
    """What a run begins with."""
    run = build(config)
    run.close()
    return weights(run)


def labelled(signs: Path, folder: Path, labels: tuple[Any, Any] = ("good", "bad")) -> Path:
    """A manifest for KTO: signs with their words have the first label and blank ones the second, in turns."""
    words, blank = (sorted((signs / name).glob("*_source.png")) for name in ("targets", "prompts"))
    entries: list[dict[str, Any]] = []
    for number, (source, other) in enumerate(zip(words, blank, strict=True)):
        image, label = ((source, labels[0]), (other, labels[1]))[number % 2]
        files = {"image_path": str(source), "mask_path": str(source).replace("_source", "_mask")}
        own = {"id": number, "prompt": "The text is 'WORD'.", "label": label, "target_path": str(image)}
        reference = Path(str(source).replace("_source", "_ref"))
        entries.append(own | files | ({"reference_path": str(reference)} if reference.is_file() else {}))
    path = folder / "labels.json"
    written = folder / f"labels-{os.getpid()}.json"
    written.write_text(json.dumps(entries), encoding="utf-8")
    return written.replace(path)  # whole at any time: the signs are those of all workers


class Scripted:
    """Stands in for the preservation scorer: outcomes by a function of the item."""

    def __init__(self, rule: Rule) -> None:
        self.spec = ScorerSpec("preservation", (-1e9, 1e9), frozenset(), "test", "-")
        self.rule = rule

    def load(self, device: str) -> None: ...

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        return [self.rule(item) for item in items]

    def values(self, images: Tensor, items: Sequence[RewardItem]) -> list[Tensor]:
        """Brightness with its gradient, whatever the rule; a rule reads 8 bits."""
        del items
        return [image.mean() for image in images]


def brightness(item: RewardItem) -> Outcome:
    return Score(float(item.image.mean()) / 255)


def gap_between_light_and_dark(make: Callable[[str], RunConfig], scripted: Use) -> float:
    """Mean brightness of the last rollouts of a run that is rewarded for it, less that of one rewarded for darkness."""
    ends: list[float] = []
    for sign in (1.0, -1.0):
        scripted(lambda item, sign=sign: Score(sign * float(item.image.mean()) / 255))
        _, records = train(make(f"sign{sign:g}"))
        scores = [r["combined_score"] * sign for r in of_kind(records, "rollout")]
        ends.append(sum(scores[-3:]) / 3)
    return ends[0] - ends[1]
