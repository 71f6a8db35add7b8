"""What goes into an optimizer step of GRPO: whose rewards are compared, what each row weighs, which way it pushes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from retouch.data.sampler import (
    Slot,
    rank_slots,
)
from retouch.rewards.protocol import RewardItem
from retouch.rewards.table import Scores
from retouch.training import experience
from retouch.types import Failure, Score

from .runs import Config, Use, brightness, of_kind, train, weights

pytestmark = pytest.mark.usefixtures("bare", "shallow")

SIX = {"rollout__batch_size_per_device": 6, "rollout__group_size": 3, "optimizer__batch_size_per_device": 6}
"""Two groups of three in one forward."""


def moved(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float((first[n] - second[n]).square().sum()) for n in first))


# --- rollouts ---


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int] | None]]:
    """Seeds and noise seeds of every batch that was sampled for rewards."""
    seeds: list[tuple[list[int], list[int] | None]] = []
    real = experience.sample

    def watch(*arguments: Any, **options: Any) -> Any:
        seeds.append((list(arguments[4]), arguments[5]))
        return real(*arguments, **options)

    monkeypatch.setattr(experience, "sample", watch)
    return seeds


def test_every_rollout_has_a_seed_of_its_own(config: Config, drawn: list[tuple[list[int], None]]) -> None:
    """Within a group, between groups, and from one epoch to the next, which here takes the same examples."""
    train(config(rollout__global_groups_per_batch=8, optimizer__batch_size_per_device=16, training__max_steps=2))
    seeds = [seed for batch, _ in drawn for seed in batch]
    assert len(seeds) == len(set(seeds)) == 2 * 8 * 2


def test_shared_noise_is_shared_within_the_group_only(config: Config, drawn: list[tuple[list[int], list[int]]]) -> None:
    train(config(rollout__shared_noise=True, training__max_steps=1))
    ((seeds, noise),) = drawn
    assert noise[0] == noise[1] != noise[2] == noise[3]
    assert len(set(seeds)) == 4


# --- groups and weights ---


def test_a_row_of_the_grid_is_a_group_where_processes_cut_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five of nine samples of each rollout batch, in groups of three: the second batch begins a group of its own."""
    monkeypatch.setattr(experience, "grid", lambda rows: [[label for _, label in row] for row in rows])
    batches = [
        Scores(
            {"a": [Failure("timeout", "-") if number == 1 else Score(group + number / 10) for group, number in slots]},
            {"a": 1.0},
            [RewardItem(number, "", np.zeros((1, 1, 3), np.uint8), group=group) for group, number in slots],
        )
        for slots in ([(0, 0), (0, 1), (0, 2), (1, 0)], [(1, 1)], [(2, 0), (2, 1), (2, 2), (3, 0)], [(3, 1)])
    ]
    shown = [["0.00", "failed", "0.20"], ["1.00", "failed"], ["2.00", "failed", "2.20"]]
    assert experience.rollout_grid(batches, 3) == shown


def test_an_epoch_without_any_signal_is_skipped_under_a_kl_as_well(config: Config, scripted: Use) -> None:
    """Every group's rewards are alike: no row is left to compute the reference on."""
    scripted(lambda item: Score(0.5))
    _, records = train(config(training__max_steps=1, algorithm__kl_weight=0.04))
    assert [r["skipped"] for r in of_kind(records, "train")] == [1.0]


def test_only_differences_within_a_group_count(config: Config, scripted: Use) -> None:
    """Whole groups that are better than others teach nothing; compared with strangers their rows would train."""
    scripted(lambda item: Score(float((item.group or 0) % 7)))
    _, records = train(config(training__max_steps=2))
    assert [r["skipped"] for r in of_kind(records, "train")] == [1.0, 1.0]
    assert of_kind(records, "rollout")[0]["combined_std"] > 0


