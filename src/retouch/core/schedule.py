"""Noise schedules: what a time means, and how data, noise and prediction relate at that time.

Two families. *Flow* models (FLUX, Qwen-Image) predict a velocity; their time is sigma in [0, 1], 1 is noise::

    x = (1 - sigma) x0 + sigma noise        v = noise - x0        x0 = x - sigma v        noise = x + (1 - sigma) v

*Epsilon* models (SD1.5) predict the noise; their time is an integer timestep t with cumulative product alpha_bar::

    x = sqrt(alpha_bar) x0 + sqrt(1 - alpha_bar) noise

Recipes and step rules use only the methods below: one code path serves both. Legend: B rows, T steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from retouch.core.reduce import per_row, require_same_shape, working

Prediction = Literal["flow", "epsilon"]


class Schedule(Protocol):
    """The times of one sampling run, and the conversions of its family."""

    prediction: ClassVar[Prediction]

    @property
    def times(self) -> Tensor:
        """[T + 1] fp32: the time of each state, first noise, last data; what `predict` takes as `t`."""
        ...

    def level(self, time: Tensor) -> Tensor:
        """Noise level that step rules take: sigma (flow) or alpha_bar (epsilon), same shape as `time`."""
        ...

    def sigma(self, time: Tensor) -> Tensor:
        """The flow time in [0, 1] that a time is or implies, same shape as `time`."""
        ...

    def add_noise(self, x0: Tensor, noise: Tensor, time: Tensor) -> Tensor: ...
    def target(self, x0: Tensor, noise: Tensor) -> Tensor: ...
    def to_x0(self, x: Tensor, prediction: Tensor, time: Tensor) -> Tensor: ...
    def as_flow(self, x: Tensor, prediction: Tensor, time: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """State, prediction and time as those of a flow model -> (x, velocity, sigma [B])."""
        ...

    def velocity_gain(self, time: Tensor) -> Tensor:
        """[B] what an error of the prediction is multiplied by in the velocity of `as_flow`."""
        ...

    def training_times(self, uniform: Tensor, *, shifted: bool = True, visited: bool = False) -> Tensor:
        """[B] uniform numbers in (0, 1) -> [B] times to train at.

        Args:
            shifted: through the shift of sampling.
            visited: none noisier than where sampling starts.
        """
        ...


def shift_sigma(sigma: Tensor | float, shift: float) -> Tensor:
    """shift sigma / (1 + (shift - 1) sigma): more of the steps at high noise (SD3, arXiv 2403.03206, eq. 23)."""
    s = sigma if isinstance(sigma, Tensor) else torch.tensor(sigma, dtype=torch.float32)
    return shift * s / (1 + (shift - 1) * s)


def flux_shift(
    image_tokens: int,
    base_tokens: int = 256,
    max_tokens: int = 4096,
    base_mu: float = 0.5,
    max_mu: float = 1.15,
) -> float:
    """The shift e^mu of FLUX for an image of `image_tokens` packed tokens; mu is linear in the tokens.

    1.88 at 512 x 512 (1,024 tokens), 3.16 at 1024 x 1024 (4,096 tokens).
    """
    slope = (max_mu - base_mu) / (max_tokens - base_tokens)
    return math.exp(base_mu + slope * (image_tokens - base_tokens))


@dataclass(frozen=True)
class FlowSchedule:
    """T Euler steps of a flow model: sigmas 1, ..., 1/T (or to another last one), shifted, then 0.

    Attributes:
        terminal: what the last sigma before 0 is stretched to (Qwen-Image: 0.02); None leaves it.
    """

    prediction: ClassVar[Prediction] = "flow"

    times: Tensor
    shift: float
    terminal: float | None = None

    @classmethod
    def make(
        cls, num_steps: int, shift: float = 1.0, terminal: float | None = None, last: float | None = None
    ) -> FlowSchedule:
        """T steps.

        Args:
            last: smallest sigma before the shift; None is 1/T.

        Raises:
            ValueError: no step.
        """
        if num_steps < 1:
            raise ValueError(f"num_steps is {num_steps}; a schedule needs at least 1 step")
        raw = torch.linspace(1, 1 / num_steps if last is None else last, num_steps, dtype=torch.float64)
        sigmas = shift_sigma(raw, shift)
        if terminal and num_steps > 1:
            sigmas = 1 - (1 - sigmas) * (1 - terminal) / (1 - sigmas[-1])
        return cls(torch.cat([sigmas, sigmas.new_zeros(1)]).float(), shift, terminal)

    def level(self, time: Tensor) -> Tensor:
        return time

    sigma = level  # a flow's time is both

    def add_noise(self, x0: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        require_same_shape(x0=x0, noise=noise)
        sigma = per_row(time, working(x0), "time")
        return (1 - sigma) * x0 + sigma * noise

    def target(self, x0: Tensor, noise: Tensor) -> Tensor:
        require_same_shape(x0=x0, noise=noise)
        return noise - x0

    def to_x0(self, x: Tensor, prediction: Tensor, time: Tensor) -> Tensor:
        require_same_shape(x=x, prediction=prediction)
        return x - per_row(time, working(x), "time") * prediction

    def as_flow(self, x: Tensor, prediction: Tensor, time: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        require_same_shape(x=x, prediction=prediction)
        return x, prediction, time

    def velocity_gain(self, time: Tensor) -> Tensor:
        return torch.ones_like(time)

    def training_times(self, uniform: Tensor, *, shifted: bool = True, visited: bool = False) -> Tensor:
        """Logit-normal(0, 1) sigmas, by default through the shift of sampling (SD3, section 3.1). Sampling starts at 1
        and visits all of them."""
        sigma = torch.sigmoid(torch.erfinv(2 * uniform.double() - 1) * math.sqrt(2)).float()
        return shift_sigma(sigma, self.shift) if shifted else sigma


@dataclass(frozen=True)
class AlphaBarSchedule:
    """T DDIM steps of an epsilon model with `alpha_bars` [N] over its N training timesteps.

    `times` [T + 1] are the timesteps of the sampling run (not 0 .. N - 1), first the noisiest; the last entry is -1,
    the clean image, whose alpha_bar is `final_alpha_bar`.
    """

    prediction: ClassVar[Prediction] = "epsilon"

    alpha_bars: Tensor
    times: Tensor
    final_alpha_bar: float = 1.0
    _tables: dict[torch.device, Tensor] = field(
        default_factory=dict[torch.device, Tensor], init=False, repr=False, compare=False
    )

    @classmethod
    def make(
        cls, alpha_bars: Tensor, num_steps: int, steps_offset: int = 1, final_alpha_bar: float = 1.0
    ) -> AlphaBarSchedule:
        """The "leading" spacing of diffusers' DDIMScheduler: every (N // T)-th timestep plus `steps_offset`."""
        n = alpha_bars.shape[0]
        if not 1 <= num_steps <= n:
            raise ValueError(f"num_steps is {num_steps}; this model was trained on {n} timesteps")
        steps = torch.arange(num_steps - 1, -1, -1, dtype=torch.int64) * (n // num_steps) + steps_offset
        if int(steps.max()) >= n:
            raise ValueError(f"steps_offset {steps_offset} moves the first timestep past {n - 1}")
        return cls(alpha_bars.double(), torch.cat([steps, steps.new_tensor([-1])]).float(), final_alpha_bar)

    def level(self, time: Tensor) -> Tensor:
        if time.device not in self._tables:  # copied there once: the CPU waits for a copy
            table = torch.cat([self.alpha_bars, self.alpha_bars.new_tensor([self.final_alpha_bar])])
            self._tables[time.device] = table.to(time.device)
        return self._tables[time.device][time.long()].float()  # -1 indexes the clean image

    def sigma(self, time: Tensor) -> Tensor:
        """b / (a + b) with a = sqrt(ab), b = sqrt(1 - ab): the share of noise in x / (a + b)."""
        ab = self.level(time)
        return (1 - ab).sqrt() / (ab.sqrt() + (1 - ab).sqrt())

    def add_noise(self, x0: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        require_same_shape(x0=x0, noise=noise)
        ab = per_row(self.level(time), working(x0), "time")
        return ab.sqrt() * x0 + (1 - ab).sqrt() * noise

    def target(self, x0: Tensor, noise: Tensor) -> Tensor:
        require_same_shape(x0=x0, noise=noise)
        return noise

    def to_x0(self, x: Tensor, prediction: Tensor, time: Tensor) -> Tensor:
        require_same_shape(x=x, prediction=prediction)
        ab = per_row(self.level(time), working(x), "time")
        return (x - (1 - ab).sqrt() * prediction) / ab.sqrt()

    def as_flow(self, x: Tensor, prediction: Tensor, time: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The velocity that a noise prediction implies, with a = sqrt(ab) and b = sqrt(1 - ab)::

            x_sigma = x / (a + b)        v = eps - x0^ = eps - (x - b eps) / a

        Exact: the same data and noise, mixed with weights that add up to 1. Errors of eps are multiplied by (a + b) / a
        in v: about 15 at SD1.5's noisiest timestep, 1 at its cleanest.
        """
        require_same_shape(x=x, prediction=prediction)
        ab = per_row(self.level(time), working(x), "time")
        return x / (ab.sqrt() + (1 - ab).sqrt()), prediction - self.to_x0(x, prediction, time), self.sigma(time)

    def velocity_gain(self, time: Tensor) -> Tensor:
        """(a + b) / a."""
        ab = self.level(time)
        return 1 + ((1 - ab) / ab).sqrt()

    def training_times(self, uniform: Tensor, *, shifted: bool = True, visited: bool = False) -> Tensor:
        """Uniform integer timesteps 0 .. N - 1, or 0 .. the first of sampling (751 of SD1.5 in 4 steps); an epsilon
        schedule has no shift to go through."""
        n = int(self.times[0]) + 1 if visited else self.alpha_bars.shape[0]
        return (uniform.double() * n).floor().clamp(max=n - 1).float()
