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
        sigma, sigma_next: [B, 1, 1, 1] or scalars.

    Returns:
        (mean [B, C, h, w], std broadcastable to it), which includes the step size.
    """
    down = sigma_next * (1 + (sigma_next / sigma - 1) * eta)
    ratio = (1 - sigma_next) / (1 - down)
    return ratio * (x + velocity * (down - sigma)), (sigma_next**2 - (down * ratio) ** 2).clamp(min=0).sqrt()


ANCESTRAL = StepRule(
    prediction="flow",
    strength="eta",
    default=1.0,
    step="retouch_example.ancestral:ancestral_step",
    is_share=True,
    ends_without_noise=True,
)
