"""Step rules: limits, closed forms, measured orders, and agreement with diffusers and torch.distributions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler
from torch import Tensor

from retouch.core import steps
from retouch.core.rules import STEP_RULES
from retouch.core.schedule import AlphaBarSchedule, FlowSchedule, flux_shift

B, C, H, W = 3, 2, 4, 5


@pytest.fixture
def x() -> Tensor:
    return torch.randn(B, C, H, W, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.fixture
def v() -> Tensor:
    return torch.randn(B, C, H, W, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


# --- limits ---


def test_without_noise_every_rule_is_euler(x: Tensor, v: Tensor) -> None:
    expected = steps.ode_step("flow", x, v, 0.8, 0.6)
    torch.testing.assert_close(expected, x + (0.6 - 0.8) * v)
    for mean, std in (
        steps.flow_sde(x, v, 0.8, 0.6, noise_level=0.0, sigma_max=0.9),
        steps.dance_sde(x, v, 0.8, 0.6, eta=0.0),
    ):
        assert torch.equal(mean, expected)
        assert float(std) == 0.0
    mean, std = steps.cps(x, v, 0.8, 0.6, noise_level=0.0)
    torch.testing.assert_close(mean, expected, atol=1e-6, rtol=0)
    assert float(std) == 0.0


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("noise_level", [0.3, 0.7, 1.2])
def test_first_flow_sde_step_has_std_noise_level(x: Tensor, v: Tensor, shift: float, noise_level: float) -> None:
    sigmas = FlowSchedule.make(10, shift).times.double()
    _, std = steps.flow_sde(x, v, sigmas[0], sigmas[1], noise_level, sigma_max=float(sigmas[1]))
    assert abs(float(std) - noise_level) < 1e-6


def test_flow_sde_by_hand() -> None:
    """s = .5, s' = .4, noise level .8: a² = .64, dt = -.1."""
    mean, std = steps.flow_sde(torch.full((1, 1), 2.0), torch.full((1, 1), 3.0), 0.5, 0.4, 0.8, 0.9)
    assert float(mean) == pytest.approx(2 * (1 - 0.64 * 0.1 / 1.0) + 3 * (1 + 0.64 * 0.5 / 1.0) * -0.1, abs=1e-6)
    assert float(std) == pytest.approx(0.8 * math.sqrt(0.1), abs=1e-6)


def test_dance_sde_by_hand() -> None:
    """s = .5, s' = .4, eta .3, x 2, v 3: x0^ = .5, score = -(2 - .25) / .25 = -7."""
    mean, std = steps.dance_sde(torch.full((1, 1), 2.0), torch.full((1, 1), 3.0), 0.5, 0.4, 0.3)
    assert float(mean) == pytest.approx(2 - 0.3 - 0.5 * 0.09 * -7 * -0.1, abs=1e-6)
    assert float(std) == pytest.approx(0.3 * math.sqrt(0.1), abs=1e-6)


def test_cps_by_hand() -> None:
    """s = .5, s' = .4, noise level .5: std = .4 sin(pi/4); x0^ = .5, e^ = 3.5."""
    mean, std = steps.cps(torch.full((1, 1), 2.0), torch.full((1, 1), 3.0), 0.5, 0.4, 0.5)
    assert float(std) == pytest.approx(0.4 * math.sin(math.pi / 4), abs=1e-6)
    assert float(mean) == pytest.approx(0.6 * 0.5 + math.sqrt(0.16 - float(std) ** 2) * 3.5, abs=1e-6)


