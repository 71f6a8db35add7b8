"""Ratio = 1 is sacred: replayed log-probabilities equal the recorded ones; whatever breaks that is seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from retouch.core.rules import STEP_RULES
from retouch.core.schedule import FlowSchedule
from retouch.core.steps import gaussian_log_prob
from retouch.rollout.plan import StepPlan, transition
from retouch.rollout.sampler import latent_region, sample
from retouch.types import Condition, Trajectory
from tests.families.conftest import random_example

SIZE = (32, 64)
SEEDS = [5, 6, 7, 8]


def plan_for(model: Any, rule: str = "flow_sde", first: int = 1, trained: int = 2, num_steps: int = 5) -> StepPlan:
    return StepPlan(model.schedule(num_steps, SIZE), STEP_RULES[rule], 0.7, first, trained, trained)


def condition_for(model: Any, rows: int = 4, guidance: float = 30.0) -> Condition:
    return model.encode([random_example(i, *SIZE) for i in range(rows)], guidance)


def replay(
    model: Any, plan: StepPlan, trajectory: Trajectory, condition: Condition, region: Tensor | None = None
) -> Tensor:
    """Log-probabilities of the recorded steps, one forward of the whole batch a step, as the sampler did -> [B, S]."""
    columns: list[Tensor] = []
    for s in range(plan.trained):
        step = torch.full((len(condition),), plan.first + s)
        mean, std = transition(model, model.network, plan, trajectory.latents[:, s], step, condition)
        columns.append(gaussian_log_prob(trajectory.latents[:, s + 1], mean, std, region))
    return torch.stack(columns, 1)


@pytest.mark.parametrize("rule", ["flow_sde", "dance_sde", "cps"])
def test_replay_with_the_samplers_batches_is_exact(model: Any, rule: str) -> None:
    plan, condition = plan_for(model, rule, first=0, trained=3), condition_for(model)
    trajectory = sample(model, model.network, plan, condition, SEEDS)
    with torch.enable_grad():  # training computes it with a graph
        replayed = replay(model, plan, trajectory, condition)
    assert replayed.requires_grad
    assert torch.equal(replayed.detach(), trajectory.log_probs)


@pytest.mark.parametrize("guidance", [7.5, 1.0])
def test_replay_of_an_epsilon_network_is_exact(sd_model: Any, guidance: float) -> None:
    """DDIM steps of Stable Diffusion, its classifier-free guidance in sampling and replay alike."""
    plan = StepPlan(sd_model.schedule(5, SIZE), STEP_RULES["ddim"], 1.0, 1, 3, 3)
    condition = condition_for(sd_model, guidance=guidance)
    trajectory = sample(sd_model, sd_model.network, plan, condition, SEEDS)
    with torch.enable_grad():
        replayed = replay(sd_model, plan, trajectory, condition)
    assert replayed.requires_grad
    assert torch.equal(replayed.detach(), trajectory.log_probs)
    other = replay(sd_model, plan, trajectory, condition_for(sd_model, guidance=guidance + 2))
    assert float((other - trajectory.log_probs).detach().abs().max()) > 1e-4


def test_replay_in_other_batches_is_within_rounding(model: Any) -> None:
    plan, condition = plan_for(model), condition_for(model)
    trajectory = sample(model, model.network, plan, condition, SEEDS)
    # every step of every row in one batch, rows in another order
    order = torch.tensor([2, 0, 3, 1]).repeat_interleave(2)
    which = torch.tensor([0, 1]).repeat(4)
    x, x_next = trajectory.latents[order, which], trajectory.latents[order, which + 1]
    mean, std = transition(model, model.network, plan, x, plan.first + which, condition.select(order))
    difference = gaussian_log_prob(x_next, mean, std) - trajectory.log_probs[order, which]
    assert float(difference.detach().abs().max()) <= 1e-6


def test_replay_of_a_region(model: Any) -> None:
    plan, condition = plan_for(model), condition_for(model)
    assert condition.mask is not None
    region = latent_region(condition.mask, model.spec.downsampling)
    trajectory = sample(model, model.network, plan, condition, SEEDS, region=region)
    assert torch.equal(replay(model, plan, trajectory, condition, region).detach(), trajectory.log_probs)
    everywhere = sample(model, model.network, plan, condition, SEEDS)
    assert not torch.equal(everywhere.log_probs, trajectory.log_probs)


def test_latents_rounded_to_bf16_break_the_ratio(model: Any) -> None:
    plan, condition = plan_for(model), condition_for(model)
    trajectory = sample(model, model.network, plan, condition, SEEDS)
    rounded = Trajectory(
        trajectory.final,
        trajectory.times,
        trajectory.first_step,
        trajectory.latents.bfloat16().float(),
        trajectory.log_probs,
    )
    difference = replay(model, plan, rounded, condition) - trajectory.log_probs
    assert float(difference.detach().abs().max()) > 1e-4


def test_another_guidance_in_the_replay_breaks_the_ratio(model: Any) -> None:
    plan = plan_for(model)
    trajectory = sample(model, model.network, plan, condition_for(model), SEEDS)
    difference = replay(model, plan, trajectory, condition_for(model, guidance=1.0)) - trajectory.log_probs
    assert float(difference.detach().abs().max()) > 1e-4


def test_sums_instead_of_means_or_a_forgotten_step_size_would_be_seen(model: Any) -> None:
    """The recorded log-probability is a mean over dims of a density whose std has the step in it."""
    plan, condition = plan_for(model, "dance_sde", trained=1), condition_for(model)
    trajectory = sample(model, model.network, plan, condition, SEEDS)
    times = plan.schedule.times
    std = 0.7 * float(times[plan.first] - times[plan.first + 1]) ** 0.5
    mean, _ = transition(model, model.network, plan, trajectory.latents[:, 0], torch.full((4,), plan.first), condition)
    expected = torch.distributions.Normal(mean, std).log_prob(trajectory.latents[:, 1]).mean(dim=(1, 2, 3))
    torch.testing.assert_close(trajectory.log_probs[:, 0], expected.detach(), atol=1e-5, rtol=1e-5)


def test_an_image_does_not_depend_on_its_batch(model: Any) -> None:
    plan, condition = plan_for(model), condition_for(model)
    together = sample(model, model.network, plan, condition, SEEDS)
    for i in range(4):
        alone = sample(model, model.network, plan, condition.select([i]), SEEDS[i : i + 1])
        torch.testing.assert_close(alone.final[0], together.final[i], atol=1e-5, rtol=0)
    again = sample(model, model.network, plan, condition, SEEDS)
    assert torch.equal(again.final, together.final)
    other = sample(model, model.network, plan, condition, [s + 1 for s in SEEDS])
    assert float((other.final - together.final).abs().max()) > 0.1


def test_shared_noise_starts_a_group_at_one_point(model: Any) -> None:
    plan = plan_for(model, first=0, trained=1)
    condition = condition_for(model, 1).select([0, 0])
    shared = sample(model, model.network, plan, condition, [1, 2], noise_seeds=[9, 9])
    assert torch.equal(shared.latents[0, 0], shared.latents[1, 0])
    assert not torch.equal(shared.latents[0, 1], shared.latents[1, 1])
    apart = sample(model, model.network, plan, condition, [1, 2])
    assert not torch.equal(apart.latents[0, 0], apart.latents[1, 0])


def test_only_the_window_is_stochastic_and_recorded(model: Any) -> None:
    """Before the window the path is the ODE's; the recorded states are those around it."""
    condition = condition_for(model, 2)
    plan = plan_for(model, first=2, trained=2)
    with_window = sample(model, model.network, plan, condition, [1, 2])
    assert with_window.latents.shape == (2, 3, 8, 8, 16) and with_window.log_probs.shape == (2, 2)
    ode = StepPlan(plan.schedule, None, 0.0, 0, 0, 0)
    short = StepPlan(FlowSchedule(plan.schedule.times[:3], 1.0), None, 0.0, 0, 0, 0)
    before = sample(model, model.network, short, condition, [1, 2]).final
    torch.testing.assert_close(with_window.latents[:, 0], before, atol=1e-6, rtol=0)
    nothing = sample(model, model.network, ode, condition, [1, 2])
    assert nothing.log_probs.shape == (2, 0)


def test_plans_are_checked(model: Any) -> None:
    schedule = model.schedule(4, SIZE)
    with pytest.raises(ValueError, match="only 1 are stochastic"):
        StepPlan(schedule, STEP_RULES["flow_sde"], 0.7, 0, 1, 2)
    with pytest.raises(ValueError, match="epsilon models, the model predicts flow"):
        StepPlan(schedule, STEP_RULES["ddim"], 1.0, 0, 1, 1)
    with pytest.raises(ValueError, match="2 seeds for 4 rows"):
        sample(model, model.network, plan_for(model), condition_for(model), [1, 2])


def test_latent_region_counts_cells_with_any_masked_pixel() -> None:
    mask = torch.zeros(1, 1, 8, 8)
    mask[0, 0, 3, 4] = 1
    region = latent_region(mask, 4)
    assert region[0, 0].tolist() == [[0.0, 1.0], [0.0, 0.0]]
