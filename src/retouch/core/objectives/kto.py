"""Kahneman-Tversky optimization of diffusion policies (Diffusion-KTO, arXiv 2404.04465, eq. 8). Legend: B samples."""

from __future__ import annotations

import torch
from torch import Tensor

from retouch.core.reduce import per_row, row_weights, weighted_mean, working


def kto_loss(
    error: Tensor,
    reference_error: Tensor,
    good: Tensor,
    beta: float,
    good_weight: float = 1.0,
    bad_weight: float = 1.0,
    baseline: Tensor | float | None = None,
    weight: Tensor | None = None,
    normalizer: Tensor | float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """With g = reference_error - error, y = 1 for a good sample and -1 for a bad one::

        loss = mean w_y (1 - sigmoid(y beta (g - z)))        z = max(mean g, 0)

    beta g is the implicit reward and z the reference point. A good sample is trained to be easier to denoise than under
    the reference, a bad one to be harder. Where g = z a row has the largest gradient, beta w_y / 4 times y times that
    of its error; it vanishes for large |g - z|. Errors are means over dims: published weights for sums over dims are
    smaller by the number of dims.

    Args:
        error: [B] or [B, W] denoising errors of the policy (W noised copies), with gradient; `reference_error` has its
            shape and no gradient, and was taken at the same times with the same noise.
        good: [B] bool.
        good_weight, bad_weight: w of good and of bad samples.
        baseline: z, without gradient; None computes it from these rows. A recipe passes that of all rows of a step:
            the gradient then does not depend on the micro-batches.
        weight: [B]; rows of weight 0 are inert.

    Returns:
        The loss, and means over rows of weight > 0: `label_accuracy` (share with y (g - z) > 0) and `label_margin`,
        the mean of y g.
    """
    if error.shape != reference_error.shape or error.ndim not in (1, 2) or good.shape != error.shape[:1]:
        raise ValueError(
            "the errors must share one shape [B] or [B, W], and good must be [B]; given "
            f"{tuple(error.shape)}, {tuple(reference_error.shape)} and {tuple(good.shape)}"
        )
    if good.dtype != torch.bool:
        raise ValueError(f"good has dtype {good.dtype}; it must be bool")
    error, reference_error = working(error), working(reference_error)
    alive = per_row((row_weights(weight, error) != 0).to(error.dtype), error, "weight") != 0
    gain = torch.where(alive, reference_error - error, 0.0)
    live = None if weight is None else (weight != 0).to(error.dtype)
    z = kto_baseline(weighted_mean(gain.detach(), live)) if baseline is None else baseline
    label = per_row(torch.where(good, 1.0, -1.0), gain, "good")
    share = per_row(torch.where(good, good_weight, bad_weight), gain, "good")
    loss = weighted_mean(share * torch.sigmoid(-label * beta * (gain - z)), weight, normalizer)
    with torch.no_grad():
        metrics = {
            "label_accuracy": weighted_mean((label * (gain - z) > 0).to(gain.dtype), live),
            "label_margin": weighted_mean(label * gain, live),
        }
    return loss, metrics


def kto_baseline(mean_gain: Tensor) -> Tensor:
    """z of `kto_loss` from the mean of g over the samples of a step, good and bad."""
    return mean_gain.detach().clamp(min=0)
