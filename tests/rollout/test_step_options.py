"""Flow-DPPO's mask and TempFlow-GRPO's step weight."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from retouch.core.objectives.grpo import gaussian_kl, grpo_loss
from retouch.core.rules import CPS, DDIM, FLOW_SDE, StepRule
from retouch.core.schedule import AlphaBarSchedule, FlowSchedule, Schedule
from retouch.core.steps import gaussian_log_prob
from retouch.rollout.plan import StepPlan

B, W, D = 4, 3, 8
CPU = torch.device("cpu")
EPSILON = AlphaBarSchedule.make(torch.linspace(0.99, 0.01, 100), 10)


def waves(phase: int, *shape: int) -> Tensor:
    return torch.sin(torch.arange(math.prod(shape), dtype=torch.float64) * 1.7 + phase).view(shape)


# --- the mask ---


def moved() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(mean, log_prob, old_log_prob, kl, advantages) of rows that moved with their advantage (rows 0 and 2: up) or with
    its sign against the old policy (1 and 3: down)."""
    std = torch.tensor([0.2, 0.5, 1.1], dtype=torch.float64).repeat(B)
    size = torch.tensor([1.0, -0.5, 3.0, -0.8], dtype=torch.float64).view(B, 1, 1)
    old = waves(0, B, W, D)
    mean = (old + 0.004 * waves(1, B, W, D) * size).flatten(0, 1).requires_grad_()
    old = old.flatten(0, 1)
    x = old + std[:, None] * waves(2, B, W, D).flatten(0, 1)
    log_prob, before = (gaussian_log_prob(x, m, std).view(B, W) for m in (mean, old))
    kl = gaussian_kl(mean.detach(), old, std).view(B, W)
    return mean, log_prob, before, kl, torch.tensor([1.3, -0.7, 0.4, -1.1], dtype=torch.float64)


def test_the_mask_equals_the_public_loss() -> None:
    """Value, masked share and gradient of UniRL's `_flowdppo_kl_adv_loss` on these tensors, threshold 1e-5."""
    mean, log_prob, old, kl, advantages = moved()
    loss, metrics = grpo_loss(log_prob, old, advantages, None, kl_exceeded=kl > 1e-5)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(0.09976597930269841, rel=1e-12)
    assert float(metrics["clip_fraction"]) == pytest.approx(8 / 12)
    public = [0, 0, 0.058003098999488245, 0, 0.06978692342244092, 0.031475854557763756, *[0] * 5, 0.04990688859314505]
    assert mean.grad is not None
    assert mean.grad.abs().sum(1).tolist() == pytest.approx(public, rel=1e-12)


def test_it_holds_only_steps_that_moved_with_their_advantage() -> None:
    """Ratios e^±.1, both advantages, all of them far: what undoes a move keeps its gradient -A r / n."""
    log_prob = torch.tensor([0.1, 0.1, -0.1, -0.1], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([2.0, -2.0, 2.0, -2.0], dtype=torch.float64)
    far = torch.ones(4, dtype=torch.bool)
    grpo_loss(log_prob, torch.zeros(4).double(), advantages, None, kl_exceeded=far)[0].backward()
    assert log_prob.grad is not None
    assert log_prob.grad.tolist() == pytest.approx([0, 2 * math.exp(0.1) / 4, -2 * math.exp(-0.1) / 4, 0])


def test_on_policy_it_is_grpo() -> None:
    """KL 0, ratio 1: the gradient is that of the clipped loss, whatever is far."""
    gradients = []
    for options in ({"clip_range": 1e-4}, {"clip_range": None, "kl_exceeded": torch.ones(B, W, dtype=torch.bool)}):
        mean, log_prob, *_, advantages = moved()
        grpo_loss(log_prob, log_prob.detach(), advantages, **options)[0].backward()  # type: ignore[arg-type]
        gradients.append(mean.grad)
    assert torch.equal(*gradients) and bool(gradients[0].abs().sum() > 0)


def test_a_ratio_that_overflows_is_masked_without_nan() -> None:
    log_prob = torch.tensor([1e4, 0.0], dtype=torch.float64, requires_grad=True)
    far = torch.tensor([True, False])
    loss, _ = grpo_loss(log_prob, torch.zeros(2).double(), torch.ones(2).double(), None, kl_exceeded=far)
    loss.backward()
    assert log_prob.grad is not None
    assert log_prob.grad.tolist() == [0.0, -0.5]


def test_clip_and_mask_are_alternatives() -> None:
    log_prob, far = torch.zeros(2), torch.zeros(2, dtype=torch.bool)
    for clip_range, given in ((1e-4, far), (None, None)):
        with pytest.raises(ValueError, match="give one"):
            grpo_loss(log_prob, log_prob, log_prob, clip_range, kl_exceeded=given)
    with pytest.raises(ValueError, match="kl_exceeded has shape"):
        grpo_loss(log_prob, log_prob, log_prob, None, kl_exceeded=far[:1])


# --- the step weight ---


def plan_of(rule: StepRule, strength: float) -> StepPlan:
    schedule: Schedule = EPSILON if rule is DDIM else FlowSchedule.make(10, 3.0)
    return StepPlan(schedule, rule, strength, 0, 9, 9)


def test_weights_by_hand() -> None:
    """sigma 1, .75, .5, 0 at shift 1 have stds .7 sqrt(s / (1 - s)) sqrt(-dt), the first with 1 - s of the second
    sigma; T 10 and shift 3 give the constant 2.25 of the public script to its rounding."""
    schedule = FlowSchedule(torch.tensor([1.0, 0.75, 0.5, 0.0]), 1.0)
    plan = StepPlan(schedule, FLOW_SDE, 0.7, 0, 2, 2)
    std = [0.7 * math.sqrt(4 * 0.25), 0.7 * math.sqrt(3 * 0.25), 0.7 * math.sqrt(1 * 0.5)]
    assert plan.relative_std(CPU).tolist() == pytest.approx([s / (sum(std[:2]) / 2) for s in std], rel=1e-6)
    published = plan_of(FLOW_SDE, 0.7)
    schedule = published.schedule
    level = schedule.level(schedule.times)
    _, std_of = FLOW_SDE.mean_std(torch.zeros(1, 1), torch.zeros(1, 1), level[3:4], level[4:5], 0.7, float(level[1]))
    assert float(published.relative_std(CPU)[3] / std_of) == pytest.approx(2.24, abs=0.005)


@pytest.mark.parametrize(("rule", "strength"), [(FLOW_SDE, 0.7), (CPS, 0.8), (DDIM, 1.0)])
def test_weights_have_mean_1_over_all_steps_but_the_last(rule: StepRule, strength: float) -> None:
    weights = plan_of(rule, strength).relative_std(CPU)
    assert float(weights[:-1].mean()) == pytest.approx(1, abs=1e-6)
    assert bool((weights > 0)[:-1].all())
