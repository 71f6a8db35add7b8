"""What a rollout records, under flow and epsilon schedules: states, log-probabilities, means."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from retouch.core import steps
from retouch.core.rules import STEP_RULES, StepRule
from retouch.core.steps import gaussian_log_prob
from retouch.errors import ConfigError
from retouch.rollout.plan import (
    StepPlan,
    ode_plan,
    transition,
)
from retouch.rollout.sampler import sample
from retouch.training.noised import denoising_error
from retouch.types import Trajectory

from .fakes import SIZE, FakeModel, condition_of, plan_of

VALUES = [0.5, -1.0, 2.0]
SEEDS = [4, 5, 6]
CONDITION = condition_of(VALUES)
RULES = [("flow", "flow_sde"), ("flow", "dance_sde"), ("flow", "cps"), ("epsilon", "ddim")]


def moments(model: Any, plan: StepPlan, trajectory: Trajectory) -> list[tuple[Tensor, Tensor]]:
    return [
        transition(model, model.network, plan, trajectory.latents[:, s], torch.full((3,), plan.first + s), CONDITION)
        for s in range(plan.trained)
    ]


@pytest.mark.parametrize(("prediction", "rule"), RULES)
@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("mode", ["exact", "published"])
def test_replayed_log_probs_are_the_recorded_ones(prediction: Any, rule: str, first: int, mode: Any) -> None:
    model: Any = FakeModel(prediction)
    plan = plan_of(model, rule, first=first)
    region = torch.ones(3, 1, 4, 6)
    region[:, :, 1] = 0
    for where in (None, region):
        trajectory = sample(model, model.network, plan, CONDITION, SEEDS, None, where, mode)
        with torch.enable_grad():
            replayed = [
                gaussian_log_prob(trajectory.latents[:, s + 1], mean, std, where, mode)
                for s, (mean, std) in enumerate(moments(model, plan, trajectory))
            ]
        assert all(column.requires_grad for column in replayed)
        assert torch.equal(torch.stack(replayed, 1).detach(), trajectory.log_probs)


@pytest.mark.parametrize(("prediction", "rule"), RULES)
def test_recorded_means_are_those_of_the_transition(prediction: Any, rule: str) -> None:
    model: Any = FakeModel(prediction)
    plan = plan_of(model, rule, first=1, stochastic=3, trained=2)
    trajectory = sample(model, model.network, plan, CONDITION, SEEDS, keep_means=True)
    expected = torch.stack([mean.detach() for mean, _ in moments(model, plan, trajectory)], 1)
    assert trajectory.means is not None and trajectory.means.shape == (3, 2, 2, 4, 6)
    assert torch.equal(trajectory.means, expected)
    without = sample(model, model.network, plan, CONDITION, SEEDS)
    assert without.means is None and torch.equal(without.final, trajectory.final)


def test_the_states_around_the_trained_steps_are_kept() -> None:
    """4 stochastic steps of which 2 are trained: 3 states, from the first on; each next one is mean + std · noise."""
    model: Any = FakeModel("flow")
    plan = plan_of(model, "flow_sde", first=1, stochastic=4, trained=2)
    trajectory = sample(model, model.network, plan, CONDITION, SEEDS)
    assert trajectory.latents.shape == (3, 3, 2, 4, 6) and trajectory.log_probs.shape == (3, 2)
    assert (trajectory.first_step, len(trajectory.times)) == (1, 7)
    generators = [torch.Generator().manual_seed(seed) for seed in SEEDS]
    draws = [torch.stack([torch.randn(2, 4, 6, generator=g) for g in generators]) for _ in range(3)]  # the first: x
    for s, (mean, std) in enumerate(moments(model, plan, trajectory)):
        expected = mean.detach() + std.view(-1, 1, 1, 1) * draws[s + 1]
        torch.testing.assert_close(trajectory.latents[:, s + 1], expected, atol=1e-6, rtol=0)
    assert float((trajectory.final - trajectory.latents[:, -1]).abs().max()) > 0.1  # steps follow that are not kept


@pytest.mark.parametrize("prediction", ["flow", "epsilon"])
def test_without_trained_steps_the_clean_latents_are_kept(prediction: Any) -> None:
    model: Any = FakeModel(prediction)
    trajectory = sample(model, model.network, ode_plan(model.schedule(5, SIZE)), CONDITION, SEEDS, keep_means=True)
    assert trajectory.latents.shape == (3, 1, 2, 4, 6) and trajectory.log_probs.shape == (3, 0)
    assert torch.equal(trajectory.latents[:, 0], trajectory.final)
    assert trajectory.means is None and trajectory.first_step == 0


def test_the_ode_of_an_epsilon_model_is_ddim_without_noise() -> None:
    model: Any = FakeModel("epsilon")
    schedule = model.schedule(5, SIZE)
    x = torch.stack([torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(seed)) for seed in SEEDS])
    levels = schedule.level(schedule.times)
    with torch.no_grad():
        for i in range(5):
            eps = model.predict(model.network, x, schedule.times[i].expand(3), CONDITION)
            x, std = steps.ddim(x, eps, levels[i], levels[i + 1], eta=0.0)
            assert float(std) == 0
    found = sample(model, model.network, ode_plan(schedule), CONDITION, SEEDS).final
    torch.testing.assert_close(found, x, atol=1e-6, rtol=0)


def test_the_last_step_of_ddim_has_no_density() -> None:
    """A plan may not train it: the std at alpha_bar 1 is 0. It may draw in it."""
    model: Any = FakeModel("epsilon")
    schedule, rule = model.schedule(4, SIZE), STEP_RULES["ddim"]
    with pytest.raises(ValueError, match="step 3 of 4 has a std of 0: a deterministic step has no log-probability"):
        StepPlan(schedule, rule, 1.0, 0, 4, 4)
    for stochastic in (3, 4):
        sample(model, model.network, StepPlan(schedule, rule, 1.0, 0, stochastic, 3), CONDITION, SEEDS)


def pair_of_four_dims(x: Tensor, *_: Any) -> Any:
    return x, x


def mean_alone(x: Tensor, *_: Any) -> Any:
    return x


def no_noise_at_the_end(x: Tensor, _v: Tensor, _level: Tensor, level_next: Tensor, *_: Any) -> Any:
    return x, level_next


def never_noise(x: Tensor, *_: Any) -> Any:
    return x, torch.zeros(len(x))


def float_std(x: Tensor, *_: Any) -> Any:
    return x, 0.1


def nan_mean(x: Tensor, *_: Any) -> Any:
    return x / 0, torch.ones(len(x))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (float_std, r"given shapes \(4, 1\), float .* expected \(mean, std\)"),
        (nan_mean, r"given a mean that contains NaN or Inf, .*; correct the function"),
        (pair_of_four_dims, r"given shapes \(4, 1\), \(4, 1\) .* expected \(mean, std\).* set the std to std.flatten"),
        (mean_alone, r"given a single value .* expected \(mean, std\)"),
        (no_noise_at_the_end, "step 3 of 4 .*for a custom step rule, set ends_without_noise=True in its StepRule"),
        (never_noise, "step 0 of 4 .*for a custom step rule, set a std above 0 in its function"),
    ],
)
def test_a_step_rule_that_cannot_be_trained_is_rejected_with_its_remedy(function: Any, message: str) -> None:
    schedule = FakeModel("flow").schedule(4, SIZE)
    rule = StepRule("flow", "eta", 1.0, f"{__name__}:{function.__name__}")
    with pytest.raises(ConfigError, match=message):
        StepPlan(schedule, rule, 1.0, 0, 4, 4)


def test_rows_may_be_at_different_steps_of_a_ddim_run() -> None:
    model: Any = FakeModel("epsilon")
    plan = plan_of(model, "ddim")
    x, step = torch.randn(3, 2, 4, 6, generator=torch.Generator().manual_seed(1)), torch.tensor([4, 0, 2])
    mean, std = transition(model, model.network, plan, x, step, CONDITION)
    assert std.shape == (3,) and len(set(std.tolist())) == 3
    for i in range(3):
        alone, alone_std = transition(model, model.network, plan, x[[i]], step[[i]], CONDITION.select([i]))
        torch.testing.assert_close(alone, mean[[i]])
        torch.testing.assert_close(alone_std, std[[i]])


def test_the_denoising_error_of_an_epsilon_model_is_to_the_noise() -> None:
    model: Any = FakeModel("epsilon")
    schedule, generator = model.schedule(5, SIZE), torch.Generator().manual_seed(2)
    x0, noise = torch.randn(3, 2, 4, 6, generator=generator), torch.randn(3, 2, 4, 6, generator=generator)
    time, region = torch.tensor([3.0, 50.0, 99.0]), torch.zeros(3, 1, 4, 6)
    region[:, :, 1:3, 2:5] = 1
    ab = schedule.level(time).view(-1, 1, 1, 1)
    with torch.no_grad():
        predicted = model.predict(model.network, ab.sqrt() * x0 + (1 - ab).sqrt() * noise, time, CONDITION)
        found = denoising_error(model, model.network, schedule, x0, noise, time, CONDITION)
        inside = denoising_error(model, model.network, schedule, x0, noise, time, CONDITION, region)
    torch.testing.assert_close(found, ((predicted - noise) ** 2).mean(dim=(1, 2, 3)))
    torch.testing.assert_close(inside, ((predicted - noise) ** 2)[:, :, 1:3, 2:5].mean(dim=(1, 2, 3)))
