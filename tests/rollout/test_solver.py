"""The solver of deterministic steps: which steps take it, and what passes from one to the next."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from retouch.core.schedule import FlowSchedule
from retouch.core.steps import Estimate, dpm_step, ode_step
from retouch.families.flux_fill.model import FluxFill
from retouch.families.flux_fill.spec import FluxFillModel
from retouch.families.qwen_image_edit.model import QwenImageEdit
from retouch.families.qwen_image_edit.spec import QwenImageEditModel
from retouch.rollout.plan import (
    StepPlan,
    ode_plan,
)
from retouch.rollout.sampler import latent_shape, noise_for, sample
from tests.families.conftest import random_example

from .fakes import SIZE, FakeModel, condition_of, plan_of

VALUES = [3.0, -1.0]
SEEDS = [1, 2]
SOLVERS = ("first_order", "dpm2")
CONDITION = condition_of(VALUES)


def final(model: Any, plan: StepPlan, noise_seeds: list[int] | None = None) -> Tensor:
    return sample(model, model.network, plan, CONDITION, SEEDS, noise_seeds).final


def step(model: Any, plan: StepPlan, x: Tensor, i: int, before: Estimate | None = None) -> tuple[Tensor, Estimate]:
    """One of the second order, by the model's own output."""
    times = plan.schedule.times
    output = model.predict(model.network, x, times[i].expand(len(x)), CONDITION)
    level, level_next = plan.schedule.level(times[i]), plan.schedule.level(times[i + 1])
    return dpm_step(x, output, level, level_next, before)


@torch.no_grad()
def test_a_run_on_the_ode_is_its_steps_in_turn() -> None:
    model: Any = FakeModel("flow")
    plan = ode_plan(model.schedule(6, SIZE), "dpm2")
    x, before = noise_for(latent_shape(model, SIZE), SEEDS)[0], None
    for i in range(6):
        x, before = step(model, plan, x, i, before)
    torch.testing.assert_close(final(model, plan), x)
    assert not torch.allclose(final(model, ode_plan(plan.schedule)), x, atol=1e-3)


@torch.no_grad()
def test_the_past_ends_at_a_stochastic_step() -> None:
    """Step 2 of 6 draws noise; step 3 begins anew, step 4 knows of it."""
    model: Any = FakeModel("flow")
    plan = replace(plan_of(model, "flow_sde", first=2, stochastic=1), solver="dpm2")
    trajectory = sample(model, model.network, plan, CONDITION, SEEDS)
    x = trajectory.latents[:, 1]
    output = model.predict(model.network, x, plan.schedule.times[3].expand(2), CONDITION)
    after, before = step(model, plan, x, 3)
    torch.testing.assert_close(after, ode_step("flow", x, output, plan.schedule.times[3], plan.schedule.times[4]))
    for i in (4, 5):
        after, before = step(model, plan, after, i, before)
    torch.testing.assert_close(trajectory.final, after)


def test_steps_before_a_window_are_the_same_when_they_are_shared() -> None:
    model: Any = FakeModel("flow")
    plan = replace(plan_of(model, "flow_sde", first=3, stochastic=2), solver="dpm2")
    alone = [sample(model, model.network, plan, condition_of([3.0]), [seed], [70]).final for seed in SEEDS]
    both = sample(model, model.network, plan, condition_of([3.0, 3.0]), SEEDS, [70, 70]).final
    torch.testing.assert_close(both, torch.cat(alone))
    assert not torch.allclose(
        both,
        sample(
            model, model.network, replace(plan, solver="first_order"), condition_of([3.0, 3.0]), SEEDS, [70, 70]
        ).final,
        atol=1e-3,
    )


def test_it_is_of_flow_models() -> None:
    with pytest.raises(ValueError, match="solver dpm2 is of flow models, the model predicts epsilon"):
        ode_plan(FakeModel("epsilon").schedule(6, SIZE), "dpm2")


@pytest.mark.parametrize(("terminal", "share"), [pytest.param(None, 0.97, marks=pytest.mark.full), (0.02, 0.9)])
@torch.no_grad()
def test_it_ends_nearer_to_the_end_of_the_ode(terminal: float | None, share: float) -> None:
    """Of the trained tiny base, in 6 and in 10 steps; the end is where 60 steps go. By the schedule of Qwen-Image,
    too, whose last sigma is tiny."""
    model = FluxFill.from_config(FluxFillModel(path="tiny", dtype="fp32", max_sequence_length=24))
    examples = [random_example(i, 32, 64) for i in range(4)]
    condition = model.encode(examples, model.spec.guidance_scale)

    true = end(model, condition, 60, "dpm2", None)
    for steps in (6, 10):
        first, second = (
            float((end(model, condition, steps, solver, terminal) - true).square().mean().sqrt()) for solver in SOLVERS
        )
        assert second < share * first


@torch.no_grad()
def test_nor_does_it_end_further_off_where_there_is_nothing_to_gain() -> None:
    """The tiny Qwen-Image-Edit in 10 steps of its own schedule: extrapolated over the step down to the last sigma of
    .02, images end at three times the distance."""
    model = QwenImageEdit.from_config(QwenImageEditModel(path="tiny", dtype="fp32", max_sequence_length=96))
    examples = [replace(random_example(i, 32, 64), prompt="Make it red.", mask=None) for i in range(3)]
    condition = model.encode(examples, model.spec.guidance_scale)
    assert model.schedule(10, (32, 64)).terminal == 0.02
    true = end(model, condition, 60, "dpm2", None)
    first, second = (
        float((end(model, condition, 10, solver, 0.02) - true).square().mean().sqrt()) for solver in SOLVERS
    )
    assert second < 1.1 * first


def end(model: Any, condition: Any, steps: int, solver: Any, terminal: float | None) -> Tensor:
    """Images of the ODE, one a row of `condition`."""
    schedule = FlowSchedule.make(steps, model.schedule(steps, (32, 64)).shift, terminal)
    seeds = list(range(1, len(condition) + 1))
    return sample(model, model.network, ode_plan(schedule, solver), condition, seeds).final
