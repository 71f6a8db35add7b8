"""The DPO recipe on the tiny bases: which pairs, one noise for four errors, ln 2 where policy and reference agree."""

from __future__ import annotations

import json
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from retouch.algorithms.dpo import recipe as dpo
from retouch.algorithms.dpo.recipe import best_and_worst
from retouch.config import RunConfig
from retouch.core.advantages import RewardRows
from retouch.data.base import DataError
from retouch.engine import Engine
from retouch.training.noised import NoisedRows
from retouch.types import Failure, Score
from tests.selection import default
from tests.tiny_models import WITH_BASE

from .runs import Config, Use, base_weights, brightness, gap_between_light_and_dark, of_kind, train, weights

pytestmark = pytest.mark.usefixtures("bare", "shallow")

LORA = {"kind": "lora", "rank": 4, "alpha": 8}


@pytest.fixture
def dpo_run(config: Config) -> Config:
    def make(**overrides: Any) -> RunConfig:
        algorithm = {"name": "dpo", "beta": 100.0, "reference_refresh_every": 0, **overrides.pop("algorithm", {})}
        return config(algorithm=algorithm, rollout__window=None, rollout__noise_level=None, **overrides)

    return make


# --- ln 2 ---


@pytest.mark.parametrize("family", default(WITH_BASE, lambda family: family == "flux_fill"))
def test_the_loss_is_ln_2_wherever_policy_and_reference_agree(family: str, dpo_run: Config, scripted: Use) -> None:
    """At the start and after each refresh, exactly, with LoRA and recomputed activations; elsewhere it is not."""
    scripted(brightness)
    _, records = train(
        dpo_run(
            model={"family": family, "path": "tiny", "dtype": "fp32", "train": LORA},
            algorithm={"reference_refresh_every": 2, "timesteps_per_pair": 2},
            optimizer__lr=3e-3,
            training__gradient_checkpointing=True,
        )
    )
    steps = of_kind(records, "train")
    assert [step["logit"] == 0.0 for step in steps] == [True, False, True, False]
    assert [step["loss"] == pytest.approx(math.log(2), abs=1e-7) for step in steps] == [True, False, True, False]
    assert all(step["grad_norm"] > 0 for step in steps)


def test_a_frozen_reference_stays_that_of_the_start(dpo_run: Config, scripted: Use) -> None:
    scripted(brightness)
    base = base_weights(dpo_run(name="base"))
    run, records = train(dpo_run(optimizer__lr=1e-3))
    reference = run.policy.state("reference")
    assert all(torch.equal(t, base[n]) for n, t in reference.items())
    assert [step["logit"] == 0.0 for step in of_kind(records, "train")] == [True, False, False, False]


def test_the_warm_up_ends_in_the_reference(dpo_run: Config, scripted: Use) -> None:
    """Not the base: after two supervised steps the first loss is ln 2 again."""
    scripted(brightness)
    _, records = train(dpo_run(algorithm={"warmup_steps": 2}, optimizer__lr=1e-3))
    (first, _) = (step for step in of_kind(records, "train") if step["phase"] == "rl")
    assert first["logit"] == 0.0 and first["loss"] == pytest.approx(math.log(2), abs=1e-7)


# --- pairs ---


def rows(values: list[float], groups: list[int], valid: list[bool] | None = None) -> RewardRows:
    n = len(values)
    keys = torch.tensor(groups)
    index = torch.tensor([groups[:i].count(g) for i, g in enumerate(groups)])
    ok = torch.tensor(valid or [True] * n)
    column = torch.tensor(values, dtype=torch.float64)[:, None]
    weights = torch.ones(1, dtype=torch.float64)
    return RewardRows(["r"], column, ok[:, None], weights, keys, index, torch.zeros(n).bool())


def test_the_best_and_the_worst_of_each_group_are_a_pair() -> None:
    best, worst = best_and_worst(rows([0.1, 0.9, 0.5, 3.0, 1.0, 2.0], [7, 7, 7, 2, 2, 2]), "normalize_then_sum")
    assert (best.tolist(), worst.tolist()) == ([3, 1], [4, 0])


