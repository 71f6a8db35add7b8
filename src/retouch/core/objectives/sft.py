"""Supervised fine-tuning: the denoising losses (flow matching, arXiv 2210.02747; DDPM, 2006.11239)."""

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
    within,
    working,
)


def flow_matching_loss(
    prediction: Tensor,
    x0: Tensor,
    noise: Tensor,
    region: Tensor | None = None,
    weight: Tensor | None = None,
    normalizer: Tensor | float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """mean |prediction - (noise - x0)|²: the velocity of a flow model against that of its own sample.

    Args:
        prediction: [B, ...] velocity, with gradient; x0 and noise have its shape.
        region: weights over the elements ([B, 1, H, W]); only they count.
        weight: [B]; rows of weight 0 are inert whatever they hold, with an empty region, too.

    Returns:
        The loss and `error`, the mean over rows of weight > 0.
    """
    require_same_shape(prediction=prediction, x0=x0, noise=noise)
    prediction, target = working(prediction), working(noise) - working(x0)
    kept = row_weights(weight, prediction)
    alive = per_row((kept != 0).float(), prediction, "weight") != 0
    prediction, target = (torch.where(alive, t, torch.zeros_like(t)) for t in (prediction, target))
    return denoising_loss(denoising_rows(prediction, target, region_of_kept(region, kept)), weight, normalizer)


def denoising_rows(prediction: Tensor, target: Tensor, region: Tensor | None = None) -> Tensor:
    """Mean-squared error of a prediction (velocity or noise) to its target, over the dims or the region -> [B]."""
    require_same_shape(prediction=prediction, target=target)
    return row_mean(within(working(prediction) - working(target), region) ** 2, region)


def denoising_loss(
    errors: Tensor, weight: Tensor | None = None, normalizer: Tensor | float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The SFT loss of per-row errors [B], and `error`, their mean over rows of weight > 0."""
    live = None if weight is None else (weight != 0).to(errors.dtype)
    with torch.no_grad():
        error = weighted_mean(errors.detach(), live)
    return weighted_mean(errors, weight, normalizer), {"error": error}