def test_levels_per_row_equal_rows_one_by_one(x: Tensor, v: Tensor) -> None:
    now, then = torch.tensor([0.9, 0.7, 0.5]), torch.tensor([0.7, 0.5, 0.2])
    for rule in STEP_RULES.values():
        options = (0.5, 0.95) if rule.takes_second_level else (0.5,)
        together, stds = rule.mean_std(x, v, now.double(), then.double(), *options)
        assert stds.shape == (B,)
        for i in range(B):
            mean, std = rule.mean_std(x[i : i + 1], v[i : i + 1], float(now[i]), float(then[i]), *options)
            torch.testing.assert_close(together[i : i + 1], mean, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(stds[i].double(), std.double(), rtol=1e-6, atol=1e-6)


def test_arithmetic_is_fp32_for_half_inputs(x: Tensor, v: Tensor) -> None:
    mean, std = steps.flow_sde(x.bfloat16(), v.bfloat16(), 0.8, 0.6, 0.7, 0.9)
    assert mean.dtype == std.dtype == torch.float32
    exact, _ = steps.flow_sde(x.bfloat16().float(), v.bfloat16().float(), 0.8, 0.6, 0.7, 0.9)
    assert torch.equal(mean, exact)


@pytest.mark.parametrize("bad", [torch.zeros(2), torch.zeros(1), torch.zeros(B, 1), torch.zeros(1, B)])
def test_wrong_shapes_are_errors_not_broadcasts(x: Tensor, v: Tensor, bad: Tensor) -> None:
    with pytest.raises(ValueError, match="level"):
        steps.ode_step("flow", x, v, bad, 0.1)
    with pytest.raises(ValueError, match="one shape"):
        steps.ode_step("flow", x, v[:, :1], 0.5, 0.1)
    with pytest.raises(ValueError, match="batch dim"):
        steps.ode_step("flow", x[:, 0, 0, 0], v[:, 0, 0, 0], 0.5, 0.1)


def test_levels_of_the_rank_of_x_are_errors_too() -> None:
    """A sigma for every element would have another log-density than the one computed."""
    flat = torch.ones(B, C)
    for bad in (torch.full((B, C), 0.5), torch.full((B, 1), 0.5), torch.full((1, C), 0.5)):
        with pytest.raises(ValueError, match="level has shape"):
            steps.cps(flat, flat, bad, 0.1, 0.8)
        with pytest.raises(ValueError, match="level has shape"):
            steps.ddim(flat, flat, bad, 0.9, 1.0)
        with pytest.raises(ValueError, match="time has shape"):
            FlowSchedule.make(4).add_noise(flat, flat, bad)


def test_sigma_max_is_of_rows(x: Tensor, v: Tensor) -> None:
    """One of as many as the latents are wide would be taken for columns."""
    x, v = x[..., :B], v[..., :B]
    most: Any = torch.tensor([0.9, 0.8, 0.7], dtype=torch.float64)
    mean, std = steps.flow_sde(x, v, 1.0, 0.6, 0.7, most)
    assert std.shape == (B,)
    for i in range(B):
        alone, alone_std = steps.flow_sde(x[i : i + 1], v[i : i + 1], 1.0, 0.6, 0.7, float(most[i]))
        torch.testing.assert_close(mean[i : i + 1], alone)
        torch.testing.assert_close(std[i], alone_std)
    with pytest.raises(ValueError, match="sigma_max has shape"):
        steps.flow_sde(x, v, 1.0, 0.6, 0.7, most[:2])


# --- a solvable target: x0 ~ N(0, tau²), whose exact velocity is linear in x ---

Rule = Callable[[Tensor, Tensor, float, float, float], tuple[Tensor, Tensor]]
TAU = 0.4


def exact_velocity(x: Tensor, s: float) -> Tensor:
    variance = (1 - s) ** 2 * TAU**2 + s**2
    x0 = (1 - s) * TAU**2 / variance * x
    return (x - x0) / s


def end_std(rule: Rule, num_steps: int, shift: float = 3.0, start: float = 1.0) -> float:
    """Std of the end of a solver run, exactly: each step is affine in x, so variances propagate in closed form.

    A run may start inside the schedule, at the exact marginal of `start`.
    """
    sigmas = FlowSchedule.make(num_steps, shift).times.double() * start
    variance, one = (1 - start) ** 2 * TAU**2 + start**2, torch.ones(1, 1, dtype=torch.float64)
    for s, s_next in zip(sigmas[:-1].tolist(), sigmas[1:].tolist(), strict=True):
        mean, std = rule(one, exact_velocity(one, s), s, s_next, float(sigmas[1]))
        variance = float(mean) ** 2 * variance + float(std) ** 2
    return math.sqrt(variance)


def ode(x: Tensor, v: Tensor, s: float, s_next: float, _: float) -> tuple[Tensor, Tensor]:
    return steps.ode_step("flow", x, v, s, s_next), torch.zeros(())


def flow(x: Tensor, v: Tensor, s: float, s_next: float, sigma_max: float) -> tuple[Tensor, Tensor]:
    return steps.flow_sde(x, v, s, s_next, 0.7, sigma_max)


def dance(x: Tensor, v: Tensor, s: float, s_next: float, _: float) -> tuple[Tensor, Tensor]:
    return steps.dance_sde(x, v, s, s_next, 0.3)


def cps(x: Tensor, v: Tensor, s: float, s_next: float, _: float) -> tuple[Tensor, Tensor]:
    return steps.cps(x, v, s, s_next, 0.5)


@pytest.mark.parametrize(("rule", "start"), [(ode, 1.0), (dance, 1.0), (flow, 0.9)])
def test_marginal_converges_at_first_order(rule: Rule, start: float) -> None:
    errors = [abs(end_std(rule, n, start=start) - TAU) for n in (200, 400, 800)]
    for coarse, fine in itertools.pairwise(errors):
        assert 1.9 < coarse / fine < 2.1
    assert errors[-1] < 0.002


def test_flow_sde_from_pure_noise() -> None:
    """Its first step is as noisy however short it is: the variance after it is 1 + noise_level⁴ / 4 (to first order
    in the step), and that excess fades with exponent noise_level² of the step count, slower than first order. The run
    still ends at the target."""
    sigmas = FlowSchedule.make(100_000, 3.0).times.double()
    one = torch.ones(1, 1, dtype=torch.float64)
    mean, std = flow(one, exact_velocity(one, 1.0), 1.0, float(sigmas[1]), float(sigmas[1]))
    assert float(mean) ** 2 + float(std) ** 2 == pytest.approx(1 + 0.7**4 / 4, abs=1e-4)
    assert abs(end_std(flow, 800) - TAU) < 0.001
    assert abs(end_std(flow, 3200) - TAU) < 0.0005


def test_known_end_stds_at_50_steps() -> None:
    assert end_std(ode, 50) == pytest.approx(0.3729, abs=1e-4)
    assert end_std(dance, 50) == pytest.approx(0.3770, abs=1e-4)


def test_sde_without_its_drift_would_be_seen() -> None:
    """What the marginal test is for: noise added to plain Euler widens the end."""

    def broken(x: Tensor, v: Tensor, s: float, s_next: float, sigma_max: float) -> tuple[Tensor, Tensor]:
        return steps.ode_step("flow", x, v, s, s_next), dance(x, v, s, s_next, sigma_max)[1]

    assert abs(end_std(broken, 800) - TAU) > 0.03


@pytest.mark.parametrize(("num_steps", "expected"), [(50, None), (5000, 0.369)])
def test_cps_follows_its_own_recursion(num_steps: int, expected: float | None) -> None:
    """CPS does not converge to the target; its end std obeys V' = ((1 - s') a + sqrt(s'² - std²) b)² V + std²."""
    sigmas = FlowSchedule.make(num_steps, 3.0).times.double().tolist()
    variance = 1.0
    for s, s_next in itertools.pairwise(sigmas):
        a = (1 - s) * TAU**2 / ((1 - s) ** 2 * TAU**2 + s**2)  # x0^ = a x
        b = (1 - (1 - s) * a) / s  # e^ = b x
        std = s_next * math.sin(0.25 * math.pi)
        variance = ((1 - s_next) * a + math.sqrt(s_next**2 - std**2) * b) ** 2 * variance + std**2
    found = end_std(cps, num_steps)
    assert found == pytest.approx(math.sqrt(variance), abs=1e-9)
    if expected is not None:
        assert found == pytest.approx(expected, abs=5e-4)


# --- agreement with diffusers ---


@pytest.mark.parametrize("tokens", [32, 1024, 4096])
def test_flux_schedule_equals_diffusers(tokens: int) -> None:
    shift = flux_shift(tokens)
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    sigmas = torch.linspace(1, 1 / 28, 28).tolist()
    scheduler.set_timesteps(sigmas=sigmas, mu=math.log(shift))
    torch.testing.assert_close(FlowSchedule.make(28, shift).times, scheduler.sigmas.float(), atol=1e-6, rtol=0)


def test_flux_shift_constants() -> None:
    assert flux_shift(1024) == pytest.approx(1.88, abs=0.005)
    assert flux_shift(4096) == pytest.approx(3.16, abs=0.005)


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("num_steps", [5, 20])
def test_ddim_equals_diffusers(x: Tensor, v: Tensor, eta: float, num_steps: int) -> None:
    scheduler = DDIMScheduler(beta_schedule="scaled_linear", clip_sample=False, set_alpha_to_one=True, steps_offset=1)
    scheduler.set_timesteps(num_steps)
    schedule = AlphaBarSchedule.make(scheduler.alphas_cumprod, num_steps)
    assert schedule.times[:-1].long().tolist() == scheduler.timesteps.tolist()
    x, v = x.float(), v.float()
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
    levels = schedule.level(schedule.times)
    for i, t in enumerate(scheduler.timesteps):
        mean, std = steps.ddim(x, v, levels[i], levels[i + 1], eta)
        expected = scheduler.step(v, int(t), x, eta=eta, variance_noise=noise).prev_sample
        torch.testing.assert_close(mean + std * noise, expected, atol=2e-5, rtol=2e-5)


# --- log-probabilities ---


def test_log_prob_equals_torch_distributions(x: Tensor, v: Tensor) -> None:
    std = torch.tensor([0.3, 0.7, 1.4], dtype=torch.float64)
    normal = torch.distributions.Normal(v, std[:, None, None, None])
    expected = normal.log_prob(x).mean(dim=(1, 2, 3))
    torch.testing.assert_close(steps.gaussian_log_prob(x, v, std), expected, atol=1e-12, rtol=0)
    for rank in (2, 3, 5):
        flat_x, flat_v = x.reshape(B, *[2] * (rank - 2), -1), v.reshape(B, *[2] * (rank - 2), -1)
        torch.testing.assert_close(steps.gaussian_log_prob(flat_x, flat_v, std), expected, atol=1e-12, rtol=0)


def test_log_prob_of_a_region_ignores_the_outside(x: Tensor, v: Tensor) -> None:
    region = torch.zeros(B, 1, H, W, dtype=torch.float64)
    region[:, :, 1:3, 2:4] = 1
    inside = steps.gaussian_log_prob(x, v, 0.5, region)
    elsewhere = torch.where(region > 0, x, torch.full_like(x, float("nan")))
    torch.testing.assert_close(steps.gaussian_log_prob(elsewhere, v, 0.5, region), inside, atol=0, rtol=0)
    expected = torch.distributions.Normal(v, 0.5).log_prob(x)[:, :, 1:3, 2:4].mean(dim=(1, 2, 3))
    torch.testing.assert_close(inside, expected, atol=1e-12, rtol=0)
    everything = steps.gaussian_log_prob(x, v, 0.5, torch.ones_like(region))
    torch.testing.assert_close(everything, steps.gaussian_log_prob(x, v, 0.5), atol=1e-12, rtol=0)
    with pytest.raises(ValueError, match="empty region"):
        steps.gaussian_log_prob(x, v, 0.5, torch.zeros_like(region))


def test_published_log_prob_is_the_squared_distance_alone(x: Tensor, v: Tensor) -> None:
    """The CPS code's: without 1 / (2 std²) and constants, so that a step of any std weighs the same."""
    std = torch.tensor([0.3, 0.7, 1.4], dtype=torch.float64)
    published = steps.gaussian_log_prob(x, v, std, mode="published")
    torch.testing.assert_close(published, -((x - v) ** 2).mean(dim=(1, 2, 3)), atol=1e-12, rtol=0)
    assert torch.equal(published, steps.gaussian_log_prob(x, v, 10 * std, mode="published"))
    exact = steps.gaussian_log_prob(x, v, std)
    torch.testing.assert_close(
        exact, published / (2 * std**2) - std.log() - 0.5 * math.log(2 * math.pi), atol=1e-12, rtol=0
    )
    region = torch.zeros(B, 1, H, W, dtype=torch.float64)
    region[:, :, 1:3, 2:4] = 1
    inside = -((x - v) ** 2)[:, :, 1:3, 2:4].mean(dim=(1, 2, 3))
    torch.testing.assert_close(steps.gaussian_log_prob(x, v, std, region, "published"), inside, atol=1e-12, rtol=0)
    with pytest.raises(ValueError, match="std is 0"):
        steps.gaussian_log_prob(x, v, 0.0, mode="published")


def test_log_prob_of_an_unknown_mode_is_an_error(x: Tensor, v: Tensor) -> None:
    wrong: Any = "exakt"
    with pytest.raises(ValueError, match="mode is 'exakt'; it must be exact, published or cps"):
        steps.gaussian_log_prob(x, v, 0.5, mode=wrong)


@pytest.mark.parametrize("std", [0.0, torch.tensor([0.5, 0.0, 0.5])])
def test_deterministic_steps_have_no_density(x: Tensor, v: Tensor, std: Tensor | float) -> None:
    with pytest.raises(ValueError, match="std is 0"):
        steps.gaussian_log_prob(x, v, std)


def test_last_steps_of_cps_and_ddim_are_deterministic(x: Tensor, v: Tensor) -> None:
    assert float(steps.cps(x, v, 0.2, 0.0, 0.8)[1]) == 0.0
    assert float(steps.ddim(x, v, 0.9, 1.0, 1.0)[1]) == 0.0


# --- DPM-Solver++(2M) ---


def dpm_run(levels: Sequence[float], x: Tensor, model: Any) -> Tensor:
    """All steps; `model` takes (x, level)."""
    before = None
    for level, level_next in itertools.pairwise(levels):
        x, before = steps.dpm_step(x, model(x, level), level, level_next, before)
    return x


def diffusers_run(sigmas: Sequence[float], x: Tensor, model: Any, **options: Any) -> Tensor:
    """The same by diffusers, whose sigmas are set by hand, so that both take the same steps."""
    scheduler = DPMSolverMultistepScheduler(algorithm_type="dpmsolver++", solver_order=2, **options)
    scheduler.set_timesteps(len(sigmas) - 1)
    scheduler.sigmas = torch.tensor(sigmas, dtype=torch.float64)
    for i, t in enumerate(scheduler.timesteps):
        x = scheduler.step(model(x, i), t, x).prev_sample
    return x


def test_dpm_steps_of_a_flow_are_those_of_diffusers() -> None:
    sigmas = [0.95, 0.8, 0.61, 0.4, 0.25, 0.1, 0.0]
    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    curve = lambda x, s: torch.sin(2 * x) * (1 - s) + x * s  # noqa: E731
    theirs = diffusers_run(
        sigmas, x, lambda x, i: curve(x, sigmas[i]), prediction_type="flow_prediction", use_flow_sigmas=True
    )
    assert torch.allclose(dpm_run(sigmas, x, curve), theirs, atol=1e-6)


def test_a_dpm_step_without_a_past_is_of_first_order() -> None:
    """From pure noise, too; and to clean data, whatever was before."""
    x, v, other = torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).unbind()
    for level, level_next in ((1.0, 0.7), (0.7, 0.3), (0.3, 0.0)):
        assert torch.allclose(
            steps.dpm_step(x, v, level, level_next)[0], steps.ode_step("flow", x, v, level, level_next)
        )
    after_noise = steps.dpm_step(x, v, 0.8, 0.5, steps.Estimate(other, 1.0))[0]
    assert torch.allclose(after_noise, steps.ode_step("flow", x, v, 0.8, 0.5))
    to_data = steps.dpm_step(x, v, 0.2, 0.0, steps.Estimate(other, 0.4))[0]
    assert torch.allclose(to_data, steps.ode_step("flow", x, v, 0.2, 0.0))
    assert not torch.allclose(steps.dpm_step(x, v, 0.4, 0.2, steps.Estimate(other, 0.6))[0], x - 0.2 * v)