def test_a_tie_makes_no_pair() -> None:
    best, worst = best_and_worst(rows([0.5, 0.5, 0.2, 0.4], [1, 1, 3, 3]), "normalize_then_sum")
    assert (best.tolist(), worst.tolist()) == ([3], [2])


def test_a_failed_reward_is_in_no_pair() -> None:
    """As a zero it would be the worst; alone a valid row has nobody to be paired with."""
    table = rows([math.nan, 0.9, 0.5, math.nan, 0.7], [1, 1, 1, 4, 4], [False, True, True, False, True])
    best, worst = best_and_worst(table, "normalize_then_sum")
    assert (best.tolist(), worst.tolist()) == ([1], [2])


def test_negative_rewards_are_compared_not_clipped() -> None:
    best, worst = best_and_worst(rows([-3.0, -1.0, -2.0], [0, 0, 0]), "sum_then_normalize")
    assert (best.tolist(), worst.tolist()) == ([1], [0])


SCORES = {
    "hps": [0.21, 0.21, 0.25, 0.27],
    "clip_score": [24.0, 20.0, 24.0, 26.0],
    "pick_score": [21.5, 22.0, 21.0, 20.0],
    "aesthetic_score": [5.1, 5.0, 5.6, 5.2],
    "image_reward": [-0.3, 0.4, 0.2, 0.1],
    "vqa_score": [0.91, 0.62, 0.88, 0.75],
    "unified_reward": [5.0, 4.0, 4.0, 4.0],
    "pe_score": [18.0, 18.0, 18.0, 18.0],
    "hpsv3": [3.0, 9.5, 8.0, 7.0],
}
"""Nine scores of four samples of an example."""

RANKS = {
    "hps": [3, 3, 2, 1],
    "clip_score": [2, 3, 2, 1],
    "pick_score": [2, 1, 3, 4],
    "aesthetic_score": [3, 4, 1, 2],
    "image_reward": [4, 1, 2, 3],
    "vqa_score": [1, 4, 2, 3],
    "unified_reward": [1, 2, 2, 2],
    "pe_score": [0, 0, 0, 0],
    "hpsv3": [4, 1, 2, 3],
}
"""By hand, as `create-ensemble` of Follow-Your-Preference (github.com/shenytzzz/Follow-Your-Preference at 6aaa202,
tool.py) defines them: 1 is the highest score, equal scores share a rank and take up one, and where all are equal, every
rank is 0. The sums are 20, 19, 16 and 19: the third sample wins, the first loses."""


def test_a_rank_ensemble_makes_the_published_pairs() -> None:
    """With win rates, the second sample would be the loser: a tie takes up as many places as it has samples."""
    values = torch.tensor(list(SCORES.values()), dtype=torch.float64).T
    ranks = torch.tensor(list(RANKS.values()), dtype=torch.float64).T
    n, count = values.shape
    ensemble = RewardRows(
        names=list(SCORES),
        values=values,
        valid=torch.ones(n, count).bool(),
        weights=torch.ones(count, dtype=torch.float64),
        example_index=torch.zeros(n).long(),
        index=torch.arange(n),
        padding=torch.zeros(n).bool(),
        transforms=["rank"] * count,
    )
    [(signal, _, _)] = ensemble.signals("sum_then_normalize")
    best = torch.where(ranks.amax(0) > 0, 1.0, 0.0)  # the rank of the best
    assert (best - ranks).sum(1).tolist() == signal.tolist()
    assert ranks.sum(1).tolist() == [20, 19, 16, 19]
    assert [row.tolist() for row in best_and_worst(ensemble, "sum_then_normalize")] == [[2], [0]]
    ensemble.transforms = ["win_rate"] * count
    assert [row.tolist() for row in best_and_worst(ensemble, "sum_then_normalize")] == [[2], [1]]


def test_all_groups_tied_is_no_step_and_no_change(dpo_run: Config, scripted: Use) -> None:
    scripted(lambda item: Score(0.5))
    base = base_weights(dpo_run(name="base"))
    run, records = train(dpo_run(training__max_steps=2))
    assert [step["skipped"] for step in of_kind(records, "train")] == [1.0, 1.0]
    assert all(torch.equal(t, base[n]) for n, t in weights(run).items())


