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
    assert s.times.tolist() == [1.0, 0.75, 0.5, 0.25, 0.0]
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


def test_visited_times_are_no_noisier_than_the_first_of_sampling() -> None:
    uniform = torch.tensor([1e-6, 0.5, 1 - 1e-6])
    s = AlphaBarSchedule.make(ALPHA_BARS, 4)
    assert float(s.times[0]) == 751.0
    assert s.training_times(uniform, visited=True).tolist() == [0.0, 376.0, 751.0]
    assert torch.equal(flow().training_times(uniform, visited=True), flow().training_times(uniform))


def test_alpha_bar_levels() -> None:
    s = AlphaBarSchedule.make(ALPHA_BARS, 50)
    assert s.times[:3].tolist() == [981.0, 961.0, 941.0] and s.times[-2:].tolist() == [1.0, -1.0]
    assert float(s.level(s.times)[-1]) == 1.0
    assert float(s.level(torch.tensor([981.0]))[0]) == pytest.approx(float(ALPHA_BARS[981]), rel=1e-6)


# --- as a flow ---


def test_a_flow_model_is_one_already() -> None:
    s, (x, v) = FlowSchedule.make(10, 3.0), pair()
    time = s.times[[0, 1, 5, 9]]
    state, velocity, sigma = s.as_flow(x, v, time)
    assert state is x and velocity is v and torch.equal(sigma, time)
    assert torch.equal(s.sigma(time), time)


def test_as_flow_by_hand() -> None:
    """alpha_bar .64: a = .8, b = .6. x = 7, eps = 5: x0^ = (7 - 3) / .8 = 5, v = 0; x / 1.4 = 5, sigma = .6 / 1.4."""
    s = AlphaBarSchedule.make(torch.tensor([0.9, 0.64]), 2, steps_offset=0)
    x, eps, time = torch.tensor([[7.0]]), torch.tensor([[5.0]]), torch.tensor([1.0])
    state, velocity, sigma = s.as_flow(x, eps, time)
    assert [float(state), float(velocity), float(sigma)] == pytest.approx([5, 0, 3 / 7], abs=1e-5)
    _, velocity, _ = s.as_flow(x, eps + 1, time)
    assert float(velocity) == pytest.approx(1 + 0.6 / 0.8, abs=1e-5)


@pytest.mark.parametrize("timestep", [1, 101, 500, 981, 999])
def test_an_epsilon_model_as_a_flow(timestep: int) -> None:
    """Its state is the same mixture with weights that add up to 1, its velocity obeys the flow identities."""
    s, (x0, noise) = AlphaBarSchedule.make(ALPHA_BARS, 10), pair()
    time = torch.full((4,), float(timestep))
    x, eps = s.add_noise(x0, noise, time), noise + 0.1 * x0
    state, velocity, sigma = s.as_flow(x, eps, time)
    sigma = sigma.double()[:, None, None, None]
    torch.testing.assert_close(state, (1 - sigma) * x0 + sigma * noise, atol=1e-6, rtol=0)
    torch.testing.assert_close(state - sigma * velocity, s.to_x0(x, eps, time), atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(state + (1 - sigma) * velocity, eps, atol=1e-5, rtol=1e-6)
    # the exact prediction is the exact velocity: what a flow model would be trained to say
    _, exact, _ = s.as_flow(x, noise, time)
    torch.testing.assert_close(exact, FlowSchedule.make(1).target(x0, noise), atol=1e-4, rtol=0)


def test_sigma_of_an_epsilon_model_rises_with_time_from_0_to_1() -> None:
    s = AlphaBarSchedule.make(ALPHA_BARS, 10)
    sigma = s.sigma(torch.arange(1000).float())
    assert bool((sigma.diff() > 0).all())
    assert 0 < float(sigma[0]) < 0.03 and 0.93 < float(sigma[-1]) < 1
    assert float(s.sigma(torch.tensor(-1.0))) == 0  # the clean image
    kept = AlphaBarSchedule.make(ALPHA_BARS, 10, final_alpha_bar=float(ALPHA_BARS[0]))
    assert float(kept.sigma(torch.tensor(-1.0))) == float(sigma[0])  # released SD1.5: as clean as its first timestep
    assert s.sigma(s.times).shape == s.times.shape == (11,)
    a, b = ALPHA_BARS.sqrt(), (1 - ALPHA_BARS).sqrt()
    torch.testing.assert_close(sigma.double(), b / (a + b), atol=1e-6, rtol=1e-5)


def test_gradients_go_through_as_flow() -> None:
    """d v / d eps = (a + b) / a, in every element alone: 15 at the noisiest timestep, 1 at the cleanest."""
    s, (x, eps) = AlphaBarSchedule.make(ALPHA_BARS, 10), pair()
    time = torch.tensor([0.0, 300.0, 700.0, 999.0])
    eps.requires_grad_()
    pull = torch.randn(eps.shape, generator=torch.Generator().manual_seed(3)).double()
    (s.as_flow(x, eps, time)[1] * pull).sum().backward()
    ab = ALPHA_BARS[time.long()][:, None, None, None]
    gain = (ab.sqrt() + (1 - ab).sqrt()) / ab.sqrt()
    assert eps.grad is not None
    torch.testing.assert_close(eps.grad, pull * gain, atol=1e-5, rtol=1e-5)
    assert gain.flatten().tolist()[::3] == pytest.approx([1, 15.6], abs=0.05)
    torch.testing.assert_close(s.velocity_gain(time).double(), gain.flatten(), atol=1e-5, rtol=1e-5)
    assert torch.equal(flow().velocity_gain(time), torch.ones(4))


def test_as_flow_refuses_shapes() -> None:
    s, (x, eps) = AlphaBarSchedule.make(ALPHA_BARS, 10), pair()
    with pytest.raises(ValueError, match="one shape"):
        s.as_flow(x, eps[:, :1], torch.zeros(4))
    with pytest.raises(ValueError, match="time has shape"):
        s.as_flow(x, eps, torch.zeros(3))


def test_bad_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 step"):
        FlowSchedule.make(0)
    with pytest.raises(ValueError, match="trained on 1000 timesteps"):
        AlphaBarSchedule.make(ALPHA_BARS, 1001)
