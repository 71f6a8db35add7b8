"""Failed rewards never train: the gradient is that of the batch without their rows, whatever the algorithm; a run whose
servers are killed again and again ends with the bits of one that was left alone."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor

from retouch.algorithms.dpo import recipe as dpo
from retouch.algorithms.grpo import recipe as grpo
from retouch.algorithms.nft import recipe as nft
from retouch.data.sampler import rank_slots
from retouch.engine import Engine
from retouch.families.flux_fill.model import FluxFill
from retouch.observe.run_dir import read_metrics
from retouch.rewards.protocol import RewardItem
from retouch.rewards.scorers import preservation
from retouch.training import experience
from retouch.training.scoring import Tally
from retouch.training.session import Session
from retouch.types import Failure, Outcome, Score, Stopped
from tests.rewards.fakes import free_port, until
from tests.rewards.test_launch import SERVE, START_S, TOKEN, ready
from tests.selection import rows

from .runs import Config, Scripted, Use, base_weights, brightness, of_kind, same_weights, train, weights

pytestmark = pytest.mark.usefixtures("bare", "shallow")

FAILED = (7,)
"""Of 12 images: less than `max_failure_rate`, beyond which a run stops."""

ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"name": "grpo", "clip_range": 1e-3, "kl_weight": 0.5},
    "ppo": {"name": "ppo", "clip_range": 1e-3, "kl_weight": 0.5},
    "dpo": {"name": "dpo", "beta": 100.0},
    "nft": {"name": "nft", "kl_weight": 0.5},
}


COMPOSITIONS: dict[str, dict[str, dict[str, Any]]] = {
    "weighted": {},
    "gated": {"a": {"gated_by": "b"}},
    "gate only": {"a": {"gated_by": "b"}, "b": {"weight": 0.0}},
    "win rates": {"a": {"transform": "win_rate"}, "b": {"transform": "win_rate", "min_group_std": 1e-4}},
    "ranks": {"a": {"transform": "rank"}, "b": {"transform": "rank", "min_group_std": 1e-4}},
    "above the noise": {"a": {"min_group_std": 1e-4}},
}
"""What `a` and `b` are besides their weights."""

FEW = {("nft", "weighted")}
"""What every default run has of it; `make test-all` has the other losses and compositions."""

COMBINED = [
    pytest.param(
        algorithm,
        composition,
        id=f"{name}-{how}",
        marks=[] if (name, how) in FEW else pytest.mark.full,
    )
    for name, algorithm in ALGORITHMS.items()
    for how, composition in COMPOSITIONS.items()
]


@pytest.fixture
def gradients(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The whole gradient of every optimizer step, before it is clipped."""
    seen: list[Tensor] = []
    real = Engine.step

    def step(self: Engine, lr: float) -> dict[str, float]:
        seen.append(torch.cat([p.grad.flatten().clone() for p in self.network.parameters() if p.grad is not None]))
        return real(self, lr)

    monkeypatch.setattr(Engine, "step", step)
    for recipe in (grpo, dpo, nft):  # away from the reference, so that the KL pulls
        monkeypatch.setattr(recipe, "warm_up", _then_move(recipe.warm_up))
    return seen


def _then_move(warm_up: Callable[..., None]) -> Callable[..., None]:
    def moved(session: Session, *rest: Any) -> None:
        warm_up(session, *rest)
        generator = torch.Generator().manual_seed(0)
        for parameter in session.run.network.parameters():
            parameter.data += 0.003 * torch.randn(parameter.shape, generator=generator)
        # NFT's old policy, which samples, is not the moved one
        session.progress.on_policy = "old" not in session.run.policy.snapshots

    return moved


def two_rewards(monkeypatch: pytest.MonkeyPatch, fails: Callable[[int], bool]) -> None:
    """`a` never fails; `b`, another property of the image, fails for the images that `fails` names by number."""
    count = itertools.count()

    def b(item: RewardItem) -> Outcome:
        if fails(next(count)):
            return Failure("scorer_error", "no")
        return Score(float(item.image[..., 0].astype(float).std()) / 255)

    rules = itertools.cycle([brightness, b])
    monkeypatch.setattr(preservation, "PreservationScorer", lambda _: Scripted(next(rules)))


