"""The two computations that sampling and training share: one stochastic transition, one denoising error.

Both call `DiffusionModel.predict`, so that the policy has one forward. Legend: B rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from retouch.core.objectives.sft import denoising_rows
from retouch.core.schedule import Schedule
from retouch.core.steps import Estimate, dpm_step, ode_step
from retouch.rollout.plan import StepPlan
from retouch.types import Condition, DiffusionModel

if TYPE_CHECKING:
    from retouch.algorithms.base import Objective


def transition(
    model: DiffusionModel, network: nn.Module, plan: StepPlan, x: Tensor, step: Tensor, condition: Condition
) -> tuple[Tensor, Tensor]:
    """The Gaussian over the next state -> (mean [B, C, H, W], std [B]).

    Args:
        x: [B, C, H, W] fp32 states.
        step: [B] int64, the index of each row's step; rows may be at different steps.
    """
    if plan.rule is None:
        raise ValueError("a deterministic plan has no transition density")
    prediction, level, level_next = _predict(model, network, plan, x, step, condition)
    second = float(plan.schedule.level(plan.schedule.times[1:2])[0])
    return plan.rule.mean_std(x, prediction, level, level_next, plan.strength, second)


def deterministic(
    model: DiffusionModel,
    network: nn.Module,
    plan: StepPlan,
    x: Tensor,
    step: Tensor,
    condition: Condition,
    before: Estimate | None = None,
) -> tuple[Tensor, Estimate | None]:
    """The next state on the ODE -> ([B, C, H, W], what the plan's solver needs of this step in the next).

    Args:
        before: what the deterministic step before left; None after a stochastic one.
    """
    prediction, level, level_next = _predict(model, network, plan, x, step, condition)
    if plan.solver == "dpm2":
        return dpm_step(x, prediction, level, level_next, before)
    return ode_step(plan.schedule.prediction, x, prediction, level, level_next), None


def denoising_error(
    model: DiffusionModel,
    network: nn.Module,
    schedule: Schedule,
    x0: Tensor,
    noise: Tensor,
    time: Tensor,
    condition: Condition,
    region: Tensor | None = None,
) -> Tensor:
    """Mean-squared error of the prediction at a noised `x0` -> [B]."""
    prediction = model.predict(network, schedule.add_noise(x0, noise, time), time, condition)
    return denoising_rows(prediction, schedule.target(x0, noise), region)


def latent_region(mask: Tensor, downsampling: int, dilation: int = 0, seam_weight: float = 1.0) -> Tensor:
    """Pixel mask [B, 1, H, W] -> latent weights [B, 1, h, w]: 1 for a cell with any repainted pixel, `seam_weight` for
    cells within `dilation` cells of these (in both axes), 0 elsewhere."""
    inside = nn.functional.max_pool2d(mask, downsampling)
    if not dilation:
        return inside
    grown = nn.functional.max_pool2d(inside, 2 * dilation + 1, stride=1, padding=dilation)
    return inside + seam_weight * (grown - inside)


def objective_region(objective: Objective, condition: Condition, downsampling: int) -> Tensor | None:
    """Where the run file wants a loss to be taken: latent weights [B, 1, h, w], or None for everywhere."""
    if objective.region == "all" or condition.mask is None:
        return None
    return latent_region(condition.mask, downsampling, objective.region_dilation, objective.seam_weight)


def step_levels(plan: StepPlan, step: Tensor, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Times, noise levels and next noise levels [B] of steps [B]."""
    times = plan.schedule.times.to(device)
    now, then = times[step], times[step + 1]
    return now, plan.schedule.level(now), plan.schedule.level(then)


def _predict(
    model: DiffusionModel, network: nn.Module, plan: StepPlan, x: Tensor, step: Tensor, condition: Condition
) -> tuple[Tensor, Tensor, Tensor]:
    now, level, level_next = step_levels(plan, step, x.device)
    return model.predict(network, x, now, condition), level, level_next