def test_every_failure_is_no_step(dpo_run: Config, scripted: Use) -> None:
    scripted(lambda item: Failure("bad_item", "no"))
    _, records = train(dpo_run(training__max_steps=1, reward_client__max_failure_rate=1.0))
    assert [step["skipped"] for step in of_kind(records, "train")] == [1.0]


def test_only_the_latents_of_pairs_travel(dpo_run: Config, scripted: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups of four: two of each, not all of them on every rank."""
    scripted(brightness)
    travelled: list[int] = []
    for name in ("gather", "sum"):
        real = getattr(Engine, name)

        def watch(self: Engine, value: Tensor, real: Any = real) -> Tensor:
            travelled.extend([len(value)] if value.ndim == 4 else [])
            return real(self, value)

        monkeypatch.setattr(Engine, name, watch)
    train(dpo_run(rollout__group_size=4, rollout__batch_size_per_device=8, training__max_steps=1))
    assert travelled == [4]


# --- one time and one noise for four errors ---


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor, bool]]:
    """(noise, time, with gradient) of every forward that took errors: noise and time of 2 x B x W rows."""
    seen: list[tuple[Tensor, Tensor, bool]] = []
    real = dpo.errors

    def watch(run: Any, algorithm: Any, copies: Any) -> Tensor:
        seen.append((copies.noise, copies.time, torch.is_grad_enabled()))
        return real(run, algorithm, copies)

    monkeypatch.setattr(dpo, "errors", watch)
    return seen


def test_win_lose_policy_and_reference_share_time_and_noise(
    dpo_run: Config, scripted: Use, forwards: list[tuple[Tensor, Tensor, bool]]
) -> None:
    """Drawn apart, the loss of a policy that equals its reference is anything but ln 2."""
    scripted(brightness)
    train(dpo_run(algorithm={"timesteps_per_pair": 3}, training__max_steps=1, optimizer__steps_per_forward=None))
    (reference, policy) = forwards
    assert (reference[2], policy[2]) == (False, True)
    assert torch.equal(reference[0], policy[0]) and torch.equal(reference[1], policy[1])
    noise, time = policy[0].view(2, 2, 3, -1), policy[1].view(2, 2, 3)  # members, pairs, copies
    assert torch.equal(noise[0], noise[1]) and torch.equal(time[0], time[1])
    assert len({float(t) for t in time[0].flatten()}) == 6  # pairs and copies each have their own
    assert not torch.equal(noise[0, 0, 0], noise[0, 0, 1])


def test_every_step_of_an_epoch_draws_anew(
    dpo_run: Config, scripted: Use, forwards: list[tuple[Tensor, Tensor, bool]]
) -> None:
    scripted(brightness)
    train(dpo_run(algorithm={"inner_epochs": 2}, training__max_steps=2))
    assert not set(forwards[1][1].tolist()) & set(forwards[3][1].tolist())


def test_one_forward_s_conditions_are_held_at_a_time(
    dpo_run: Config, scripted: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four micro-batches, whether the reference or the policy is asked; all of them would fill a GPU."""
    scripted(brightness)
    made: list[weakref.ref[NoisedRows]] = []
    most: list[int] = []
    real, ask = dpo.noised_copies, dpo.errors

    def watch(*arguments: Any) -> NoisedRows:
        copies = real(*arguments)
        made.append(weakref.ref(copies))
        return copies

    def count(*arguments: Any) -> Tensor:
        most.append(sum(ref() is not None for ref in made))
        return ask(*arguments)

    monkeypatch.setattr(dpo, "noised_copies", watch)
    monkeypatch.setattr(dpo, "errors", count)
    four = {"rollout__global_groups_per_batch": 4, "rollout__batch_size_per_device": 8}
    train(
        dpo_run(training__max_steps=1, optimizer__batch_size_per_device=1, optimizer__gradient_accumulation=4, **four)
    )
    assert most == [1] * 8


# --- who samples ---


@pytest.mark.parametrize(("policy", "same"), [("reference", True), ("current", False)])
def test_rollouts_come_from_the_policy_that_was_asked_for(
    policy: str, same: bool, dpo_run: Config, scripted: Use, sampled_with: list[float]
) -> None:
    scripted(brightness)
    train(dpo_run(algorithm={"rollout_policy": policy}, training__max_steps=2, optimizer__lr=1e-3))
    assert len(sampled_with) == 2 and (sampled_with[0] == sampled_with[1]) == same


# --- given pairs ---


@pytest.fixture
def pairs_file(signs: Path, tmp_path: Path) -> Path:
    """The pictures with their words are preferred, blank ones are not."""
    entries = [
        {
            "id": number,
            "image_path": str(source),
            "mask_path": str(source).replace("_source", "_mask"),
            "prompt": "The text is 'WORD'.",
            "win_path": str(source),
            "lose_path": str(lose),
        }
        for number, (source, lose) in enumerate(
            zip(
                sorted((signs / "targets").glob("*_source.png")),
                sorted((signs / "prompts").glob("*_source.png")),
                strict=True,
            )
        )
    ]
    path = tmp_path / "pairs.json"
    path.write_text(json.dumps(entries), encoding="utf-8")
    return path


@pytest.mark.parametrize("family", default(WITH_BASE, lambda family: family == "flux_fill"))
def test_offline_pairs_train_without_rewards_or_rollouts(family: str, dpo_run: Config, pairs_file: Path) -> None:
    """The preferred pictures become easier to denoise than the others: accuracy 1 after a few steps on four pairs."""
    run, records = train(
        dpo_run(
            model={"family": family, "path": "tiny", "dtype": "fp32", "train": LORA},
            data={"format": "manifest", "path": str(pairs_file), "resolution": [32, 64], "limit": 4},
            algorithm={"pairs": "offline", "timesteps_per_pair": 2, "beta": 100.0},
            rewards={},
            optimizer={"lr": 1e-2, "batch_size_per_device": 2, "gradient_accumulation": 2},
            training__max_steps=6,
        )
    )
    steps = of_kind(records, "train")
    assert steps[0]["logit"] == 0.0 and steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-7)
    assert steps[-1]["preference_accuracy"] >= 0.75 and steps[-1]["logit"] > 0
    assert not of_kind(records, "rollout")
    assert run.derived.global_images_per_epoch == 0


