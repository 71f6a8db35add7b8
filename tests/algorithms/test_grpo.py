"""The GRPO and PPO recipes end to end on the tiny base: ratio 1, what trains and what does not, what is written."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retouch.algorithms.grpo import recipe as grpo
from retouch.algorithms.grpo.config import GrpoConfig
from retouch.algorithms.train import recipe
from retouch.config import ConfigError, RunConfig
from retouch.data.sampler import derive_seed
from retouch.engine import Engine
from retouch.engine.saved import complete_checkpoints, is_pinned
from retouch.families.flux_fill.model import FluxFill
from retouch.observe.timing import PARTS
from retouch.rewards.protocol import RewardItem
from retouch.rewards.scorers import ocr
from retouch.rewards.table import RewardTable, Scores
from retouch.training import evaluations, experience
from retouch.training.build import build
from retouch.training.recorder import Recorder
from retouch.training.scoring import RewardOutage
from retouch.types import Failure, Outcome, Score, Stopped
from tests.fuzz.inputs import bounded
from tests.selection import default

from .runs import Config, Scripted, Use, brightness, gap_between_light_and_dark, of_kind, same_weights, train, weights

pytestmark = pytest.mark.usefixtures("bare", "shallow")

# --- on policy ---


def test_ratio_is_exactly_one_before_the_first_update(config: Config) -> None:
    """Rollout and training with batches of one shape: bit for bit; and away from one after an update."""
    one_step = config(
        rollout__window={"size": 1, "range": [0, 0.5]},
        optimizer__batch_size_per_device=4,
        algorithm__inner_epochs=2,
        algorithm__skip_zero_std_groups=False,
        optimizer__lr=1e-3,
    )
    _, records = train(one_step)
    steps = of_kind(records, "train")
    assert [r["max_abs_log_ratio"] == 0.0 for r in steps] == [True, False, True, False]
    assert all(r["ratio"] == 1.0 for r in steps[::2])


def test_ratio_is_one_within_rounding_in_other_batches(config: Config) -> None:
    _, records = train(config(training__max_steps=1))
    (step,) = of_kind(records, "train")
    assert step["max_abs_log_ratio"] <= 1e-6


def test_rounding_does_not_clip(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a network that rounds by how many rows a forward has, as GPUs do in bf16. Before the first update the ratio is
    taken as 1, and how far the record is off is told. After it the record's rounding is in the ratio, unless
    log-probabilities are computed again in the batches of training. Both updates change nothing."""
    exact = FluxFill.predict

    def rounded(self: FluxFill, network: nn.Module, x: Tensor, *rest: Any) -> Tensor:
        return exact(self, network, x, *rest) * (1 + 1e-3 * len(x))

    monkeypatch.setattr(FluxFill, "predict", rounded)
    made = {
        how: train(
            config(
                name=how,
                training__max_steps=2,
                algorithm__old_log_probs=how,
                rollout__group_size=5,
                optimizer={"lr": 1e-30, "batch_size_per_device": 2, "gradient_accumulation": 3},
            )
        )
        for how in ("recorded", "recomputed")
    }
    first, second = of_kind(made["recorded"][1], "train")
    assert first["max_abs_log_ratio"] > 1e-5
    assert first["ratio"] == 1.0 and first["clip_fraction"] == first["approx_kl"] == 0.0 < first["grad_norm"]
    assert second["max_abs_log_ratio"] > 1e-5 and second["ratio"] != 1.0
    run, records = made["recomputed"]
    for step in of_kind(records, "train"):
        assert step["clip_fraction"] == step["approx_kl"] == 0.0
        assert step["ratio"] == 1.0 and step["grad_norm"] > 0
    fresh, later = of_kind(records, "train")
    assert fresh["max_abs_log_ratio"] >= first["max_abs_log_ratio"]  # of what the sampler recorded, in the whole epoch
    assert later["max_abs_log_ratio"] == 0.0
    asked = sum(r["time"]["nfe_train_forward"] for r in of_kind(records, "train"))
    assert asked == 2 * run.derived.global_images_per_epoch * run.derived.trained_steps


