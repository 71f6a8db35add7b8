"""What a run file says reaches objectives and networks: each option where it acts, which tests of core do not see."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retouch.algorithms.grpo import recipe as grpo
from retouch.algorithms.nft import recipe as nft
from retouch.config import RunConfig
from retouch.core.schedule import shift_sigma
from retouch.families.flux_fill.model import FluxFill
from retouch.families.sd_inpaint.model import SdInpaint
from retouch.rollout import sampler
from retouch.rollout.sampler import objective_region
from retouch.training import evaluations, supervised
from tests.selection import cells

from .runs import Config, Use, brightness, of_kind, train, weights

pytestmark = pytest.mark.usefixtures("bare", "shallow")

LORA: dict[str, Any] = {"path": "tiny", "dtype": "fp32", "train": {"kind": "lora", "rank": 4, "alpha": 8}}
ON_THE_ODE: dict[str, Any] = {"rollout__window": None, "rollout__noise_level": None}


@pytest.fixture
def run_of(config: Config) -> Config:
    """A run of an algorithm: one epoch, two updates."""

    def make(algorithm: str, options: dict[str, Any] | None = None, **overrides: Any) -> RunConfig:
        sampled = {} if algorithm == "grpo" else ON_THE_ODE
        shape = {"training__max_steps": 2, "evaluation__num_examples": 1, **sampled, **overrides}
        return config(algorithm={"name": algorithm, **(options or {})}, **shape)

    return make


def spied(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[tuple[Any, ...]]:
    """Positional arguments of every call of a module's function from now on."""
    calls: list[tuple[Any, ...]] = []
    real = getattr(module, name)

    def spy(*arguments: Any, **named: Any) -> Any:
        calls.append(arguments)
        return real(*arguments, **named)

    monkeypatch.setattr(module, name, spy)
    return calls


# --- guidance ---