def test_offline_pairs_without_pairs_are_refused(dpo_run: Config, signs: Path, tmp_path: Path) -> None:
    source = str(next((signs / "targets").glob("*_source.png")))
    entry = {"image_path": source, "mask_path": source.replace("_source", "_mask"), "prompt": "x", "win_path": source}
    path = tmp_path / "half.json"
    path.write_text(json.dumps([entry]), encoding="utf-8")
    data = {"format": "manifest", "path": str(path), "resolution": [32, 64]}
    with pytest.raises(DataError, match="lose_path missing, which the run needs"):
        train(dpo_run(data=data, algorithm={"pairs": "offline"}, rewards={}))


# --- splitting ---


@pytest.mark.full
def test_micro_batches_change_memory_not_gradients(dpo_run: Config, scripted: Use) -> None:
    scripted(brightness)
    runs = [
        train(
            dpo_run(
                name=f"by{size}",
                training__max_steps=1,
                optimizer__batch_size_per_device=size,
                optimizer__gradient_accumulation=2 // size,
            )
        )
        for size in (1, 2)
    ]
    norms = [of_kind(records, "train")[0]["grad_norm"] for _, records in runs]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert of_kind(runs[0][1], "train")[0]["rows"] == 2.0


@pytest.mark.full
def test_the_preferred_images_get_closer_than_the_others(dpo_run: Config, scripted: Use) -> None:
    """Rewarding brightness makes rollouts brighter; rewarding darkness, darker."""

    def make(name: str) -> RunConfig:
        return dpo_run(
            name=name,
            algorithm={"reference_refresh_every": 2, "timesteps_per_pair": 4},
            rollout__group_size=8,
            rollout__batch_size_per_device=16,
            optimizer__lr=3e-4,
            training__max_steps=6,
        )

    assert gap_between_light_and_dark(make, scripted) > 0.02
