"""Direct preference optimisation of diffusion policies (Diffusion-DPO, arXiv 2311.12908, eq. 14). Legend: B pairs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from retouch.core.reduce import per_row, row_weights, weighted_mean, working


def dpo_loss(
    error_win: Tensor,
    error_lose: Tensor,
    reference_error_win: Tensor,
    reference_error_lose: Tensor,
    beta: float,
    weight: Tensor | None = None,
    normalizer: Tensor | float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """mean -log sigmoid(-beta / 2 [(e_w - e_w,ref) - (e_l - e_l,ref)]).

    All four errors are taken at one time and with one noise; then the loss of a policy that equals its reference is
    ln 2, exactly. Errors are means over dims: published weights for sums over dims are smaller by the number of dims.

    Args:
        error_win: [B] or [B, W] denoising errors of the preferred image (W noised copies), with gradient; the other
            errors have its shape, the reference's no gradient.
        weight: [B]; rows of weight 0 are inert.

    Returns:
        The loss, and means over rows of weight > 0: `logit` (the argument of the sigmoid), `preference_accuracy` (share
        of pairs with a positive one), `win_error_change` and `lose_error_change` against the reference. Both may rise
        together: the loss only asks that the second rises more.
    """
    shapes = {tuple(e.shape) for e in (error_win, error_lose, reference_error_win, reference_error_lose)}
    if len(shapes) != 1 or error_win.ndim not in (1, 2):
        raise ValueError(f"the four errors must share one shape [B] or [B, W]; given {sorted(shapes)}")
    error_win, error_lose, reference_error_win, reference_error_lose = (
        working(e) for e in (error_win, error_lose, reference_error_win, reference_error_lose)
    )
    alive = per_row((row_weights(weight, error_win) != 0).to(error_win.dtype), error_win, "weight") != 0
    win = torch.where(alive, error_win - reference_error_win, 0.0)
    lose = torch.where(alive, error_lose - reference_error_lose, 0.0)
    logit = -beta / 2 * (win - lose)
    loss = weighted_mean(-nn.functional.logsigmoid(logit), weight, normalizer)
    with torch.no_grad():
        live = None if weight is None else (weight != 0).to(logit.dtype)
        metrics = {
            "logit": weighted_mean(logit, live),
            "preference_accuracy": weighted_mean((logit > 0).to(logit.dtype), live),
            "win_error_change": weighted_mean(win, live),
            "lose_error_change": weighted_mean(lose, live),
        }
    return loss, metrics
