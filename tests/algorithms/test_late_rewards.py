"""Optimizer steps on the groups whose rewards are in: the gradient is that of waiting, every group is trained on once,
and a checkpoint inside such an epoch continues bitwise."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from retouch.config import RunConfig
from retouch.engine import Engine
from retouch.errors import ConfigError
from retouch.rewards.protocol import RewardItem
from retouch.rewards.scorers import ocr
from retouch.rewards.table import PendingScores, RewardTable
from retouch.training import experience
from retouch.training.experience import Experience
from retouch.training.session import Session
from retouch.training.step import Step
from retouch.types import Failure, Outcome, Score, Stopped
from tests.rewards.fakes import HANG_S
from tests.selection import default

from .runs import Config, Use, brightness, by_group, of_kind, train, weights

pytestmark = pytest.mark.usefixtures("bare", "shallow")

SHAPE: dict[str, Any] = {
    "rollout__global_groups_per_batch": 4,
    "rollout__batch_size_per_device": 8,
    "optimizer__batch_size_per_device": 2,
    "optimizer__gradient_accumulation": 2,
    "training__max_steps": 2,
}
"""An epoch: four groups of two images, two optimizer steps."""

ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"name": "grpo", "clip_range": 1e-3, "kl_weight": 0.5},
    "nft": {"name": "nft", "kl_weight": 0.5},
}
ODE = {"rollout__window": None, "rollout__noise_level": None}


def late_run(config: Config, algorithm: str, late_rewards: str = "next_step", **options: Any) -> RunConfig:
    sampled = ODE if algorithm == "nft" else {}
    return config(algorithm={**ALGORITHMS[algorithm], "late_rewards": late_rewards}, **{**SHAPE, **sampled, **options})


Delays = Callable[[Callable[[int], bool]], None]


@pytest.fixture
def delayed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Delays]:
    """Scores of the groups that are late, by the number of the group in its epoch, come once the first step has taken
    its groups."""
    threads, taken = list[threading.Thread](), threading.Event()

    def use(late: Callable[[int], bool]) -> None:
        real, real_take, seen = RewardTable.submit, experience.Arrivals.take, list[int | None]()

        def submit(self: RewardTable, items: Any, *, training: bool = True) -> PendingScores:
            pending = real(self, items, training=training)
            if not training:
                return pending
            if items[0].group not in seen:
                seen.append(items[0].group)
            if not late(seen.index(items[0].group)):
                return pending
            return replace(pending, parts={place: afterwards(future) for place, future in pending.parts.items()})

        def take(self: experience.Arrivals) -> Experience:
            rows = real_take(self)
            taken.set()
            return rows

        monkeypatch.setattr(RewardTable, "submit", submit)
        monkeypatch.setattr(experience.Arrivals, "take", take)

    def afterwards(future: Future[Any]) -> Future[Any]:
        slow = Future[Any]()

        def come() -> None:
            taken.wait(HANG_S)
            slow.set_result(future.result())

        threads.append(threading.Thread(target=come))
        threads[-1].start()
        return slow

    yield use
    taken.set()
    for thread in threads:
        thread.join()


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], float, Tensor]]:
    """Of every optimizer step, at the weights that sampled: the seeds of its live rows, their weight and the gradient
    that was not clipped."""
    seen: list[tuple[list[int], float, Tensor]] = []
    under_way: list[Step] = []
    real_steps, real = Session.steps, Engine.step

    def watched(self: Session, rows: Any, *rest: Any) -> Iterator[Step]:
        for step in real_steps(self, rows, *rest):
            under_way[:] = [step]
            live = rows.weight[step.rows] > 0
            seen.append((sorted(rows.seed[step.rows][live].tolist()), float(step.total), torch.zeros(0)))
            yield step

    def step(self: Engine, lr: float) -> dict[str, float]:
        parameters = list(self.network.parameters())
        seeds, total, _ = seen[-1]
        seen[-1] = (seeds, total, torch.cat([p.grad.flatten().clone() for p in parameters if p.grad is not None]))
        before = [p.detach().clone() for p in parameters]
        found = real(self, lr)
        for parameter, value in zip(parameters, before, strict=True):
            parameter.data.copy_(value)
        return found

    monkeypatch.setattr(Session, "steps", watched)
    monkeypatch.setattr(Engine, "step", step)
    return seen


@pytest.mark.parametrize("algorithm", default(ALGORITHMS, "grpo".__eq__))
def test_the_gradient_is_that_of_waiting_for_the_same_groups(
    algorithm: str,
    config: Config,
    scripted: Use,
    delayed: Delays,
    steps: list[tuple[list[int], float, Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scripted(brightness)
    delayed(lambda group: group < 2)
    train(late_run(config, algorithm, name="late"))
    arrived, real = list(steps), experience.collect
    steps.clear()

    def assigned(*arguments: Any) -> Experience:
        rows = real(*arguments)
        rows.step_of = torch.tensor([int(seed in arrived[1][0]) for seed in rows.seed.tolist()])
        return rows

    monkeypatch.setattr(experience, "collect", assigned)
    train(late_run(config, algorithm, "wait", name="waits"))
    assert len(steps) == len(arrived) == 2
    for (seeds, total, gradient), (same_seeds, same_total, expected) in zip(arrived, steps, strict=True):
        assert (seeds, total) == (same_seeds, same_total) and len(seeds) == 4
        scale = float(expected.abs().max())
        assert scale > 0
        torch.testing.assert_close(gradient, expected, atol=1e-6 * scale, rtol=0)


def test_groups_that_are_in_are_trained_on_first(
    config: Config, scripted: Use, delayed: Delays, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first two groups come late: the first step takes the other two."""
    scripted(brightness)
    delayed(lambda group: group < 2)
    taken: list[list[int]] = []
    real = experience.Arrivals.take

    def take(self: experience.Arrivals) -> Experience:
        order = list(self._examples)  # in the order of sampling
        rows = real(self)
        taken.append(sorted({order.index(p) for p in rows.position.tolist()}))
        return rows

    monkeypatch.setattr(experience.Arrivals, "take", take)
    _, records = train(late_run(config, "grpo"))
    assert taken == [[2, 3], [0, 1]]
    assert [record["rows"] for record in of_kind(records, "train")] == [4.0, 4.0]
    (rollout,) = of_kind(records, "rollout")
    assert (rollout["step"], rollout["images"], rollout["failed"]) == (1, 8.0, 0.0)