def test_a_dpm_step_much_longer_than_the_one_before_is_of_first_order() -> None:
    x, v, other = torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).unbind()
    at = lambda log_snr: 1 / (1 + math.exp(log_snr))  # noqa: E731
    before = steps.Estimate(other, at(0.0))
    twice, longer = (steps.dpm_step(x, v, at(1.0), at(end), before)[0] for end in (2.99, 3.01))
    assert torch.allclose(longer, steps.ode_step("flow", x, v, at(1.0), at(3.01)))
    change = (x - at(1.0) * v - other) * (1 - at(2.99) / at(1.0)) * 0.995
    assert torch.allclose(twice, steps.ode_step("flow", x, v, at(1.0), at(2.99)) + change)
    rows = torch.tensor([at(2.99), at(3.01)], dtype=torch.float64)
    both = steps.dpm_step(x, v, at(1.0), rows, before)[0]
    assert torch.allclose(both, torch.stack([twice[0], longer[1]]))


@pytest.mark.parametrize(
    ("shift", "terminal", "num_steps", "share"),
    [
        (1.71, 0.02, 10, 0.6),
        (2, 0.02, 20, 0.25),
        (3, 0.02, 20, 0.45),
        (1, 0.001, 10, 0.3),
        (3, 0.02, 6, 1),
        (1.71, None, 10, 0.65),
        (3, None, 20, 0.5),
    ],
)
def test_dpm_ends_nearer_than_euler_after_a_tiny_last_sigma_too(
    shift: float, terminal: float | None, num_steps: int, share: float
) -> None:
    """From pure noise down to data N(0, TAU²); the end is TAU times the noise. Extrapolated over the step down to the
    terminal, the first four end at 1.00, .99, 1.15 and 2.58 times Euler's error."""
    levels = FlowSchedule.make(num_steps, shift, terminal).times.double().tolist()
    start = torch.ones(1, 1, dtype=torch.float64)
    first = start
    for s, s_next in itertools.pairwise(levels):
        first = steps.ode_step("flow", first, exact_velocity(first, s), s, s_next)
    second = dpm_run(levels, start, exact_velocity)
    assert abs(float(second) - TAU) < share * abs(float(first) - TAU)


