"""GRPO for diffusion policies: the clipped surrogate over denoising steps (Flow-GRPO, arXiv 2505.05470, eq. 5).

PPO is the same loss on advantages of the whole batch. Legend: B rows, W trained steps of a row.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from retouch.core.reduce import (
    per_row,
    require_known,
    require_same_shape,
    row_mean,
    row_weights,
    weighted_mean,
    within,
    working,
)

KlMode = Literal["exact", "published", "flow_grpo"]


def grpo_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    clip_range: float | None,
    weight: Tensor | None = None,
    normalizer: Tensor | float | None = None,
    step_weight: Tensor | None = None,
    kl_exceeded: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """mean max(-A r, -A clip(r, 1 - c, 1 + c)), r = exp(log_prob - old_log_prob).

    With `kl_exceeded` there is no clip, but Flow-DPPO's mask (arXiv 2606.11025): the mean of -A r, without the steps
    where the policy is far from the old one and r has already moved in the direction of A. With mean-reduced
    log-probabilities ratios stay within about 1e-3 of 1, and `clip_range` is 1e-5 .. 1e-3; the 0.2 of language models
    would never clip.

    Args:
        log_prob: [B] or [B, W], with gradient.
        old_log_prob: same shape, what the sampler recorded.
        advantages: [B].
        weight: [B]; rows of weight 0 are inert.
        clip_range: c; None with `kl_exceeded`.
        step_weight: same shape as log_prob; what each step's surrogate is multiplied by (see `guard_log_probs`).
        kl_exceeded: bool, same shape as log_prob: the KL of the old policy's step to the policy's is over a limit.

    Returns:
        The loss, and metrics: means over the rows of weight > 0 and their steps (`ratio`; `clip_fraction`, the share
        that is clipped or masked; `approx_kl`, the k3 estimator), and the maximum `max_abs_log_ratio`.
    """
    if log_prob.shape != old_log_prob.shape or log_prob.ndim not in (1, 2):
        raise ValueError(
            f"log_prob {tuple(log_prob.shape)} and old_log_prob {tuple(old_log_prob.shape)} must both be [B] or [B, W]"
        )
    if advantages.shape != log_prob.shape[:1]:
        raise ValueError(f"advantages have shape {tuple(advantages.shape)}; they must be [B] = [{log_prob.shape[0]}]")
    for name, given in (("step_weight", step_weight), ("kl_exceeded", kl_exceeded)):
        if given is not None and given.shape != log_prob.shape:
            raise ValueError(
                f"{name} has shape {tuple(given.shape)}; it must be that of log_prob, {tuple(log_prob.shape)}"
            )
    if (clip_range is None) == (kl_exceeded is None):
        raise ValueError(
            f"clip_range is {clip_range} and kl_exceeded is {'not ' if kl_exceeded is not None else ''}None; give one"
        )
    log_prob, old_log_prob, advantages = working(log_prob), working(old_log_prob), working(advantages)
    kept = row_weights(weight, log_prob)
    a = torch.where(kept != 0, advantages, torch.zeros_like(advantages))
    a, alive = (a, kept != 0) if log_prob.ndim == 1 else (a[:, None], (kept != 0)[:, None])
    log_ratio = torch.where(alive, log_prob - old_log_prob, 0.0)
    ratio = log_ratio.exp()
    if kl_exceeded is not None:
        clipped = kl_exceeded & (a * log_ratio > 0)
        # a ratio may overflow, and inf times 0 is NaN in a backward
        rows = torch.where(clipped, 0.0, -a * log_ratio.masked_fill(clipped, 0.0).exp())
    else:
        assert clip_range is not None
        rows = torch.maximum(-a * ratio, -a * ratio.clamp(1 - clip_range, 1 + clip_range))
        clipped = ((ratio < 1 - clip_range) & (a < 0)) | ((ratio > 1 + clip_range) & (a > 0))
    rows = rows if step_weight is None else rows * step_weight
    loss = weighted_mean(rows, weight, normalizer)
    with torch.no_grad():
        live = (kept != 0).to(ratio.dtype)
        flat = log_ratio.abs() if log_ratio.ndim == 1 else log_ratio.abs().amax(1)
        metrics = {
            "ratio": weighted_mean(ratio, live),
            "clip_fraction": weighted_mean(clipped.to(ratio.dtype), live),
            "approx_kl": weighted_mean(ratio - 1 - log_ratio, live),
            "max_abs_log_ratio": torch.cat([flat * live, live.new_zeros(1)]).max(),  # 0 of no rows
        }
    return loss, metrics


def guard_log_probs(
    log_prob: Tensor,
    old_log_prob: Tensor,
    mean: Tensor,
    old_mean: Tensor,
    std: Tensor | float,
    region: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """GRPO-Guard's regulated log-probabilities (arXiv 2510.22319) -> ([B], [B]), to be given to `grpo_loss`.

    The ratio becomes exp((log_prob - old_log_prob + b) q) with q = std and b = mean |mean - old_mean|² / (2 q²): the
    expected log-ratio of a policy that moved is -b, which pushes ratios below 1 and lets the clip miss them; q makes
    the spread equal at every noise level. b belongs to each row (public code averages it over the batch). The paper
    also divides each step's loss by -dt: pass -1 / dt as `step_weight`.

    Args:
        log_prob: [B] means over dims, with gradient; mean [B, ...] with gradient. The correction is differentiated.
        std: with the step size in it, scalar or [B].
    """
    require_same_shape(mean=mean, old_mean=old_mean)
    if log_prob.shape != mean.shape[:1] or old_log_prob.shape != log_prob.shape:
        raise ValueError(
            f"log_prob {tuple(log_prob.shape)} and old_log_prob {tuple(old_log_prob.shape)} must both be [B] = "
            f"[{len(mean)}]"
        )
    mean, old_mean = working(mean), working(old_mean)
    q = per_row(std, mean, "std")
    correction = row_mean(within(mean - old_mean, region) ** 2 / (2 * q**2), region)
    q = q.flatten() if q.ndim else q
    return (log_prob + correction) * q, old_log_prob * q


def gaussian_kl(
    mean: Tensor,
    reference_mean: Tensor,
    std: Tensor | float,
    region: Tensor | None = None,
    mode: KlMode = "exact",
    dt: Tensor | float | None = None,
) -> Tensor:
    """KL of two Gaussians of one std, averaged over the dims: mean (mean - reference_mean)² / (2 std²) -> [B].

    Args:
        std: with the step size in it, scalar or [B].
        mode: "published", or "flow_grpo", is Flow-GRPO's, which leaves the step out of the std: exactly -dt times the
            exact one. Its published weights (.04, .01) are for that mode.
        dt: sigma_next - sigma < 0, scalar or [B]; needed by "published".
    """
    require_known(mode, KlMode, "mode")
    require_same_shape(mean=mean, reference_mean=reference_mean)
    mean, reference_mean = working(mean), working(reference_mean)
    kl = row_mean(within(mean - reference_mean, region) ** 2 / (2 * per_row(std, mean, "std") ** 2), region)
    if mode == "exact":
        return kl
    if dt is None:
        raise ValueError('gaussian_kl(mode="published") needs dt = sigma_next - sigma')
    return kl * -per_row(dt, kl, "dt")
