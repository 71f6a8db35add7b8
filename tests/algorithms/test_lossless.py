"""What makes a step faster or smaller, and must not change what it computes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from retouch.algorithms.train import recipe
from retouch.config import RunConfig
from retouch.engine import Engine, OutOfMemory, engine
from retouch.engine.speed import compile_blocks
from retouch.rewards.protocol import RewardItem
from retouch.rewards.table import RewardTable
from retouch.training import experience
from retouch.training.build import build
from retouch.types import Outcome
from tests.selection import default

from .runs import Config, Use, brightness, of_kind, same_weights, train, weights

pytestmark = pytest.mark.usefixtures("bare", "shallow")

Gradients = list[dict[str, Tensor]]


@pytest.fixture
def gradients(monkeypatch: pytest.MonkeyPatch) -> Gradients:
    """Those of every optimizer step from now on, by the place of the weight."""
    found: Gradients = []
    real = Engine.step

    def step(self: Engine, lr: float) -> dict[str, float]:
        found.append({str(i): p.grad.clone() for i, p in enumerate(self.network.parameters()) if p.grad is not None})
        return real(self, lr)

    monkeypatch.setattr(Engine, "step", step)
    return found


@pytest.mark.parametrize(
    "model",
    [
        pytest.param({}, id="flux_fill", marks=pytest.mark.full),
        pytest.param({"model": {"family": "sd_inpaint", "path": "tiny", "dtype": "fp32", "train": {"kind": "full"}},
                      "rollout__guidance_scale": 2.0, "rollout__num_steps": 4, "rollout__noise_level": None},
                     id="sd_inpaint, guided"),
    ],
)  # fmt: skip
def test_all_steps_of_a_window_at_once_have_the_gradient_of_one_after_another(
    model: dict[str, Any], config: Config, gradients: Gradients
) -> None:
    for name, size in (("together", None), ("apart", 1)):
        train(
            config(
                name=name, training__max_steps=1, rollout__window__size=3, optimizer__steps_per_forward=size, **model
            )
        )
    together, apart = gradients
    largest = max(float(g.abs().max()) for g in together.values())
    assert largest > 1e-3
    for name, gradient in together.items():
        torch.testing.assert_close(apart[name], gradient, atol=1e-4 * largest, rtol=0)


def test_rewards_while_sampling_goes_on_are_those_waited_for(
    config: Config, scripted: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit the same weights; and sampling does go on: the first batch is scored once the second was begun."""
    sampled: list[str] = []
    second_begun = threading.Event()
    in_time: list[bool] = []
    real_sample, real_submit = experience.sample, RewardTable.submit

    def sample(*given: Any, **options: Any) -> Any:
        sampled.append("batch")
        if len(sampled) == 2:
            second_begun.set()
        return real_sample(*given, **options)

    def score_late(item: RewardItem) -> Outcome:
        if sampled:  # not the evaluation before
            in_time.append(second_begun.wait(60))
        return brightness(item)

    def submit_and_wait(self: RewardTable, items: Any, **options: Any) -> Any:
        pending = real_submit(self, items, **options)
        pending.result()
        return pending

    options = {"rollout__batch_size_per_device": 2, "optimizer__lr": 1e-3, "training__max_steps": 2}
    monkeypatch.setattr(experience, "sample", sample)
    scripted(score_late)
    overlapped, _ = train(config(name="overlapped", **options))
    assert len(in_time) >= 4 and all(in_time)
    scripted(brightness)
    monkeypatch.setattr(RewardTable, "submit", submit_and_wait)
    sequential, _ = train(config(name="sequential", **options))
    assert same_weights(weights(overlapped), weights(sequential))


# --- out of memory ---

ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "nft": {"algorithm": {"name": "nft"}, "rollout__window": None, "rollout__noise_level": None},
    "dpo": {"algorithm": {"name": "dpo"}, "rollout__window": None, "rollout__noise_level": None,
            "rollout__global_groups_per_batch": 4, "rollout__batch_size_per_device": 8},
    "sft": {"algorithm": {"name": "sft"}, "rollout__window": None, "rollout__noise_level": None},
}  # fmt: skip


def train_in(config: RunConfig, fits: int) -> tuple[dict[str, Tensor], int]:
    """Train on a device whose memory holds `fits` rows of a forward with gradients; the first such forward of the run
    fits in any case. -> (weights, rows of a forward in the end)."""
    run = build(config)
    seen = [0]
    sizes: list[int] = []

    def allocate(network: Any, args: Any, kwargs: dict[str, Any]) -> None:
        rows = len(kwargs["hidden_states"])
        if torch.is_grad_enabled():
            seen[0] += 1
            if rows > fits and seen[0] > 1:
                raise torch.OutOfMemoryError(f"tried to allocate {rows} rows\nand a long report")
            sizes.append(rows)

    hook = run.model.network.register_forward_pre_hook(allocate, with_kwargs=True)
    try:
        recipe(config.algorithm.name)(run)
    finally:
        hook.remove()
        run.close()
    return weights(run), sizes[-1]