def test_dpm_is_of_second_order() -> None:
    """Data N(1, 0.5²): the ODE keeps (x - (1 - s)) / sd(s), so that its end is known. Half the step, a quarter of the
    error; of Euler's, half."""
    deviation = lambda s: math.sqrt((0.5 * (1 - s)) ** 2 + s**2)  # noqa: E731

    def velocity(x: Tensor, s: float) -> Tensor:
        score = -(x - (1 - s)) / deviation(s) ** 2
        return -(x + s * score) / (1 - s)  # of x = (1 - s) x0 + s noise

    def error(count: int, solver: str) -> float:
        levels = torch.linspace(0.9, 0.1, count + 1, dtype=torch.float64).tolist()
        x = start = torch.linspace(-2, 2, 8, dtype=torch.float64).reshape(2, 4)
        if solver == "dpm2":
            x = dpm_run(levels, x, velocity)
        else:
            for s, s_next in itertools.pairwise(levels):
                x = steps.ode_step("flow", x, velocity(x, s), s, s_next)
        true = 0.9 + deviation(0.1) * (start - 0.1) / deviation(0.9)
        return float((x - true).abs().max())

    assert error(20, "dpm2") / error(40, "dpm2") == pytest.approx(4, rel=0.15)
    assert error(20, "first_order") / error(40, "first_order") == pytest.approx(2, rel=0.15)
    assert error(20, "dpm2") < error(20, "first_order") / 5
