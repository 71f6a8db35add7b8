"""Schedules: the sign conventions, inverses, and where training times come from."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from retouch.core.schedule import AlphaBarSchedule, FlowSchedule, Schedule, shift_sigma

BETAS = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
ALPHA_BARS = torch.cumprod(1 - BETAS, 0)


def flow() -> Schedule:
    return FlowSchedule.make(10, 3.0)


def epsilon() -> Schedule:
    return AlphaBarSchedule.make(ALPHA_BARS, 10)


def pair() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, 3, 2, 2, generator=generator).double(), torch.randn(4, 3, 2, 2, generator=generator).double()


def test_flow_convention() -> None:
    """sigma 1 is noise; x = (1 - sigma) x0 + sigma noise; v = noise - x0; x0 = x - sigma v."""
    x0, noise = pair()
    s = FlowSchedule.make(4)
    assert s.sigmas.tolist() == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert torch.equal(s.add_noise(x0, noise, torch.ones(4)), noise)
    assert torch.equal(s.add_noise(x0, noise, torch.zeros(4)), x0)
    assert torch.equal(s.target(x0, noise), noise - x0)


@pytest.mark.parametrize("make", [flow, epsilon])
def test_conversions_invert_add_noise(make: object) -> None:
    s: Schedule = make()  # type: ignore[operator]
    x0, noise = pair()
    time = s.times[[1, 3, 5, 8]]
    x = s.add_noise(x0, noise, time)
    prediction = s.target(x0, noise)
    torch.testing.assert_close(s.to_x0(x, prediction, time), x0, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(s.to_noise(x, prediction, time), noise, atol=1e-5, rtol=1e-5)


def test_shift_is_invertible_and_keeps_the_ends() -> None:
    sigma = torch.linspace(0, 1, 11, dtype=torch.float64)
    shifted = shift_sigma(sigma, 3.0)
    assert float(shifted[0]) == 0 and float(shifted[-1]) == 1
    torch.testing.assert_close(shift_sigma(shifted, 1 / 3.0), sigma)
    assert float(shift_sigma(0.5, 3.0)) == 0.75


def test_training_times_are_logit_normal_through_the_shift() -> None:
    """Quantiles: of a logit-normal(0, 1), sigmoid of the normal quantile; then the shift."""
    s = FlowSchedule.make(10, 3.0)
    uniform = torch.tensor([0.0227501, 0.5, 0.9772499], dtype=torch.float64)  # normal quantiles -2, 0, 2
    plain = [1 / (1 + math.exp(-z)) for z in (-2, 0, 2)]
    assert s.training_times(uniform, shifted=False).tolist() == pytest.approx(plain, abs=1e-5)
    shifted = [3 * p / (1 + 2 * p) for p in plain]
    assert s.training_times(uniform).tolist() == pytest.approx(shifted, abs=1e-5)


def test_epsilon_training_times_cover_the_training_timesteps() -> None:
    s = AlphaBarSchedule.make(ALPHA_BARS, 10)
    times = s.training_times(torch.tensor([0.0, 0.5, 0.9999999]))
    assert times.tolist() == [0.0, 500.0, 999.0]


def test_alpha_bar_levels() -> None:
    s = AlphaBarSchedule.make(ALPHA_BARS, 50)
    assert s.timesteps[:3].tolist() == [981.0, 961.0, 941.0] and s.timesteps[-2:].tolist() == [1.0, -1.0]
    assert float(s.level(s.timesteps)[-1]) == 1.0
    assert float(s.level(torch.tensor([981.0]))[0]) == pytest.approx(float(ALPHA_BARS[981]), rel=1e-6)


def test_bad_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 step"):
        FlowSchedule.make(0)
    with pytest.raises(ValueError, match="trained on 1000 timesteps"):
        AlphaBarSchedule.make(ALPHA_BARS, 1001)