@pytest.mark.parametrize(("algorithm", "composition"), COMBINED)
@pytest.mark.usefixtures("whole")
def test_the_gradient_with_failed_rows_is_that_without_them(
    algorithm: dict[str, Any],
    composition: dict[str, dict[str, Any]],
    config: Config,
    gradients: list[Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two rewards, one of which fails for 1 of 12 images; the KL is on. A 0 in place of the failure gives another
    gradient."""
    shape = {
        "algorithm": algorithm,
        "rewards": {
            "a": {"scorer": "preservation", **composition.get("a", {})},
            "b": {"scorer": "preservation", "weight": 0.5, **composition.get("b", {})},
        },
        "rollout__group_size": 6,
        "rollout__batch_size_per_device": 1,  # every image alone: the same bits whichever others there are
        "rollout__num_steps": 2,
        "rollout__window": None,
        "rollout__noise_level": 0.7 if algorithm["name"] in ("grpo", "ppo") else None,
        "optimizer__batch_size_per_device": 6,
        "optimizer__gradient_accumulation": 2,
        "training__max_steps": 1,
        "evaluation__num_examples": 1,
    }
    # the evaluation at the start scores one image, too
    two_rewards(monkeypatch, lambda n: n - 1 in FAILED)
    _, records = train(config(name="failed", **shape))
    assert of_kind(records, "rollout")[0]["failed"] == 1.0
    two_rewards(monkeypatch, lambda n: False)
    with monkeypatch.context() as patched:
        patched.setattr(
            experience, "rank_slots", lambda *a: [s for n, s in enumerate(rank_slots(*a)) if n not in FAILED]
        )
        train(config(name="without", **shape))
    zero = itertools.count()

    def false_zero(item: RewardItem) -> Outcome:
        n = next(zero) - 1
        return Score(0.0 if n in FAILED else float(item.image[..., 0].astype(float).std()) / 255)

    rules = itertools.cycle([brightness, false_zero])
    monkeypatch.setattr(preservation, "PreservationScorer", lambda _: Scripted(next(rules)))
    train(config(name="zeros", **shape))
    failed, without, zeros = gradients
    scale = float(without.abs().max())
    assert float((failed - without).abs().max()) <= 1e-6 * max(1.0, scale)
    assert float((failed - without).norm() / without.norm()) <= 1e-5
    assert float((zeros - without).norm() / without.norm()) > 1e-2


def test_a_run_whose_rewards_all_fail_stops_resumable_and_untrained(config: Config, scripted: Use) -> None:
    scripted(lambda item: Failure("scorer_error", "no"))
    run = config(name="stops", resume="auto")
    with pytest.raises(Stopped, match=r"4 of 4 images have no reward.*nothing was trained") as stopped:
        train(run)
    assert stopped.value.code == 3
    scripted(brightness)
    again, records = train(run)
    assert len(of_kind(records, "train")) == run.training.max_steps
    other, _ = train(config(name="never_failed"))
    first, second = weights(again), weights(other)
    assert all(torch.equal(first[n], second[n]) for n in first)
    start = base_weights(config(name="start"))
    assert any(not torch.equal(first[n], start[n]) for n in first)


def test_images_of_other_processes_count_in_the_rate(
    config: Config, scripted: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of four images fails here; of four on another process none does, or two do."""
    real, elsewhere = Engine.gather_list, Tally(4, 0, [], (0, 0))

    def both(self: Engine, values: Any) -> list[Any]:
        told = real(self, values)
        return [*told, elsewhere] if told and isinstance(told[0], Tally) else told

    monkeypatch.setattr(Engine, "gather_list", both)
    scripted(lambda item: Failure("bad_item", "no") if item.id == 3 and item.group < 200 else brightness(item))  # type: ignore[operator]
    run, records = train(config(name="goes_on", training__max_steps=2))
    assert [r["failed"] for r in of_kind(records, "rollout")] == [1.0]
    assert (run.rewards.asked, run.rewards.failed) == (4, 1)
    elsewhere = Tally(4, 2, [Failure("deadline", "late")] * 2, (0, 0))
    with pytest.raises(Stopped, match=r"3 of 8 images have no reward.*deadline x 2 \(late\); bad_item x 1"):
        train(config(name="stops", training__max_steps=2))


@pytest.mark.parametrize(
    ("where", "algorithm"),
    rows(product(["picture", "path"], ["grpo", "dpo", "nft"]), {("path", "grpo")}),
)
def test_a_picture_of_no_numbers_is_one_whose_reward_failed(
    algorithm: str, where: str, config: Config, scripted: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An overflow in the network or the autoencoder makes NaN, which as a picture is black and would be scored. Of all
    pictures, it stops the run."""
    sampled = {} if algorithm == "grpo" else {"rollout__window": None, "rollout__noise_level": None}
    shape = {"algorithm": ALGORITHMS[algorithm], "training__max_steps": 2, "evaluation__num_examples": 1, **sampled}
    shape |= {"rollout__group_size": 4, "rollout__batch_size_per_device": 8, "optimizer__lr": 1e-3}
    rows = [1]
    scripted(lambda item: Failure("bad_item", "no") if item.id in rows and item.group < 200 else brightness(item))  # type: ignore[operator]
    expected, _ = train(config(name="failed", **shape))
    scripted(brightness)
    real_sample, real_decode = experience.sample, FluxFill.decode

    def broken_path(*arguments: Any, **options: Any) -> Any:
        trajectory = real_sample(*arguments, **options)
        for tensor in (trajectory.latents, trajectory.log_probs, trajectory.final):
            tensor[rows] = torch.nan
        return trajectory

    def broken_picture(self: Any, latents: Tensor) -> Tensor:
        images = real_decode(self, latents)
        if len(images) == 8:  # a rollout's
            images[rows, :, 0, 0] = torch.inf
        return images

    if where == "path":
        monkeypatch.setattr(experience, "sample", broken_path)
    else:
        monkeypatch.setattr(FluxFill, "decode", broken_picture)
    run, records = train(config(name="broken", **shape))
    assert all(r["failed"] == 1 for r in of_kind(records, "rollout"))
    assert same_weights(weights(expected), weights(run))
    rows += [0, *range(2, 8)]
    with pytest.raises(Stopped, match=r"8 of 8 images have no reward.*the sample contains NaN or Inf"):
        train(config(name="all", **shape))


def test_a_rate_over_the_whole_run_stops_it_too(config: Config, scripted: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of twenty fails, every time: within the rate of an epoch, over that of the run."""
    monkeypatch.setattr("retouch.training.scoring._RUN_IMAGES", 20)
    count = itertools.count()
    scripted(lambda item: Failure("bad_item", "no") if next(count) % 8 == 7 else brightness(item))
    client = {"max_failure_rate": 0.5, "max_run_failure_rate": 0.1}
    with pytest.raises(
        Stopped, match=r"images of the run had no reward, over reward_client\.max_run_failure_rate 0\.1"
    ):
        train(config(training__max_steps=40, reward_client=client))


# --- killed servers ---


class Victim:
    """`retouch reward serve` of a user's scorer on a fixed port, in processes that can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "server.log"
        self.kills: list[str] = []
        self.start()

    def start(self) -> None:
        options = json.dumps({"fn": {"fn": "tests.rewards.user_scorers:slow_brightness"}})
        environment = {**os.environ, TOKEN: "", "OMP_NUM_THREADS": "1", "REWARD_LATENCY_S": "0.2"}
        command = [*SERVE, "fn", "--options", options, "--port", str(self.port)]
        command += ["--endpoints", str(self.log.parent / "endpoints.json"), "--log-dir", str(self.log.parent / "logs")]
        with self.log.open("ab") as stream:
            self.process = subprocess.Popen(command, env=environment, stdout=stream, stderr=stream)
        until(lambda: _answers(self.url), START_S)

    def kill(self, what: str) -> None:
        pid = self.process.pid
        if what != "server":
            info = httpx.get(f"{self.url}/info", timeout=30, trust_env=False).json()
            pid = info["worker_pid" if what == "worker" else "pid"]
        os.kill(pid, signal.SIGKILL)
        self.kills.append(what)
        if what == "server":
            self.process.wait(10)
            self.start()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def _answers(url: str) -> bool:
    try:
        return ready(url)
    except httpx.HTTPError:
        return False


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Victim]:
    one = Victim(tmp_path)
    try:
        yield one
    finally:
        one.close()


@pytest.mark.slow
def test_kills_of_worker_front_and_server_in_a_run_change_no_bit_of_it(config: Config, victim: Victim) -> None:
    """20 steps, each with a rollout of its own; every reward is finally delivered."""
    shape = {
        "rewards": {"fn": {"url": victim.url}},
        "optimizer__batch_size_per_device": 4,
        "training__max_steps": 20,
        "reward_client": {"timeout_s": 60.0, "outage_wait_s": 300.0, "batch_size": 2, "max_failure_rate": 0.0},
        "evaluation__num_examples": 1,
    }
    quiet, _ = train(config(name="quiet", **shape))
    over = threading.Event()

    def chaos() -> None:
        for what in ("worker", "front", "server", "worker", "server", "front"):
            until(lambda: over.is_set() or _answers(victim.url), START_S)
            if over.wait(1.0):
                return
            victim.kill(what)

    thread = threading.Thread(target=chaos, daemon=True)
    thread.start()
    started = time.monotonic()
    try:
        disturbed, _ = train(config(name="disturbed", **shape))
    finally:
        over.set()
        thread.join(START_S)
    assert len(victim.kills) == 6, victim.kills
    first, second = weights(quiet), weights(disturbed)
    assert all(torch.equal(first[n], second[n]) for n in first)
    records = [of_kind(read_metrics(run.dir.path / "metrics.jsonl"), "rollout") for run in (quiet, disturbed)]
    assert [r["combined_score"] for r in records[0]] == [r["combined_score"] for r in records[1]]
    assert len(records[1]) == 20 and time.monotonic() - started < 600