@pytest.mark.parametrize("name", default(ALGORITHMS, lambda name: name == "nft"))
def test_a_step_that_does_not_fit_is_taken_in_halves(
    name: str, config: Config, scripted: Use, gradients: Gradients, caplog: pytest.LogCaptureFixture
) -> None:
    """Bit for bit the gradients of a run file that asks for half the rows from the start: nothing of the forwards that
    did fit is left in them."""
    scripted(brightness)
    options = {"training__max_steps": 2, "optimizer__lr": 1e-3, **ALGORITHMS[name]}
    whole = {"optimizer__batch_size_per_device": 2, "optimizer__gradient_accumulation": 2}
    half = {"optimizer__batch_size_per_device": 1, "optimizer__gradient_accumulation": 4}
    small, fits = train_in(config(name="small", **options, **half), fits=10**6)
    expected = [dict(step) for step in gradients]
    gradients.clear()
    caplog.clear()
    ended, rows = train_in(config(name="halved", **options, **whole), fits=fits)
    assert rows == fits and len(gradients) == len(expected) == 2
    for mine, theirs in zip(gradients, expected, strict=True):
        assert all(torch.equal(mine[n], theirs[n]) for n in theirs)
    assert all(torch.equal(ended[n], small[n]) for n in small)
    told = [r.getMessage() for r in caplog.records if "out of memory" in r.getMessage()]
    assert len(told) == 1 and "optimizer.batch_size_per_device=1 from the start" in told[0]


def test_a_resumed_run_keeps_the_halved_rows(config: Config, scripted: Use) -> None:
    """With memory for all again: other forwards would add up to other bits."""
    scripted(brightness)
    options = {"training__checkpoint_every": 1, "optimizer__lr": 1e-3, "optimizer__batch_size_per_device": 2}
    options |= {"optimizer__gradient_accumulation": 2, "algorithm": {"name": "sft"}, "rollout__window": None}
    options |= {"rollout__noise_level": None}
    whole, _ = train_in(config(name="whole", training__max_steps=2, **options), fits=1)
    train_in(config(name="cut", training__max_steps=1, **options), fits=1)
    resumed, rows = train_in(config(name="cut", training__max_steps=2, resume="auto", **options), fits=10**6)
    assert rows == 1
    assert all(torch.equal(resumed[n], whole[n]) for n in whole)


def test_what_cannot_be_halved_ends_the_run_with_a_remedy(config: Config, scripted: Use) -> None:
    scripted(brightness)
    with pytest.raises(OutOfMemory, match=r"with one row in a forward \(tried to allocate 2 rows\); set training.grad"):
        train_in(config(name="one", optimizer__gradient_accumulation=2), fits=1)
    with pytest.raises(OutOfMemory, match=r"set optimizer.batch_size_per_device=1 and gradient_accumulation=4, which"):
        train_in(config(name="stop", optimizer__on_out_of_memory="stop", optimizer__gradient_accumulation=2), fits=1)


def test_memory_that_ends_in_the_optimizer_names_what_it_holds(
    config: Config, scripted: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its moments come into being in the first step; fewer rows would not help."""
    scripted(brightness)

    def step(self: Engine, lr: float) -> dict[str, float]:
        raise torch.OutOfMemoryError("tried to allocate moments\nand a long report")

    monkeypatch.setattr(Engine, "step", step)
    with pytest.raises(OutOfMemory, match=r"in the optimizer \(tried to allocate moments\); set optimizer.state=8bit"):
        train_in(config(name="moments"), fits=10**6)


# --- compiled blocks ---


def compiled_with(backend: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Compile by a backend, and keep what was compiled."""
    made: list[Any] = []

    def compile_and_keep(network: Any) -> None:
        compile_blocks(network, backend)
        made.extend(m for m in network.modules() if m._compiled_call_impl is not None)

    monkeypatch.setattr(engine, "compile_blocks", compile_and_keep)
    return partial(_blocks_are, made)


def _blocks_are(made: list[Any], network: Any) -> None:
    names = [type(m).__name__ for m in made]
    assert set(names) == set(network._repeated_blocks) and len(names) == len(set(made))


@pytest.mark.full
def test_compiled_blocks_sample_and_train_one_policy(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced and run as they are: the same numbers, and a ratio of exactly 1 where batches have one shape."""
    options = {
        "rollout__window": {"size": 1, "range": [0, 0.5]},
        "optimizer__batch_size_per_device": 4,
        "training__max_steps": 1,
    }
    plain, _ = train(config(name="plain", **options))
    check = compiled_with("eager", monkeypatch)
    run, records = train(config(name="compiled", training__compile=True, **options))
    check(run.model.network)
    (step,) = of_kind(records, "train")
    assert step["max_abs_log_ratio"] == 0.0
    assert same_weights(weights(plain), weights(run))


@pytest.mark.slow
def test_blocks_compiled_for_real_sample_and_train_one_policy(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """With kernels that round otherwise than torch's, in rollout and training alike."""
    check = compiled_with("inductor", monkeypatch)
    run, records = train(config(training__compile=True, training__max_steps=1, optimizer__batch_size_per_device=4))
    check(run.model.network)
    (step,) = of_kind(records, "train")
    assert step["max_abs_log_ratio"] <= 1e-5


def test_the_frozen_base_is_as_small_as_asked_for_and_what_is_trained_is_not(config: Config) -> None:
    """LoRA on a base in bf16: two bytes for each frozen weight, four for each trained one."""
    run = build(config(model__dtype="bf16", model__train={"kind": "lora", "rank": 4, "alpha": 8}))
    run.close()
    kinds = {(p.requires_grad, p.dtype) for p in run.model.network.parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