def test_a_step_waits_for_no_reward_of_weight_0(config: Config, scripted: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    """A logged scorer that answers only after both steps of the epoch."""
    scripted(brightness)
    trained, waited = threading.Event(), list[bool]()

    def score(self: Any, items: list[RewardItem]) -> list[Outcome]:
        waited.append(trained.wait(60))
        return [Score(0.5) for _ in items]

    monkeypatch.setattr(ocr.OcrScorer, "load", lambda self, device: None)
    monkeypatch.setattr(ocr.OcrScorer, "score", score)
    real = Session.finish
    monkeypatch.setattr(Session, "finish", lambda self: (trained.set(), real(self)))
    rewards = {"preservation": {}, "ocr": {"weight": 0.0}}
    run = late_run(config, "grpo", rewards=rewards, reward_client__logged_wait_s=0.05)
    _, records = train(run)
    assert waited and all(waited)
    assert [record["rows"] for record in of_kind(records, "train")] == [4.0, 4.0]


def test_more_steps_than_groups_with_a_signal(config: Config, scripted: Use, delayed: Delays) -> None:
    """Groups that tie have no rows; a step of such groups alone is skipped."""
    scripted(by_group(lambda group, item: Score(0.5) if group < 2 else brightness(item))[0])
    delayed(lambda group: group >= 2)
    options = {"training__max_steps": 4, "optimizer__gradient_accumulation": 1}
    _, records = train(late_run(config, "grpo", **options))
    assert [record["skipped"] for record in of_kind(records, "train")].count(1.0) >= 1
    assert sum(record.get("rows", 0.0) for record in of_kind(records, "train")) == 4.0


@pytest.mark.parametrize("algorithm", default(ALGORITHMS, "nft".__eq__))
def test_a_checkpoint_inside_the_epoch_continues_bitwise(
    algorithm: str,
    config: Config,
    scripted: Use,
    delayed: Delays,
) -> None:
    """It waits for the groups that are late; from there on the steps are decided."""
    scripted(brightness)
    delayed(lambda group: group % 2 == 1)
    options = {"optimizer__gradient_accumulation": 1, "training__max_steps": 4, "training__checkpoint_every": 2}
    run, _ = train(late_run(config, algorithm, name="whole", **options))
    whole = weights(run)
    inside = run.dir.checkpoints / "step-000002"
    assert (inside / "rollouts.safetensors").is_file()
    again, records = train(late_run(config, algorithm, name="again", resume=str(inside), **options))
    assert [record["step"] for record in of_kind(records, "train")][-2:] == [3, 4]
    resumed = weights(again)
    assert all(torch.equal(resumed[name], t) for name, t in whole.items())


def test_rewards_that_fail_late_drop_the_rest_of_the_epoch(config: Config, scripted: Use, delayed: Delays) -> None:
    """The run stops after the step that it took, and goes on with the next epoch."""
    alive = False

    def rule(group: int, item: RewardItem) -> Outcome:
        dead = not alive and group < 2
        return Failure("unavailable", "away", retryable=True) if dead else brightness(item)

    scripted(by_group(rule)[0])
    delayed(lambda group: group < 2)
    options = {"training__max_steps": 3, "reward_client__outage_wait_s": 0.0}
    with pytest.raises(Stopped, match="stayed unavailable") as stopped:
        train(late_run(config, "grpo", **options))
    assert stopped.value.code == 3
    alive = True
    run, records = train(late_run(config, "grpo", resume="auto", **options))
    found = of_kind(records, "train")
    assert [(record["step"], record["epoch"]) for record in found] == [(1, 0), (2, 1), (3, 1)]
    assert Path(run.dir.checkpoints / "step-000001").is_dir()
    assert not (run.dir.checkpoints / "step-000001" / "rollouts.safetensors").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm__baseline": "batch", "algorithm__scale": "batch"}, "algorithm.baseline=batch needs all rewards"),
        ({"algorithm__scale": "batch"}, "algorithm.scale=batch needs all rewards .* set algorithm.scale=group"),
        ({"algorithm__inner_epochs": 2}, "algorithm.inner_epochs=2 needs all rewards"),
        ({"algorithm__resample_rounds": 1}, "algorithm.resample_rounds=1 needs all rewards"),
        ({"algorithm__old_log_probs": "recomputed"}, "set algorithm.old_log_probs=recorded, or late_rewards=wait"),
        ({"optimizer__gradient_accumulation": 4}, "an epoch has one optimizer step"),
    ],
)
def test_what_needs_all_rewards_is_refused(options: dict[str, Any], message: str, config: Config) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**{**SHAPE, "algorithm__late_rewards": "next_step", **options})


def test_a_gradient_beside_advantages_is_refused(config: Config) -> None:
    with pytest.raises(ConfigError, match=r"rewards\.preservation\.gradient_weight needs a scorer"):
        late_run(config, "nft", rewards={"preservation": {"gradient_weight": 1.0}})
