"""What the trainings of the tiny bases share."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from retouch.config.errors import ConfigError


def require_empty(out: Path) -> None:
    """Raises: ConfigError: an `out` that holds files."""
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"--out: {out} is not empty; choose another folder")


def set_rate(optimizer: torch.optim.Optimizer, peak: float, step: int, steps: int, ramp: int) -> None:
    """A linear ramp, then a cosine down to 2 % of the peak."""
    rate = peak * min(1.0, (step + 1) / ramp) * (0.5 * (1 + math.cos(math.pi * step / steps)) + 0.02)
    for group in optimizer.param_groups:
        group["lr"] = rate


def update(optimizer: torch.optim.Optimizer, loss: Tensor, parameters: Iterable[nn.Parameter]) -> None:
    """One step with gradients of norm 1 at most."""
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
