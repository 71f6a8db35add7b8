"""DiffusionNFT: reward-weighted positive and negative flow matching (arXiv 2509.16117). Legend: B rows."""

from __future__ import annotations

from typing import Literal

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

Mode = Literal["normal", "positive_only", "negative_only", "one_only", "binary"]
Decay = Literal["copy", "frozen", "ramp_half", "ramp_full"]

SMALLEST_SCALE = 1e-5
"""Smallest divisor of the self-normalisation: an error near 0 is not amplified without bound."""


def nft_loss(
    velocity: Tensor,
    old_velocity: Tensor,
    x_t: Tensor,
    x0: Tensor,
    sigma: Tensor | float,
    advantages: Tensor,
    mix: float,
    advantage_clip: float = 5.0,
    mode: Mode = "normal",
    region: Tensor | None = None,
    weight: Tensor | None = None,
    normalizer: Tensor | float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """With m = mix, c = advantage_clip and r = clamp(A / 2c + 1/2, 0, 1)::

        v+ = m v + (1 - m) v_old        v- = (1 + m) v_old - m v
        x0± = x_t - s v±        w± = stopgrad mean |x0± - x0|        L± = mean (x0± - x0)² / w±
        loss = mean c [r L+ + (1 - r) L-] / m

    At v = v_old the gradient of a row is A times that of flow matching, times s² / w: A > 0 moves towards the image and
    A < 0 away. The loss's *value* there does not depend on the rewards. Away from v_old a row of
    advantage 0 still has a gradient (it pulls back to v_old): only weight 0 makes a row inert. The KL term is
    added in `algorithms/nft/recipe.py`.

    Args:
        velocity: [B, ...] of the policy, with gradient; old_velocity of the policy that made the images.
        x_t: [B, ...] the image re-noised to `sigma` with fresh noise.
        x0: [B, ...] the image's own clean latents. Never the model's estimate: it would carry no reward.
        sigma: scalar or [B], > 0.
        advantages: [B].
        mode: which advantages train, see `effective_advantages`.
        region: [B, 1, H, W] weights; every mean is then over it alone.
        weight: [B]; rows of weight 0 are inert, with an empty region, too.

    Returns:
        The loss, and means over rows of weight > 0: `positive_error` and `negative_error`, mean (x0± - x0)²,
        `old_velocity_distance`, mean (v - v_old)², and `positive_share`, the mean of r.
    """
    require_same_shape(velocity=velocity, old_velocity=old_velocity, x_t=x_t, x0=x0)
    if not 0 < mix <= 1:
        raise ValueError(f"mix is {mix}; it must lie in (0, 1]")
    if advantages.shape != velocity.shape[:1]:
        raise ValueError(f"advantages have shape {tuple(advantages.shape)}; they must be [B] = [{velocity.shape[0]}]")
    kept = row_weights(weight, velocity)
    alive = per_row((kept != 0).float(), working(velocity), "weight") != 0
    # a row of weight 0 is zeroed before anything is computed: 0 times the gradient of NaN would be NaN
    v, v_old, x_t, x0 = (
        torch.where(alive, t, torch.zeros_like(t)) for t in map(working, (velocity, old_velocity, x_t, x0))
    )
    region = region_of_kept(region, kept)
    s = per_row(sigma, x_t, "sigma")
    a = torch.where(kept != 0, advantages, torch.zeros_like(advantages)).to(v.dtype)
    share = positive_share(effective_advantages(a, advantage_clip, mode), advantage_clip)
    positive = _error(x_t - s * (mix * v + (1 - mix) * v_old), x0, region)
    negative = _error(x_t - s * ((1 + mix) * v_old - mix * v), x0, region)
    rows = advantage_clip * (share * positive[0] + (1 - share) * negative[0]) / mix
    loss = weighted_mean(rows, weight, normalizer)
    with torch.no_grad():
        live = (kept != 0).to(rows.dtype)
        metrics = {
            "positive_error": weighted_mean(positive[1], live),
            "negative_error": weighted_mean(negative[1], live),
            "old_velocity_distance": weighted_mean(row_mean((v - v_old) ** 2, region), live),
            "positive_share": weighted_mean(share, live),
        }
    return loss, metrics


def effective_advantages(advantages: Tensor, clip: float, mode: Mode) -> Tensor:
    """Advantages [B] under a mode, within ±clip.

    normal: clipped. positive_only, negative_only: the other side is 0. one_only: 1 above 0, else 0. binary: the sign.
    """
    if mode == "normal":
        return advantages.clamp(-clip, clip)
    if mode == "positive_only":
        return advantages.clamp(0, clip)
    if mode == "negative_only":
        return advantages.clamp(-clip, 0)
    if mode == "one_only":
        return (advantages > 0).to(advantages.dtype)
    if mode == "binary":
        return advantages.sign()
    raise ValueError(f"mode is {mode!r}; it must be normal, positive_only, negative_only, one_only or binary")


def positive_share(advantages: Tensor, clip: float) -> Tensor:
    """r = clamp(A / 2c + 1/2, 0, 1): the probability that an image is a good one."""
    return (advantages / (2 * clip) + 0.5).clamp(0, 1)


def old_policy_decay(step: int, kind: Decay) -> float:
    """d of old <- d · old + (1 - d) · policy, after `step` optimizer steps.

    copy: 0, the policy of the epoch samples the next. frozen: 1. ramp_half: .001 step up to .5. ramp_full: 0 until step
    75, then .0075 (step - 75) up to .999, which nearly freezes it.
    """
    if kind == "copy":
        return 0.0
    if kind == "frozen":
        return 1.0
    if kind == "ramp_half":
        return min(0.001 * step, 0.5)
    if kind == "ramp_full":
        return min(max(0.0, 0.0075 * (step - 75)), 0.999)
    raise ValueError(f"kind is {kind!r}; it must be copy, frozen, ramp_half or ramp_full")


def _error(estimate: Tensor, x0: Tensor, region: Tensor | None) -> tuple[Tensor, Tensor]:
    """Squared error over a region, divided by the mean absolute one, and as it is -> ([B], [B])."""
    difference = within(estimate - x0, region)
    scale = row_mean(difference.detach().abs(), region).clamp(min=SMALLEST_SCALE)
    square = row_mean(difference**2, region)
    return square / scale, square.detach()
