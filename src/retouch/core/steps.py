"""Solver steps: from the state at one noise level to a Gaussian over the next, and that Gaussian's log-density.

Each rule is a pure function -> (mean, std). `std` always includes the step size; 0 means the step is deterministic.
Levels are scalars or [B]; `x` is [B, ...] with at least two dims; arithmetic is fp32 (fp64 stays). Notation: s = sigma,
s' = sigma_next, dt = s' - s < 0, x0^ and e^ the data and noise that the prediction implies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from retouch.core.reduce import may_ask, per_row, require_known, require_same_shape, row_mean, within, working
from retouch.core.schedule import Prediction

Level = Tensor | float
LogProbMode = Literal["exact", "published", "cps"]


def flow_sde(
    x: Tensor, velocity: Tensor, sigma: Level, sigma_next: Level, noise_level: float, sigma_max: float
) -> tuple[Tensor, Tensor]:
    """The reverse SDE of Flow-GRPO (arXiv 2505.05470, eq. 9), a = noise_level sqrt(s / (1 - s))::

        mean = x (1 + a² dt / 2s) + v (1 + a² (1 - s) / 2s) dt        std = a sqrt(-dt)

    Args:
        sigma_max: stands for s in 1 / (1 - s) where s is 1 (pure noise), else a is infinite. The second sigma of the
            schedule makes the std of the first step exactly `noise_level`.
    """
    x, v, s, s_next = _levels(x, velocity, sigma, sigma_next)
    dt = s_next - s
    a_squared = noise_level**2 * s / (1 - torch.where(s == 1, per_row(sigma_max, x, "sigma_max"), s))
    mean = x * (1 + a_squared * dt / (2 * s)) + v * (1 + a_squared * (1 - s) / (2 * s)) * dt
    return mean, _flat(a_squared.sqrt() * (-dt).sqrt())


def dance_sde(x: Tensor, velocity: Tensor, sigma: Level, sigma_next: Level, eta: float) -> tuple[Tensor, Tensor]:
    """The SDE of DanceGRPO (arXiv 2505.07818): constant diffusion `eta`, score from the predicted data::

    score = -(x - (1 - s) x0^) / s²        mean = x + v dt - eta² score dt / 2        std = eta sqrt(-dt)
    """
    x, v, s, s_next = _levels(x, velocity, sigma, sigma_next)
    dt = s_next - s
    score = -(x - (1 - s) * (x - s * v)) / s**2
    return x + v * dt - 0.5 * eta**2 * score * dt, _flat(eta * (-dt).sqrt())


def cps(x: Tensor, velocity: Tensor, sigma: Level, sigma_next: Level, noise_level: float) -> tuple[Tensor, Tensor]:
    """Coefficients-preserving sampling (arXiv 2509.05952): re-noise to s' with part of the noise fresh::

    std = s' sin(noise_level pi / 2)        mean = (1 - s') x0^ + sqrt(s'² - std²) e^
    """
    x, v, s, s_next = _levels(x, velocity, sigma, sigma_next)
    std = s_next * math.sin(noise_level * math.pi / 2)
    mean = (1 - s_next) * (x - s * v) + (s_next**2 - std**2).clamp(min=0).sqrt() * (x + (1 - s) * v)
    return mean, _flat(std)


def ddim(x: Tensor, epsilon: Tensor, alpha_bar: Level, alpha_bar_next: Level, eta: float) -> tuple[Tensor, Tensor]:
    """DDIM (arXiv 2010.02502, eq. 12 and 16), the stochastic step of DDPO (2305.13301); ab, ab' = alpha_bar, _next::

    std = eta sqrt((1 - ab') / (1 - ab) · (1 - ab / ab'))        mean = sqrt(ab') x0^ + sqrt(1 - ab' - std²) eps
    """
    x, eps, ab, ab_next = _levels(x, epsilon, alpha_bar, alpha_bar_next)
    std = eta * ((1 - ab_next) / (1 - ab) * (1 - ab / ab_next)).clamp(min=0).sqrt()
    x0 = (x - (1 - ab).sqrt() * eps) / ab.sqrt()
    return ab_next.sqrt() * x0 + (1 - ab_next - std**2).clamp(min=0).sqrt() * eps, _flat(std)


def gaussian_log_prob(
    x_next: Tensor,
    mean: Tensor,
    std: Level,
    region: Tensor | None = None,
    mode: LogProbMode = "exact",
) -> Tensor:
    """log N(x_next; mean, std² I), **averaged** over the non-batch dims or over `region` -> [B].

    The mean, not the sum, keeps clip ranges and KL weights independent of the image size (Flow-GRPO). Computed in fp32.

    Args:
        region: [B, 1, H, W] non-negative weights beside [B, C, H, W]; elements outside do not count.
        mode: "published"; or "cps", -mean (x_next - mean)² as in the CPS code: no density, but the published clip
            ranges of CPS are for it.

    A std of 0 is that of a deterministic step, which has no density and must not be trained. On the CPU it is an error;
    on another device, where a check would wait for all queued work, an exact log-probability is NaN instead. Plans
    reject such steps beforehand (`retouch.rollout.StepPlan`).

    Raises:
        ValueError: tensors of different shapes, an unknown mode, or on the CPU a std of 0.
    """
    require_known(mode, LogProbMode, "mode")
    require_same_shape(x_next=x_next, mean=mean)
    x_next, mean = working(x_next), working(mean)
    s = per_row(std, mean, "std")
    if may_ask(s) and bool((s <= 0).any()):
        raise ValueError("std is 0: a deterministic step has no log-probability and cannot be trained")
    square = within(x_next - mean, region) ** 2
    if mode != "exact":
        return -row_mean(square, region)
    return row_mean(-square / (2 * s**2) - s.log() - 0.5 * math.log(2 * math.pi), region)


def ode_step(prediction: Prediction, x: Tensor, output: Tensor, level: Level, level_next: Level) -> Tensor:
    """The first-order deterministic step of a family: Euler, x + v dt (flow), or DDIM with eta 0 (epsilon)."""
    if prediction == "flow":
        x, v, s, s_next = _levels(x, output, level, level_next)
        return x + (s_next - s) * v
    return ddim(x, output, level, level_next, eta=0.0)[0]


@dataclass(frozen=True)
class Estimate:
    """Result of a deterministic step that the next one reads.

    Attributes:
        x0: [B, ...] the data that its prediction implied.
        sigma: the noise level that it started from.
    """

    x0: Tensor
    sigma: Level


def dpm_step(
    x: Tensor, velocity: Tensor, sigma: Level, sigma_next: Level, before: Estimate | None = None
) -> tuple[Tensor, Estimate]:
    """DPM-Solver++(2M) (arXiv 2211.01095, algorithm 2) of a flow: the ODE by the predicted data and their change since
    the step before, with l = log((1 - s) / s)::

        x' = s'/s x + (1 - s'/s) D        D = x0^ + (x0^ - x0^_before) (l' - l) / 2 (l - l_before)

    D is x0^, and the step Euler's: without a step before, from pure noise and in the step after that, to clean data,
    and where the step of l is more than twice the one before, which is not in the paper. That is the step down to a
    last sigma stretched to almost 0 (Qwen-Image: .02). The data have all but settled there; extrapolating their change
    over so long a step ends further off than Euler.

    Args:
        before: of the step that led to x.
    """
    x, v, s, s_next = _levels(x, velocity, sigma, sigma_next)
    x0 = x - s * v
    data = x0
    if before is not None:
        log_snr, then, past = (((1 - u) / u).log() for u in (s, s_next, per_row(before.sigma, x, "sigma")))
        weight = (then - log_snr) / (2 * (log_snr - past))
        data = x0 + torch.where(weight.isfinite() & (weight <= 1), weight, 0.0) * (x0 - before.x0)
    return s_next / s * x + (1 - s_next / s) * data, Estimate(x0, sigma)


def _levels(x: Tensor, output: Tensor, level: Level, level_next: Level) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    require_same_shape(x=x, prediction=output)
    x, output = working(x), working(output)
    return x, output, per_row(level, x, "level"), per_row(level_next, x, "level_next")


def _flat(std: Tensor) -> Tensor:
    """[B, 1, ...] -> [B]; a scalar stays a scalar."""
    return std.flatten() if std.ndim else std
