"""Defaults against the guide's table: the same, or a stated reason."""

from __future__ import annotations

from functools import reduce
from typing import Annotated, Any

import pytest
from pydantic import TypeAdapter, ValidationError

from retouch.config import parse_run
from retouch.config.run import RunConfig
from retouch.families import FAMILIES
from tests.families.facts import facts_of

from .conftest import BASE
from .leaves import leaves

GUIDE = [
    # algorithm, key, the guide's default, ours, why it differs
    ("grpo", "algorithm.sft_steps", 1000, 0, "the guide's base cannot write yet; a run says when its own cannot"),
    ("grpo", "rollout.group_size", 1, 8, "K = 1 has no group to compare with; 4-8 is recommended"),
    ("grpo", "rollout.batches_per_epoch", 1, 1, ""),
    ("grpo", "rollout.num_steps", 50, 10, "Flow-GRPO samples 6-10 steps in training; evaluation has steps of its own"),
    ("grpo", "rollout.guidance_scale", 3.5, None, "3.5 is FLUX.1-dev's; null takes the model's own, 30 for Fill"),
    ("grpo", "algorithm.timestep_fraction", 1.0, 1.0, ""),
    ("grpo", "algorithm.inner_epochs", 1, 1, ""),
    ("nft", "algorithm.inner_epochs", 1, 1, ""),
    ("grpo", "algorithm.advantage_clip", 5, 5, ""),
    ("nft", "algorithm.advantage_clip", 5, 5, ""),
    # rl_per_prompt_stat_tracking is off by default, which is PPO: an algorithm of its own here
    ("ppo", "algorithm.baseline", "batch", "batch", ""),
    ("ppo", "algorithm.scale", "batch", "batch", ""),
    ("grpo", "algorithm.baseline", "batch", "group", "the recommended per-prompt statistics are what GRPO means"),
    ("grpo", "algorithm.clip_range", 0.2, 1e-4, "log-probabilities are means over dims: 0.2 would never clip"),
    ("grpo", "algorithm.kl_weight", 0.1, 0.0, "published FLUX and window recipes keep none; it costs a forward a step"),
    ("nft", "algorithm.kl_weight", 0.01, 0.01, ""),
    ("nft", "algorithm.mix", 0.5, 0.5, ""),
    ("nft", "algorithm.mode", "normal", "normal", ""),
    ("nft", "algorithm.old_policy", "frozen", "ramp_half", "0 is the guide's default, 1 what it recommends"),
    ("grpo", "ema", None, None, ""),
    ("nft", "ema.decay", 0.999, 0.999, ""),
    ("grpo", "ema.decay", 0.9999, 0.999, "0.9999 remembers more steps than most runs take"),
    ("grpo", "ema.update_interval", 1, 1, ""),
    ("grpo", "optimizer.lr", 1e-4, 1e-4, ""),
    ("grpo", "optimizer.gradient_accumulation", 4, 4, ""),
    ("grpo", "training.max_steps", 10_000, 10_000, ""),
    ("grpo", "training.checkpoint_every", 500, 500, ""),
    ("grpo", "data.resolution", 512, 512, ""),
]


@pytest.mark.parametrize(
    ("algorithm", "key", "guide", "ours", "reason"), GUIDE, ids=[f"{algorithm}-{key}" for algorithm, key, *_ in GUIDE]
)
def test_a_default_is_the_guides_or_has_a_reason(
    algorithm: str, key: str, guide: object, ours: object, reason: str
) -> None:
    data = {name: value for name, value in BASE["data"].items() if name != "resolution"}
    written = {**BASE, "model": {"family": "flux_fill"}, "data": data, "algorithm": {"name": algorithm}}
    run = parse_run({**written, "ema": {}} if key.startswith("ema.") else written)
    assert reduce(getattr, key.split("."), run) == ours
    assert bool(reason) == (guide != ours)


def test_the_table_names_options_that_exist() -> None:
    assert {key for _, key, *_ in GUIDE} - {leaf.key for leaf in leaves(RunConfig)} == {"ema"}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_guidance_of_null_is_the_models(family: str) -> None:
    assert FAMILIES[family].spec.guidance_scale == facts_of(family).guidance_scale


def test_a_default_is_a_value_that_its_key_accepts() -> None:
    """A run directory holds the whole run with its defaults: one outside its own bounds could not be opened again."""
    own = {leaf.owner: leaf.info for leaf in leaves(RunConfig)}
    refused: list[str] = []
    for owner, info in own.items():
        if info.is_required() or info.default_factory is not None:
            continue
        annotation: Any = Annotated[(info.annotation, *info.metadata)] if info.metadata else info.annotation
        try:
            TypeAdapter(annotation).validate_python(info.default)
        except ValidationError:
            refused.append(owner)
    assert len(own) > 300 and refused == []
