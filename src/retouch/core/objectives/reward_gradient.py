"""The gradient of a reward through single denoising steps: a loss that is linear in the prediction.

DRaFT-1 (arXiv 2309.17400), DRTune (2405.00760) and ReFL (2304.05977) stop the gradient at the network's inputs. What
is left of d reward / d weights is a sum over steps of c_k <d prediction_k / d weights, d reward / d x0>, where c_k
depends on the solver alone: no chain of steps is kept. Legend: B rows, T steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from retouch.core.reduce import (
    per_row,
    region_of_kept,
    require_same_shape,
    row_mean,
    row_weights,
    weighted_mean,
    working,
)
from retouch.core.schedule import Schedule
from retouch.core.steps import ode_step


def linear_loss(
    prediction: Tensor,
    gradient: Tensor,
    coefficient: Tensor | float,
    region: Tensor | None = None,
    weight: Tensor | None = None,
    normalizer: Tensor | float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """sum of coefficient * prediction * gradient over the elements. Its value has no meaning; its gradient is that of
    -reward by what the prediction of this step depends on.

    Args:
        prediction: [B, ...] velocity or noise, with gradient.
        gradient: [B, ...] -d reward / d x0, a constant.
        coefficient: scalar or [B], d x0 / d prediction: of `step_coefficients` or `estimate_coefficients`.
        region: [B, 1, H, W] weights of the elements; where it is 0, neither argument is read.
        weight: [B]; rows of weight 0 are inert whatever they hold.

    Returns:
        The loss, and `gradient_rms`, the root mean square of the gradient over the elements, averaged over rows of
        weight > 0.
    """
    require_same_shape(prediction=prediction, gradient=gradient)
    kept = row_weights(weight, prediction)
    region = region_of_kept(region, kept)
    everywhere = torch.ones_like(working(prediction[:, :1])) if region is None else region
    share = per_row(kept != 0, working(prediction), "weight") * everywhere.to(working(prediction).dtype)
    share = share.expand_as(prediction)
    # where the share is 0 both are zeroed first: 0 times NaN would be NaN, and so would its gradient
    v, g = (torch.where(share > 0, working(t), 0.0) for t in (prediction, gradient.detach()))
    rows = per_row(coefficient, v, "coefficient").flatten() * (share * v * g).flatten(1).sum(1)
    with torch.no_grad():
        rms = row_mean(g**2, region).sqrt()
        metrics = {"gradient_rms": weighted_mean(rms, (kept != 0).to(rms.dtype))}
    return weighted_mean(rows, weight, normalizer), metrics


def step_coefficients(schedule: Schedule) -> Tensor:
    """d x0 / d prediction of every first-order step, the inputs of all forwards held constant (DRTune) -> [T] fp64.

    Each later step multiplies its state by a factor: 1 in Euler's, where c_k = s' - s, and sqrt(ab' / ab) in DDIM's.
    """
    carried, added = _factors(schedule)
    later = torch.cat([carried[1:].flip(0).cumprod(0).flip(0), carried.new_ones(1)])
    return added * later


def estimate_coefficients(schedule: Schedule) -> Tensor:
    """d x0^ / d prediction of the data that every step's prediction implies (ReFL) -> [T] fp64; -s of a flow."""
    one = torch.ones(len(schedule.times) - 1, 1, dtype=torch.float64)
    return schedule.to_x0(torch.zeros_like(one), one, schedule.times[:-1])[:, 0]


def implied_data(schedule: Schedule, x: Tensor, x_next: Tensor, step: Tensor) -> Tensor:
    """x0^ [B, ...] that the predictions of first-order steps [B] implied, from the states before and after them."""
    carried, added = (per_row(factor.to(x.device)[step], working(x), "step") for factor in _factors(schedule))
    return schedule.to_x0(x, (x_next - carried * x) / added, schedule.times.to(x.device)[step])


def _factors(schedule: Schedule) -> tuple[Tensor, Tensor]:
    """Factors of the state and of the prediction in each first-order step -> ([T], [T]) fp64."""
    level = schedule.level(schedule.times).double()
    one = torch.ones(len(level) - 1, 1, dtype=torch.float64)
    zero, kind = torch.zeros_like(one), schedule.prediction
    carried, added = (ode_step(kind, x, v, level[:-1], level[1:])[:, 0] for x, v in ((one, zero), (zero, one)))
    return carried, added