@pytest.mark.usefixtures("whole")
def test_an_update_that_did_not_happen_leaves_the_ratio_at_1(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the first ones of fp16, whose gradients overflow: the weights still are those that sampled. Stopped there and
    resumed, they still are."""
    exact, real, steps = FluxFill.predict, Engine.step, 0

    def rounded(self: FluxFill, network: nn.Module, x: Tensor, *rest: Any) -> Tensor:
        return exact(self, network, x, *rest) * (1 + 1e-3 * len(x))

    def step(self: Engine, lr: float) -> dict[str, float]:
        nonlocal steps
        steps += 1
        if steps > 2:
            return real(self, lr)
        self.drop_gradients()
        return {"grad_norm": math.inf, "overflow": 1.0}

    monkeypatch.setattr(FluxFill, "predict", rounded)
    monkeypatch.setattr(Engine, "step", step)
    small = {"lr": 1e-3, "batch_size_per_device": 2, "gradient_accumulation": 3}
    shape = {"name": "run", "rollout__group_size": 5, "optimizer": small}
    train(config(**shape, training__max_steps=1))
    _, records = train(config(**shape, training__max_steps=4, resume="auto"))
    told = of_kind(records, "train")
    assert [r["overflow"] for r in told] == [1.0, 1.0, 0.0, 0.0]
    assert [r["ratio"] == 1.0 for r in told] == [True, True, True, False]


@pytest.mark.parametrize("how", ["recorded", "recomputed"])
def test_another_policy_in_training_is_told(
    how: str, config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the record is put aside. Its mean is off by half a standard deviation."""
    exact = grpo.transition

    def other(*given: Any) -> tuple[Tensor, Tensor]:
        mean, std = exact(*given)
        return mean + std.view(-1, 1, 1, 1) / 2, std

    monkeypatch.setattr(grpo, "transition", other)
    _, records = train(config(training__max_steps=2, algorithm__old_log_probs=how))
    fresh, later = of_kind(records, "train")
    assert fresh["max_abs_log_ratio"] > 0.1 and fresh["ratio"] == 1.0
    assert (later["max_abs_log_ratio"] > 0.1) == (how == "recorded")
    assert "off policy before the first update" in caplog.text


def test_out_of_memory_while_computing_again_halves_the_rows(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = FluxFill.predict

    def predict(self: FluxFill, network: nn.Module, x: Tensor, *rest: Any) -> Tensor:
        if len(x) > 2 and network.training is False and asked:
            raise torch.OutOfMemoryError("tried to allocate\nand a long report")
        return exact(self, network, x, *rest)

    asked: list[bool] = []
    again = grpo.record_again
    monkeypatch.setattr(grpo, "record_again", lambda *given: (asked.append(True), again(*given))[1])
    monkeypatch.setattr(FluxFill, "predict", predict)
    common: dict[str, Any] = {
        "training__max_steps": 2,
        "algorithm__old_log_probs": "recomputed",
        "evaluation__num_examples": 1,
        "rollout__window": {"size": 1, "range": [0, 0.5]},
    }
    halved, _ = train(
        config(
            name="halved",
            **common,
            optimizer={"batch_size_per_device": 4, "gradient_accumulation": 1, "lr": 1e-3},
            algorithm__inner_epochs=2,
        )
    )
    asked.clear()
    monkeypatch.setattr(grpo, "record_again", again)
    small, _ = train(
        config(
            name="small",
            **common,
            optimizer={"batch_size_per_device": 2, "gradient_accumulation": 2, "lr": 1e-3},
            algorithm__inner_epochs=2,
        )
    )
    assert same_weights(weights(halved), weights(small))


@pytest.mark.parametrize("guard", [pytest.param(False, marks=pytest.mark.full), True])
def test_log_probs_computed_again_are_those_recorded(config: Config, guard: bool) -> None:
    """In fp32, where both are exact, training is the same; with GRPO-Guard, whose means are replaced as well."""
    ends = [
        train(
            config(
                name=how,
                training__max_steps=2,
                algorithm__old_log_probs=how,
                algorithm__guard=guard,
                algorithm__inner_epochs=2,
            )
        )[0]
        for how in ("recorded", "recomputed")
    ]
    for name, tensor in weights(ends[0]).items():
        torch.testing.assert_close(weights(ends[1])[name], tensor, atol=2e-5, rtol=0)


@pytest.mark.parametrize("spans", [1, pytest.param(2, marks=pytest.mark.full)])
def test_steps_per_forward_changes_memory_not_gradients(config: Config, spans: int) -> None:
    whole = {"rollout__window__size": 3, "optimizer__steps_per_forward": None}
    together, _ = train(config(name="a", training__max_steps=1, **whole))
    apart, _ = train(
        config(name="b", training__max_steps=1, rollout__window__size=3, optimizer__steps_per_forward=spans)
    )
    apart_weights = weights(apart)
    for name, t in weights(together).items():
        torch.testing.assert_close(apart_weights[name], t, atol=2e-5, rtol=0)


def test_the_loss_of_a_span_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three trained steps of two rows, one of weight 0, of a step whose weights sum to 4: the KL alone, with
    means m and a reference of 0 at a std of 1, is m² / 2; the span counts as 2/3 of the row."""
    means = torch.tensor([0.2, 0.4, 5.0, 5.0]).view(4, 1, 1, 1)
    log_probs, one = torch.zeros(4), torch.ones(4)
    now = grpo.Forward(log_probs, means, one, None, -one, None)
    monkeypatch.setattr(grpo, "forward_on_recorded", lambda *_: now)
    zeros = {"log_probs": log_probs, "reference_means": torch.zeros(4, 1, 1, 1)}
    rows: Any = SimpleNamespace(
        counts_in_loss=torch.tensor([1.0, 0.0]),
        advantages=torch.zeros(2),
        trained_steps=3,
        spanned=lambda name, *_: zeros[name],
    )
    step: Any = SimpleNamespace(
        normalizer=torch.tensor(4.0), old_policy_values=lambda now, then: then, log_ratio_metric=lambda *_: {}
    )
    run: Any = SimpleNamespace(engine=SimpleNamespace(device="cpu"), plans=SimpleNamespace(records_means=False))
    loss, values, counted = grpo.surrogate(run, GrpoConfig(kl_weight=3.0), rows, step, torch.arange(2), range(2))
    kl = (0.2**2 + 0.4**2) / 2 / 2
    assert float(values["kl"]) == pytest.approx(kl)
    assert float(loss) == pytest.approx(3.0 * kl / 4 * 2 / 3)
    assert float(counted) == pytest.approx(2 / 3)


def test_metrics_count_a_span_by_its_steps(config: Config) -> None:
    """Of three trained steps in forwards of two, the last counted as much as the two others together."""
    shape: dict[str, Any] = {
        "rollout__window": {"size": 3, "range": [0, 1]}, "algorithm__inner_epochs": 2, "algorithm__kl_weight": 0.1,
        "optimizer__lr": 1e-3, "training__max_steps": 2,
    }  # fmt: skip
    told = []
    for name, size in (("a", None), ("b", 2)):
        _, records = train(config(name=name, **shape, optimizer__steps_per_forward=size))
        told.append(of_kind(records, "train")[1])
    assert told[0]["kl"] > 0 and told[0]["ratio"] != 1
    for name in ("kl", "ratio", "clip_fraction", "approx_kl", "max_abs_log_ratio"):
        assert told[1][name] == pytest.approx(told[0][name], rel=1e-3, abs=1e-9), name


def test_micro_batches_change_memory_not_gradients(config: Config) -> None:
    """One optimizer step on 4 rows, as 1 x 4 and as 4 x 1."""
    whole, _ = train(
        config(name="a", training__max_steps=1, optimizer__batch_size_per_device=4, optimizer__gradient_accumulation=1)
    )
    split, _ = train(
        config(name="b", training__max_steps=1, optimizer__batch_size_per_device=1, optimizer__gradient_accumulation=4)
    )
    split_weights = weights(split)
    for name, t in weights(whole).items():
        torch.testing.assert_close(split_weights[name], t, atol=2e-5, rtol=0)


# --- what trains, and what does not ---


def test_constant_rewards_leave_the_weights_bit_unchanged(config: Config, scripted: Use) -> None:
    scripted(lambda item: Score(0.5))
    before = build(config(name="before"))
    initial = weights(before)
    before.close()
    run, records = train(config(ema={"decay": 0.9}))
    assert all(torch.equal(t, initial[n]) for n, t in weights(run).items())
    assert all(torch.equal(t, initial[n]) for n, t in run.policy.state("ema").items())
    assert [r["skipped"] for r in of_kind(records, "train")] == [1.0] * 4
    assert of_kind(records, "rollout")[0]["zero_std_groups"] == 1.0


def test_an_epoch_without_a_signal_asks_the_reference_nothing(config: Config, scripted: Use) -> None:
    """A run with a KL goes on."""
    scripted(lambda item: Score(0.5))
    _, records = train(config(algorithm__kl_weight=0.01, training__max_steps=1))
    assert [r["skipped"] for r in of_kind(records, "train")] == [1.0]


def test_constant_rewards_leave_the_weights_unchanged_even_if_their_groups_are_kept(
    config: Config, scripted: Use
) -> None:
    """Advantage 0 has no gradient; AdamW then only decays, and that is off here."""
    scripted(lambda item: Score(0.5))
    run, _ = train(config(algorithm__skip_zero_std_groups=False, optimizer__weight_decay=0.0, training__max_steps=2))
    fresh = build(config(name="fresh"))
    assert same_weights(weights(run), weights(fresh))
    fresh.close()


def test_all_rewards_failing_stops_the_run_with_the_weights_unchanged(config: Config, scripted: Use) -> None:
    scripted(lambda item: Failure("scorer_error", "no"))
    run = build(config(reward_client__max_failure_rate=1.0, training__max_steps=2))
    initial = weights(run)
    recipe("grpo")(run)  # within the limit: steps are skipped
    assert all(torch.equal(t, initial[n]) for n, t in weights(run).items())
    run.close()
    run = build(config(name="strict", reward_client__max_failure_rate=0.5))
    with pytest.raises(Stopped, match="4 of 4 images have no reward") as stopped:
        recipe("grpo")(run)
    run.close()
    assert stopped.value.code == 3
    assert all(torch.equal(t, initial[n]) for n, t in weights(run).items())


def test_a_failed_reward_is_as_if_the_row_were_not_there(config: Config, scripted: Use) -> None:
    """Groups of three whose third row failed train like groups of two; a careless zero would train differently."""
    shape = {
        "rollout__batch_size_per_device": 6,
        "optimizer__batch_size_per_device": 6,
        "training__max_steps": 1,
        "reward_client__max_failure_rate": 0.5,
    }
    scripted(lambda item: Failure("scorer_error", "no") if _third(item) else brightness(item))
    failed, records = train(config(name="failed", rollout__group_size=3, **shape))
    assert of_kind(records, "rollout")[0]["failed"] == 2.0
    assert of_kind(records, "train")[0]["rows"] == 4.0
    scripted(brightness)
    two, _ = train(config(name="two", rollout__group_size=2, **shape))
    scripted(lambda item: Score(0.0) if _third(item) else brightness(item))
    zero, _ = train(config(name="zero", rollout__group_size=3, **shape))
    two_weights = weights(two)
    for name, t in weights(failed).items():
        torch.testing.assert_close(t, two_weights[name], atol=2e-5, rtol=0)
    assert _distance(weights(failed), weights(zero)) > 10 * _distance(weights(failed), weights(two))


def _third(item: RewardItem) -> bool:
    return isinstance(item.id, int) and item.id % 3 == 2


@pytest.mark.parametrize("name", default(["grpo", "ppo"], "grpo".__eq__))
def test_the_reward_moves_the_policy_its_way(config: Config, scripted: Use, name: str) -> None:
    """Rewarding brightness makes rollouts brighter; rewarding darkness, darker. 6 steps, no OCR."""

    def make(run: str) -> RunConfig:
        return config(
            name=run,
            algorithm__name=name,
            rollout__group_size=8,
            rollout__batch_size_per_device=16,
            rollout__shared_noise=True,
            optimizer__batch_size_per_device=16,
            optimizer__lr=3e-4,
            training__max_steps=6,
        )

    assert gap_between_light_and_dark(make, scripted) > 0.02


@pytest.mark.full
def test_rewards_dealt_at_random_within_groups_do_not_help(
    config: Config, scripted: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same rewards, each given to another image of its group: the policy stays as bright as it was."""
    shape: dict[str, Any] = {
        "rollout__group_size": 8,
        "rollout__batch_size_per_device": 16,
        "rollout__shared_noise": True,
        "optimizer__batch_size_per_device": 16,
        "optimizer__lr": 3e-4,
        "training__max_steps": 12,
    }
    scripted(brightness)
    _, honest = train(config(name="honest", **shape))
    monkeypatch.setattr(Scripted, "score", dealt_at_random)
    _, dealt = train(config(name="dealt", **shape))
    gains = {}
    for name, records in (("honest", honest), ("dealt", dealt)):
        scores = [r["combined_score"] for r in of_kind(records, "rollout")]
        gains[name] = sum(scores[-3:]) / 3 - sum(scores[:3]) / 3
    assert gains["honest"] > 0.01 and abs(gains["dealt"]) < gains["honest"] / 3, gains


def dealt_at_random(self: Scripted, items: Sequence[RewardItem]) -> list[Outcome]:
    """Outcomes shuffled among the items of each group."""
    outcomes = [self.rule(item) for item in items]
    for group in {item.group for item in items}:
        places = [i for i, item in enumerate(items) if item.group == group]
        dealt = list(places)
        Random(derive_seed("deal", str(items[places[0]].image.sum()))).shuffle(dealt)
        for place, outcome in zip(places, [outcomes[i] for i in dealt], strict=True):
            outcomes[place] = outcome
    return outcomes


def test_ppo_works_without_groups(config: Config) -> None:
    _, records = train(config(algorithm__name="ppo", rollout__group_size=1, rollout__global_groups_per_batch=4))
    assert all(r["rows"] == 2.0 for r in of_kind(records, "train"))


def test_kl_to_the_reference(config: Config) -> None:
    """0 before the first update, above after; and a heavy weight holds the policy back."""
    free, _ = train(config(name="free", optimizer__lr=1e-3, algorithm__inner_epochs=2))
    held, records = train(config(name="held", optimizer__lr=1e-3, algorithm__kl_weight=1e4, algorithm__inner_epochs=2))
    kl = [r["kl"] for r in of_kind(records, "train")]
    assert kl[0] <= 1e-9 and kl[-1] > 0
    assert set(held.policy.snapshots) == {"reference"}
    drift = {k: _distance(weights(r), held.policy.state("reference")) for k, r in (("free", free), ("held", held))}
    assert drift["held"] < drift["free"]


def _distance(a: dict[str, Tensor], b: Any) -> float:
    return sum(float((a[n] - b[n]).square().sum()) for n in a) ** 0.5


def test_region_mask_reaches_the_log_probabilities(config: Config) -> None:
    """Other weights than over all latents; over what exactly is in tests/core and tests/rollout."""
    everywhere, _ = train(config(name="a", training__max_steps=1))
    hole, _ = train(config(name="b", training__max_steps=1, algorithm__region="mask"))
    assert not same_weights(weights(everywhere), weights(hole))


@pytest.mark.full
def test_two_rewards_are_normalised_before_they_are_summed(
    config: Config, scripted: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A narrow reward for brightness beside one a thousand times wider that prefers odd rows at random: normalised
    first, both count; summed first, the narrow one is as if it were not there."""
    scripted(brightness)
    wide_score = lambda item: Score(1000.0 * (derive_seed("noise", str(item.image.sum())) % 97))  # noqa: E731

    def load(self: Any, device: str) -> None:
        self.spec = replace(self.spec, range=(0.0, 1e5))

    monkeypatch.setattr(ocr.OcrScorer, "load", load)
    monkeypatch.setattr(ocr.OcrScorer, "score", lambda self, items: [wide_score(item) for item in items])
    shape = {"training__max_steps": 1, "rollout__group_size": 4, "rollout__batch_size_per_device": 8}
    shape["optimizer__batch_size_per_device"] = 8
    both = {"preservation": {"paste_back": True}, "ocr": {}}
    first, _ = train(config(name="first", rewards=both, **shape))
    summed, _ = train(config(name="summed", rewards=both, algorithm__combine="sum_then_normalize", **shape))
    wide, _ = train(config(name="wide", rewards={"ocr": {}}, **shape))
    assert _distance(weights(summed), weights(wide)) < 0.05 * _distance(weights(first), weights(wide))


# --- seeds and files ---


@pytest.mark.full
def test_runs_repeat_and_seeds_differ(config: Config) -> None:
    first, a = train(config(name="a"))
    second, b = train(config(name="b"))
    other, _ = train(config(name="c", seed=6))
    assert same_weights(weights(first), weights(second))
    assert not same_weights(weights(first), weights(other))
    strip = lambda records: [{k: v for k, v in r.items() if k != "time"} for r in records]  # noqa: E731
    assert strip(a) == strip(b)


@pytest.mark.usefixtures("whole")
def test_warm_up_then_rl(config: Config) -> None:
    run, records = train(config(algorithm__sft_steps=2, ema={"decay": 0.9}))
    assert [r["phase"] for r in of_kind(records, "train")] == ["warmup", "warmup", "rl", "rl"]
    assert [r["moment"] for r in of_kind(records, "eval")] == ["start", "warmup", "end"]
    assert {p.name for p in run.checkpoints.root.iterdir()} == {"step-000002", "step-000004"}
    assert (run.checkpoints.root / "step-000004" / "ema").is_dir()
    assert json.loads((run.checkpoints.root / "step-000002" / "state.json").read_text())["progress"]["phase"] == "rl"


def test_time_split_sums_to_the_step(config: Config) -> None:
    _, records = train(config(training__max_steps=2))
    for record in of_kind(records, "train"):
        seconds = record["time"]
        assert sum(seconds[part] for part in PARTS) == pytest.approx(seconds["step"], rel=0.02, abs=1e-3)


def test_rl_never_sees_a_target(config: Config) -> None:
    run = build(config())
    assert all(example.target is None for example in run.data)
    assert all(example.target is not None for example in run.warmup_data)
    run.close()
    with pytest.raises(ConfigError, match="no target image"):
        build(config(name="x", warmup_data=None, algorithm__sft_steps=1))


def test_a_directory_with_a_run_is_not_overwritten(config: Config) -> None:
    train(config(training__max_steps=1))
    with pytest.raises(ConfigError, match="already holds a run; continue it with resume=auto"):
        build(config(training__max_steps=1))  # before it loads a model


@pytest.mark.usefixtures("whole")
def test_a_finished_run_stays_finished(config: Config, run_file: Callable[..., dict[str, Any]]) -> None:
    _, before = train(config(training__max_steps=1))
    _, after = train(config(training__max_steps=1, resume="auto"))
    assert before == after


def test_too_few_examples(config: Config) -> None:
    with pytest.raises(ConfigError, match=r"takes 9 different examples.*but data has 8"):
        build(config(rollout__global_groups_per_batch=9))


def test_time_limit_is_a_clean_stop(config: Config) -> None:
    run = build(config(training__max_minutes=1e-6))
    with pytest.raises(Stopped) as stopped:
        recipe("grpo")(run)
    run.close()
    assert stopped.value.code == 0
    assert not is_pinned(complete_checkpoints(run.checkpoints.root)[-1])  # or a run in many legs would keep one of each


@pytest.mark.usefixtures("whole")
def test_an_outage_in_the_first_evaluation_stops_the_run_as_any_other(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signals are handled as before the run again, and the evaluation is made up for."""

    def outage(*_: Any, **__: Any) -> None:
        raise RewardOutage("rewards stayed unavailable")

    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as away:
        away.setattr(evaluations, "draw_and_score", outage)
        run = build(config(training__max_steps=1))
        with pytest.raises(Stopped, match="rewards stayed unavailable") as stopped:
            recipe("grpo")(run)
        run.close()
    assert stopped.value.code == 3 and signal.getsignal(signal.SIGTERM) is before
    assert (run.dir.path / "checkpoints" / "step-000000" / "complete.json").is_file()
    assert (run.dir.path / "report.html").is_file()
    _, records = train(config(training__max_steps=1, resume="auto"))
    assert [r["moment"] for r in of_kind(records, "eval")] == ["start", "end"]


def test_a_signal_that_another_process_got_stops_this_one_resumable(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = build(config(training__max_minutes=60))
    monkeypatch.setattr(run.engine, "any", lambda value: True if run.dir.path.exists() else value)
    monkeypatch.setattr(Recorder, "evaluate", lambda *_: None)
    with pytest.raises(Stopped, match="received a signal on another process") as stopped:
        recipe("grpo")(run)
    run.close()
    assert stopped.value.code == 3


def test_a_signal_while_rewards_are_computed_stops_before_they_are_in(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, late = RewardTable.submit, list[threading.Timer]()

    def submit(self: RewardTable, items: Any, *, broken: Any = (), training: bool = True) -> Scores:
        pending = real(self, items, broken=broken, training=training)
        if not training:
            return pending
        if not late:
            late.append(threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)))
            late[0].start()
        return replace(pending, parts={place: Future() for place in pending.parts})  # never in

    whole, _ = train(config(training__max_steps=1, name="whole"))
    with monkeypatch.context() as slow:
        slow.setattr(RewardTable, "submit", submit)
        slow.setattr(experience, "LOOK_S", 0.05)
        run = build(config(training__max_steps=1))
        with bounded(60), pytest.raises(Stopped, match="received SIGTERM at step 0") as stopped:
            recipe("grpo")(run)
        run.close()
    assert stopped.value.code == 3
    again, _ = train(config(training__max_steps=1, resume="auto"))
    assert same_weights(weights(again), weights(whole))


def test_rewards_that_are_late_on_another_process_are_waited_for_together() -> None:
    """Each process looks as often as the others, or a collective would meet another one."""
    late = iter([True, True, False])
    looked: list[bool] = []
    session: Any = SimpleNamespace(
        run=SimpleNamespace(
            clock=SimpleNamespace(part=lambda _: nullcontext()),
            engine=SimpleNamespace(any=lambda own: looked.append(own) or next(late)),
        ),
        check_stop=lambda: looked.append(True),
    )
    experience.await_rewards(session, [])
    assert looked == [False, True, False, True, False]


@pytest.mark.usefixtures("whole")
def test_report_and_grid_are_written(config: Config, tmp_path: Path) -> None:
    from retouch.observe.report import write_report

    run, _ = train(config(training__max_steps=2, logging__rollout_images_every=1))
    page = write_report(run.dir.path).read_text()
    assert set(re.findall(r"https?:[^ \"'`);]*", page)) == {
        "http://www.w3.org/2000/svg",
        "https://github.com/leeoniya/uPlot",
    }
    for piece in (
        "Grid of the last evaluation",
        "Rollouts",
        "Where the time went",
        "Run file",
        "Environment",
        "held-out",
    ):
        assert piece in page
    assert (run.dir.path / "images" / "step-000002" / "evaluation.png").is_file()
