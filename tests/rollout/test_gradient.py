"""The end-to-end GRPO gradient of a ten-parameter model, against finite differences of the objective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from retouch.core.advantages import group_advantages
from retouch.core.objectives.grpo import gaussian_kl, grpo_loss
from retouch.core.rules import STEP_RULES
from retouch.core.schedule import FlowSchedule
from retouch.core.steps import gaussian_log_prob
from retouch.families.base import FamilySpec
from retouch.rollout.plan import StepPlan, transition
from retouch.rollout.sampler import sample
from retouch.types import Condition, Example


class TenParameters(nn.Module):
    """velocity = a mixing of two channels, a pull towards the condition, and a time term: 10 parameters."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.mix = nn.Parameter(0.3 * torch.randn(2, 2, generator=generator, dtype=torch.float64))
        self.pull = nn.Parameter(0.3 * torch.randn(2, generator=generator, dtype=torch.float64))
        self.time = nn.Parameter(0.3 * torch.randn(2, generator=generator, dtype=torch.float64))
        self.bend = nn.Parameter(0.3 * torch.randn(2, generator=generator, dtype=torch.float64))

    def forward(self, x: Tensor, t: Tensor, c: Tensor) -> Tensor:
        x = x.double()
        mixed = torch.einsum("oc,bchw->bohw", self.mix, x)
        shaped = [p[None, :, None, None] for p in (self.pull, self.time, self.bend)]
        return (
            mixed + shaped[0] * c[:, None, None, None] + shaped[1] * t[:, None, None, None] + shaped[2] * torch.tanh(x)
        )


class TenParameterModel:
    """Just enough of a family for rollout and replay."""

    spec = FamilySpec("ten", "flow", 2, 1, 1, 1.0, frozenset(), (), "network")

    def __init__(self) -> None:
        self.network: nn.Module = TenParameters()

    def predict(self, network: nn.Module, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        return network(x, t.double(), condition.tensors["c"])

    def encode(self, examples: Sequence[Example], guidance_scale: float) -> Condition:
        raise NotImplementedError


def test_gradient_equals_finite_differences() -> None:
    model: Any = TenParameterModel()
    plan = StepPlan(FlowSchedule.make(4, 2.0), STEP_RULES["flow_sde"], 0.7, 1, 2, 2)
    condition = Condition({"c": torch.tensor([0.5, 0.5, -1.0, -1.0], dtype=torch.float64)}, None, (3, 3))
    trajectory = sample(model, model.network, plan, condition, [1, 2, 3, 4])
    rewards = trajectory.final.mean(dim=(1, 2, 3))
    advantages = group_advantages(rewards, torch.tensor([0, 0, 1, 1]))
    weight = torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    # away from the sampling policy, so that ratio, clip and KL all act
    for p in model.network.parameters():
        p.data += 0.02
    reference = [m.detach() + 0.1 for m, _ in moments(model, plan, trajectory.latents, condition)]
    old = trajectory.log_probs

    def objective() -> Tensor:
        columns, kls = [], []
        for s, (mean, std) in enumerate(moments(model, plan, trajectory.latents, condition)):
            columns.append(gaussian_log_prob(trajectory.latents[:, s + 1], mean, std))
            kls.append(gaussian_kl(mean, reference[s], std))
        loss, _ = grpo_loss(torch.stack(columns, 1), old, advantages, 0.05, weight)
        return loss + 0.3 * ((torch.stack(kls, 1).mean(1) * weight).sum() / weight.sum())

    objective().backward()
    step = 1e-6
    checked = 0
    for parameter in model.network.parameters():
        analytic = parameter.grad.flatten()
        flat = parameter.data.view(-1)
        for i in range(len(flat)):
            value = float(flat[i])
            flat[i] = value + step
            up = float(objective().detach())
            flat[i] = value - step
            down = float(objective().detach())
            flat[i] = value
            assert abs((up - down) / (2 * step) - float(analytic[i])) < 1e-6 * max(1.0, float(analytic.abs().max()))
            checked += 1
    assert checked == 10


def moments(model: Any, plan: StepPlan, latents: Tensor, condition: Condition) -> list[tuple[Tensor, Tensor]]:
    rows = latents.shape[0]
    return [
        transition(model, model.network, plan, latents[:, s], torch.full((rows,), plan.first + s), condition)
        for s in range(plan.trained)
    ]