@pytest.mark.parametrize(
    ("model", "algorithm"), cells(product([FluxFill, SdInpaint], ["grpo", "dpo", "nft"]), strength=1)
)
def test_guidance_of_training(
    algorithm: str, model: type[Any], run_of: Config, scripted: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLUX.1-Fill is told 30 in every forward, those with a gradient among them. SD1.5 takes part of both halves of
    guidance in the loss of GRPO, whose policy samples with them, and of none in those on noised pictures."""
    scripted(brightness)
    seen: list[tuple[bool, dict[str, Tensor]]] = []
    real = model.predict

    def predict(self: Any, network: nn.Module, x: Tensor, time: Tensor, condition: Any) -> Tensor:
        seen.append((torch.is_grad_enabled(), condition.tensors))
        return real(self, network, x, time, condition)

    monkeypatch.setattr(model, "predict", predict)
    family = "flux_fill" if model is FluxFill else "sd_inpaint"
    step = {} if model is FluxFill or algorithm != "grpo" else {"rollout__noise_level": None}
    train(run_of(algorithm, model={"family": family, **LORA}, **step))
    trained = [tensors for with_gradient, tensors in seen if with_gradient]
    assert trained and len(trained) < len(seen)
    if model is FluxFill:
        assert all(bool((tensors["guidance"] == 30).all()) for _, tensors in seen)
    else:
        assert all(("negative_text" in tensors) == (algorithm == "grpo") for tensors in trained)


# --- the region ---


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        pytest.param("dpo", {"beta": 100.0}, marks=pytest.mark.full),
        pytest.param("nft", {"kl_weight": 0.1}, marks=pytest.mark.full),
        ("grpo", {"kl_weight": 0.1}),
        pytest.param("grpo", {"guard": True, "kl_weight": 0.1}, marks=pytest.mark.full),
    ],
    ids=["dpo", "nft", "grpo", "guard"],
)
def test_what_the_policy_predicts_outside_of_the_region_is_nothing_to_the_loss(
    algorithm: str, options: dict[str, Any], run_of: Config, scripted: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KL, guard and the gradient included; over the whole picture it is something to each. The rollouts and snapshots
    predict as ever."""
    scripted(brightness)
    mask = {"region": "mask"}
    shape = {"model": {"family": "flux_fill", **LORA}, "optimizer__lr": 1e-3}
    hole = run_of(algorithm, {**options, **mask}).algorithm
    real, moved = FluxFill.predict, [0]

    def elsewhere(self: Any, network: nn.Module, x: Tensor, time: Tensor, condition: Any) -> Tensor:
        found = real(self, network, x, time, condition)
        if not torch.is_grad_enabled():
            return found
        region = objective_region(hole, condition, self.spec.downsampling)
        assert region is not None
        outside = (region == 0).to(found.dtype)
        moved[0] += int(outside.sum())
        return found + outside * 0.3

    def told(region: dict[str, Any], name: str) -> list[dict[str, float]]:
        steps = 2 if region else 1
        run = run_of(algorithm, {**options, **region}, name=name, training__max_steps=steps, **shape)
        _, records = train(run)
        told = [{k: v for k, v in r.items() if isinstance(v, float)} for r in of_kind(records, "train")]
        assert len(told) == steps and all(step["grad_norm"] > 0 for step in told)
        return told

    plain = {name: told(region, f"plain-{name}") for name, region in {"hole": mask, "all": {}}.items()}
    monkeypatch.setattr(FluxFill, "predict", elsewhere)
    changed = {name: told(region, f"changed-{name}") for name, region in {"hole": mask, "all": {}}.items()}
    assert moved[0] > 0
    for before, after in zip(plain["hole"], changed["hole"], strict=True):
        assert after == pytest.approx(before, rel=1e-4, abs=1e-9)
    for name in ("loss", *(["kl"] if options.get("kl_weight") else [])):
        assert changed["all"][0][name] != pytest.approx(plain["all"][0][name], rel=1e-3)


# --- options of the objectives ---


def test_options_of_grpo(run_of: Config, scripted: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clip range as it is written; with the guard the loss of a step is divided by the step in sigma."""
    scripted(brightness)
    losses = spied(monkeypatch, grpo, "grpo_loss")
    run, _ = train(run_of("grpo", {"clip_range": 3e-5, "guard": True}))
    schedule = run.model.schedule(3, (32, 64))
    per_step = -1 / schedule.sigma(schedule.times).diff()
    assert losses and all(arguments[3] == 3e-5 for arguments in losses)
    for *_, balance, far in losses:
        assert balance.shape == (2, 2) and far is None
        possible = [per_step[first : first + 2].to(balance) for first in range(2)]
        assert any(torch.allclose(balance, two.expand(2, 2)) for two in possible)


def test_the_kl_of_the_mask_is_that_of_the_step_that_sampled(
    run_of: Config, scripted: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is far before the first update of an epoch; after one, everything is over a threshold below its KL."""
    scripted(brightness)
    seen: list[Tensor] = []
    real = grpo.grpo_loss

    def spy(*arguments: Any) -> Any:
        assert arguments[3] is None
        seen.append(arguments[7])
        return real(*arguments)

    monkeypatch.setattr(grpo, "grpo_loss", spy)
    options = {"kl_mask_threshold": 1e-12, "inner_epochs": 2}
    _, records = train(run_of("grpo", options, optimizer__lr=1e-3, training__max_steps=2))
    first, second = of_kind(records, "train")
    assert first["clip_fraction"] == 0.0 and 0.0 < second["clip_fraction"] < 1.0
    half = len(seen) // 2
    assert not torch.cat(seen[:half]).any() and torch.cat(seen[half:]).all()


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_steps_are_weighted_by_their_std(
    name: str, run_of: Config, scripted: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(brightness)
    losses = spied(monkeypatch, grpo, "grpo_loss")
    run, _ = train(run_of(name, {"step_weight": "std"}))
    weights = run.plans.plan(run.schedule((32, 64))).relative_std(run.engine.device)
    assert losses and len({round(float(w), 3) for w in weights}) == 3
    for *_, balance, _ in losses:
        width = balance.shape[1]
        possible = [weights[first : first + width] for first in range(4 - width)]
        assert any(torch.allclose(balance, some.expand_as(balance)) for some in possible)


def test_a_published_kl_is_the_exact_one_times_the_step(
    run_of: Config, scripted: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(brightness)
    kls = spied(monkeypatch, grpo, "gaussian_kl")
    train(run_of("grpo", {"kl_weight": 0.1, "kl_mode": "published"}, optimizer__lr=1e-3))
    assert kls and all(arguments[4] == "flow_grpo" and bool((arguments[5] < 0).all()) for arguments in kls)


def test_published_log_probabilities_of_cps_are_those_of_both_sides(
    run_of: Config, scripted: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the sampler and of training. Weights that do not move find those of the sampler again, in the second update,
    too, whose ratio is no longer taken as 1; had one side the density, the ratio would be far from 1."""
    scripted(brightness)
    sides = [spied(monkeypatch, module, "gaussian_log_prob") for module in (sampler, grpo)]
    _, records = train(
        run_of(
            "grpo",
            {"log_prob_mode": "published", "clip_range": 1e-3},
            rollout__step_rule="cps",
            rollout__noise_level=0.8,
            optimizer__lr=1e-30,
        )
    )
    assert all(calls and all(arguments[4] == "cps" for arguments in calls) for calls in sides)
    first, second = of_kind(records, "train")
    assert first["max_abs_log_ratio"] < 1e-4
    assert second["clip_fraction"] == 0 and second["approx_kl"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("mode", ["positive_only", "one_only"])
def test_options_of_nft(mode: str, run_of: Config, scripted: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(brightness)
    losses = spied(monkeypatch, nft, "nft_loss")
    train(run_of("nft", {"mix": 0.3, "mode": mode, "advantage_clip": 2.5}))
    assert losses and all(arguments[6:9] == (0.3, 2.5, mode) for arguments in losses)


@pytest.mark.parametrize("algorithm", [pytest.param("sft", marks=pytest.mark.full), "grpo"])
def test_times_of_supervised_steps(
    algorithm: str, run_of: Config, scripted: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logit-normal, then moved as those of the sampler are, or by an option of SFT left as they were drawn."""
    scripted(brightness)
    moved = {} if algorithm == "sft" else {"warmup_steps": 2}
    times: dict[bool, Tensor] = {}
    for shifted, name, options in ((False, "sft", {"shifted_times": False}), (True, algorithm, moved)):
        unscored = {"rewards": {}} if name == "sft" else {}
        with monkeypatch.context() as patched:
            errors = spied(patched, supervised, "denoising_error")
            run, _ = train(run_of(name, options, name=f"s{shifted}", **unscored))
            times[shifted] = torch.cat([arguments[5] for arguments in errors])
    assert len(times[True]) == 4
    expected = shift_sigma(times[False], run.model.schedule(3, (32, 64)).shift)
    assert torch.allclose(times[True], expected, rtol=1e-5) and not torch.allclose(expected, times[False], rtol=1e-2)


# --- weights of the evaluation ---


@pytest.mark.parametrize("which", ["ema", "raw", None])
@pytest.mark.usefixtures("whole")
def test_the_evaluation_takes_the_weights_that_are_named(
    which: str | None, run_of: Config, scripted: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(brightness)
    seen: list[float] = []
    real = evaluations.draw_and_score
    total = lambda tensors: sum(float(t.double().sum()) for t in tensors)  # noqa: E731

    def watch(model: Any, network: nn.Module, *rest: Any) -> Any:
        seen.append(total(network.parameters()))
        return real(model, network, *rest)

    monkeypatch.setattr(evaluations, "draw_and_score", watch)
    run, _ = train(run_of("grpo", ema={"decay": 0.99}, optimizer__lr=1e-2, evaluation__weights=which))
    own, averaged = total(weights(run).values()), total(run.policy.state("ema").values())
    assert own != pytest.approx(averaged, abs=1e-2)
    assert seen[-1] == pytest.approx(own if which == "raw" else averaged, abs=1e-6)
