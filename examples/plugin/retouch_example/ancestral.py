"""A step rule: ancestral sampling of a flow model, as samplers of the k-diffusion family do it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from retouch.core.rules import StepRule

if TYPE_CHECKING:
    from torch import Tensor


def ancestral_step(x: Tensor, velocity: Tensor, sigma: Any, sigma_next: Any, eta: float) -> tuple[Tensor, Tensor]:
    """An Euler step to a lower noise level, then fresh noise up to `sigma_next`; eta = 0 is the Euler step.

    With s = sigma, s' = sigma_next: down = s' (1 + (s' / s - 1) eta), ratio = (1 - s') / (1 - down)::

        mean = ratio (x + v (down - s))        std = sqrt(s'² - (down ratio)²)

    Args:
        x: [B, C, h, w] state at `sigma`.
        velocity: [B, C, h, w] prediction of the model.
        sigma, sigma_next: [B], or scalars.

    Returns:
        mean [B, C, h, w], and std [B] (or a scalar), which includes the step size.
    """
    from retouch.core.reduce import per_row  # imports torch

    s, s_next = per_row(sigma, x, "sigma"), per_row(sigma_next, x, "sigma_next")
    down = s_next * (1 + (s_next / s - 1) * eta)
    ratio = (1 - s_next) / (1 - down)
    std = (s_next**2 - (down * ratio) ** 2).clamp(min=0).sqrt()
    return ratio * (x + velocity * (down - s)), std.flatten() if std.ndim else std


ANCESTRAL = StepRule(
    prediction="flow",
    strength="eta",
    default=1.0,
    step="retouch_example.ancestral:ancestral_step",
    is_share=True,
    ends_without_noise=True,
)