def test_a_padded_row_weighs_nothing(config: Config, scripted: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    """As another rank would have it: the last slot once more, to keep ranks in step."""
    scripted(brightness)
    plain, _ = train(config(name="plain", training__max_steps=1, **SIX))

    def padded(*share: Any) -> list[Slot]:
        slots = rank_slots(*share)
        return [*slots, replace(slots[-1], padding=True)]

    monkeypatch.setattr(experience, "rank_slots", padded)
    more, records = train(config(name="more", training__max_steps=1, **{**SIX, "rollout__batch_size_per_device": 7}))
    (step,), (rollout,) = of_kind(records, "train"), of_kind(records, "rollout")
    assert step["rows"] == 6.0 and rollout["images"] == 6.0 and rollout["failed"] == 0.0
    more_weights = weights(more)
    for name, t in weights(plain).items():
        torch.testing.assert_close(more_weights[name], t, atol=2e-5, rtol=0)


def test_every_image_of_a_step_counts_the_same_however_it_is_split(config: Config, scripted: Use) -> None:
    """AdamW would hide a wrong scale, the gradient's norm does not: in forwards of 6, 4 + 2 and 1 each, with one row of
    weight 0 that makes the forwards unequal."""
    scripted(lambda item: Failure("bad_item", "no") if item.id == 2 else brightness(item))
    norms: list[float] = []
    for rows, forwards in ((6, 1), (3, 2), (1, 6)):
        shape = {**SIX, "optimizer__batch_size_per_device": rows, "optimizer__gradient_accumulation": forwards}
        _, records = train(config(name=f"by{rows}", training__max_steps=1, **shape, algorithm__kl_weight=0.1))
        norms.append(of_kind(records, "train")[0]["grad_norm"])
    assert norms[1:] == pytest.approx([norms[0]] * 2, rel=1e-3)


# --- the kl ---

KL = {"optimizer__lr": 1e-3, "algorithm__inner_epochs": 2, "optimizer__batch_size_per_device": 4}


@pytest.mark.full
def test_the_kl_pulls_back_to_the_reference(config: Config, scripted: Use) -> None:
    scripted(brightness)
    free, _ = train(config(name="free", **KL))
    held, _ = train(config(name="held", algorithm__kl_weight=1e4, **KL))
    start = held.policy.state("reference")
    assert moved(weights(held), start) < 0.8 * moved(weights(free), start)


def test_the_reference_is_the_policy_at_the_start_not_that_of_the_epoch(config: Config, scripted: Use) -> None:
    scripted(brightness)
    _, records = train(config(algorithm__kl_weight=1e-3, **KL))
    first, _, third, _ = (r["kl"] for r in of_kind(records, "train"))
    assert first <= 1e-9 < 1e-7 < third


# --- averages ---


def test_the_average_follows_the_weights(config: Config, scripted: Use) -> None:
    """decay_t = min((1 + t) / (10 + t), decay): 2/11, then 3/12."""
    scripted(brightness)
    states: list[dict[str, Tensor]] = []
    for steps in (1, 2):
        run, _ = train(config(name=f"s{steps}", training__max_steps=steps, ema={"decay": 0.9}))
        states.append(weights(run))
    start, _ = train(config(name="start", training__max_steps=1, optimizer__lr=1e-30))
    begun = weights(start)
    for name, average in run.policy.state("ema").items():
        once = 2 / 11 * begun[name] + 9 / 11 * states[0][name]
        torch.testing.assert_close(average, 3 / 12 * once + 9 / 12 * states[1][name], atol=1e-6, rtol=0)
    assert moved(states[0], states[1]) > 1e-3


@pytest.mark.full
def test_the_ceiling_of_the_decay_holds(config: Config, scripted: Use) -> None:
    scripted(brightness)
    run, _ = train(config(training__max_steps=1, ema={"decay": 0.1}))
    start, _ = train(config(name="start", training__max_steps=1, optimizer__lr=1e-30))
    begun = weights(start)
    trained = weights(run)
    for name, average in run.policy.state("ema").items():
        torch.testing.assert_close(average, 0.1 * begun[name] + 0.9 * trained[name], atol=1e-6, rtol=0)
