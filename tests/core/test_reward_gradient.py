"""The linear form of reward gradients against the chains that it replaces, closed forms and finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retouch.core.objectives.reward_gradient import (
    estimate_coefficients,
    implied_data,
    linear_loss,
    step_coefficients,
)
from retouch.core.schedule import AlphaBarSchedule, FlowSchedule, Schedule
from retouch.core.steps import ode_step

ALPHA_BARS = torch.linspace(0.999, 0.02, 100, dtype=torch.float64)
SCHEDULES: dict[str, Schedule] = {
    "flow": FlowSchedule.make(5, 3.0),
    "epsilon": AlphaBarSchedule.make(ALPHA_BARS, 5),
    "epsilon, not to clean data": AlphaBarSchedule.make(ALPHA_BARS, 5, final_alpha_bar=0.999),
}
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)

Network = Callable[[Tensor, Tensor], Tensor]


class Toy(nn.Module):
    """A network [B, 2, 3, 3] -> the same, in fp64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 2, 3, padding=1)).double()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.layers(torch.cat([x, t.view(-1, 1, 1, 1).expand(-1, 1, *x.shape[2:]) / 100], 1))


def run(schedule: Schedule, network: Network, x: Tensor, stop: Callable[[int], bool]) -> tuple[Tensor, list[Tensor]]:
    """The solver; `stop(k)`: whether the prediction of step k is a constant. The inputs of the network always are."""
    level, states = schedule.level(schedule.times).double(), list[Tensor]()
    for k in range(len(schedule.times) - 1):
        states.append(x.detach())
        v = network(x.detach(), schedule.times[k].expand(len(x)).double())
        v = v.detach() if stop(k) else v
        x = ode_step(schedule.prediction, x, v, level[k], level[k + 1])
    return x, states


def reward(x0: Tensor) -> Tensor:
    """[B] of a decoder and a scorer."""
    mixed = torch.einsum("bchw,cd->bdhw", x0, torch.tensor([[1.0, -2.0, 0.5], [0.3, 0.7, -1.0]], dtype=torch.float64))
    return torch.sigmoid(nn.functional.interpolate(mixed, scale_factor=2, mode="bilinear")).pow(2).flatten(1).sum(1)


def gradient_of(value: Tensor, network: nn.Module) -> Tensor:
    parts = torch.autograd.grad(value, list(network.parameters()), retain_graph=True)
    return torch.cat([part.flatten() for part in parts])


def start(batch: int = 3) -> Tensor:
    return torch.randn(batch, 2, 3, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def negative_gradient(x0: Tensor, of: Callable[[Tensor], Tensor] = reward) -> Tensor:
    x0 = x0.detach().requires_grad_()
    return -torch.autograd.grad(of(x0).sum(), x0)[0]


def linear(schedule: Schedule, network: nn.Module, states: list[Tensor], g: Tensor, steps: list[int]) -> Tensor:
    """Gradient of the sum of the linear losses of some steps."""
    c, total = step_coefficients(schedule), torch.zeros((), dtype=torch.float64)
    for k in steps:
        v = network(states[k], schedule.times[k].expand(len(g)).double())
        total = total + linear_loss(v, g, c[k], normalizer=1.0)[0]
    return gradient_of(total, network)


@every_schedule
@pytest.mark.parametrize("trained", [[4], [2], [0, 3], [0, 1, 2, 3, 4]])
def test_the_linear_form_is_the_chain_with_constant_inputs(schedule: Schedule, trained: list[int]) -> None:
    network = Toy()
    x0, states = run(schedule, network, start(), lambda k: k not in trained)
    chain = gradient_of(-reward(x0).sum(), network)
    found = linear(schedule, network, states, negative_gradient(x0), trained)
    torch.testing.assert_close(found, chain, rtol=1e-12, atol=1e-12)


@every_schedule
def test_draft_1_is_drtune_and_refl_of_the_last_step(schedule: Schedule) -> None:
    network = Toy()
    x0, states = run(schedule, network, start(), lambda k: k != 4)
    v = network(states[4], schedule.times[4].expand(3).double())
    clean = schedule.to_x0(states[4], v, schedule.times[4].double())
    if schedule.times[-1] == 0 or schedule.level(schedule.times)[-1] == 1:
        torch.testing.assert_close(clean, x0, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(step_coefficients(schedule)[-1], estimate_coefficients(schedule)[-1])
    refl = gradient_of(-reward(clean).sum(), network)
    loss = linear_loss(v, negative_gradient(clean), estimate_coefficients(schedule)[4], normalizer=1.0)[0]
    torch.testing.assert_close(gradient_of(loss, network), refl, rtol=1e-12, atol=1e-12)


@every_schedule
def test_the_data_that_a_step_implies_follow_from_the_states_around_it(schedule: Schedule) -> None:
    network = Toy()
    x0, states = run(schedule, network, start(), lambda k: True)
    states.append(x0)
    for k in range(5):
        v = network(states[k], schedule.times[k].expand(3).double())
        expected = schedule.to_x0(states[k], v, schedule.times[k].double())
        found = implied_data(schedule, states[k], states[k + 1], torch.full((3,), k))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("steps", [1, 4, 10, 500])
def test_the_constants_of_a_gaussian(steps: int) -> None:
    """x0 ~ N(0, 1), its exact velocity and a learned constant b: d x0 / d b is -1 over all steps at any number of them,
    -s_last of the last one, and of the whole chain tends to -sqrt(2) asinh(1)."""
    schedule = FlowSchedule.make(steps, 3.0)
    coefficients = step_coefficients(schedule)
    assert float(coefficients.sum()) == pytest.approx(-1, abs=1e-7)
    assert float(coefficients[-1]) == pytest.approx(-float(schedule.times[-2]), abs=1e-12)
    torch.testing.assert_close(estimate_coefficients(schedule), -schedule.times[:-1].double())

    b = torch.zeros((), dtype=torch.float64, requires_grad=True)

    def sampled(*, constant_inputs: bool) -> Tensor:
        x, sigmas = torch.ones((), dtype=torch.float64), schedule.times.double()
        for s, s_next in pairwise(sigmas):
            given = x.detach() if constant_inputs else x
            x = x + (s_next - s) * (given * (2 * s - 1) / ((1 - s) ** 2 + s**2) + b)
        return x

    drtune = float(torch.autograd.grad(sampled(constant_inputs=True), b)[0])
    assert drtune == pytest.approx(-1, abs=1e-7)
    if steps == 500:
        whole = float(torch.autograd.grad(sampled(constant_inputs=False), b)[0])
        assert whole == pytest.approx(-math.sqrt(2) * math.asinh(1), abs=0.005)


@every_schedule
def test_the_last_step_equals_finite_differences_through_sampler_decoder_and_reward(schedule: Schedule) -> None:
    network = Toy()
    x0, states = run(schedule, network, start(), lambda k: True)
    found = linear(schedule, network, states, negative_gradient(x0), [4])
    level, weights = schedule.level(schedule.times).double(), list(network.parameters())
    direction = [torch.randn(w.shape, generator=torch.Generator().manual_seed(2), dtype=w.dtype) for w in weights]

    def moved(by: float) -> float:
        with torch.no_grad():
            for w, d in zip(weights, direction, strict=True):
                w += by * d
            v = network(states[4], schedule.times[4].expand(3).double())
            value = -reward(ode_step(schedule.prediction, states[4], v, level[4], level[5])).sum()
            for w, d in zip(weights, direction, strict=True):
                w -= by * d
        return float(value)

    slope = (moved(1e-5) - moved(-1e-5)) / 2e-5
    assert slope == pytest.approx(float(found @ torch.cat([d.flatten() for d in direction])), rel=1e-4)


# --- regions, weights, scale ---


def losses(**options: Any) -> tuple[Tensor, Tensor]:
    """(loss, gradient by the prediction) of three rows."""
    made = torch.Generator().manual_seed(3)
    prediction, gradient = (torch.randn(3, 2, 4, 4, generator=made) for _ in range(2))
    prediction, gradient = options.pop("prediction", prediction), options.pop("gradient", gradient)
    prediction = prediction.clone().requires_grad_()
    loss, _ = linear_loss(prediction, gradient, torch.tensor([1.0, -0.5, 2.0]), **options)
    return loss.detach(), torch.autograd.grad(loss, prediction)[0]


def test_by_hand() -> None:
    prediction, gradient = (
        torch.tensor([[[[1.0, 2.0]]], [[[3.0, 4.0]]]]),
        torch.tensor([[[[5.0, 6.0]]], [[[7.0, 8.0]]]]),
    )
    region = torch.tensor([[[[1.0, 0.5]]], [[[0.0, 1.0]]]])
    loss, values = linear_loss(prediction, gradient, torch.tensor([1.0, 10.0]), region, torch.tensor([1.0, 2.0]), 4.0)
    assert float(loss) == pytest.approx((1 * (5 + 0.5 * 12) + 2 * 10 * 32) / 4)
    assert float(values["gradient_rms"]) == pytest.approx((math.sqrt((25 + 0.5 * 36) / 1.5) + 8) / 2)


def test_nothing_outside_the_region_is_read() -> None:
    region = torch.zeros(3, 1, 4, 4)
    region[:, :, 1:3, 1:3] = 1.0
    made = torch.Generator().manual_seed(3)
    prediction, gradient = (torch.randn(3, 2, 4, 4, generator=made) for _ in range(2))
    loss, by_prediction = losses(region=region)
    for bad in (1e30, float("nan"), float("inf")):
        spoiled = [torch.where(region > 0, t, bad) for t in (prediction, gradient)]
        again = losses(prediction=spoiled[0], gradient=spoiled[1], region=region)
        assert torch.equal(again[0], loss) and torch.equal(again[1], by_prediction)
    assert not by_prediction[(region == 0).expand_as(by_prediction)].any()


def test_rows_of_weight_0_are_inert_whatever_they_hold() -> None:
    made = torch.Generator().manual_seed(3)
    prediction, gradient = (torch.randn(3, 2, 4, 4, generator=made) for _ in range(2))
    weight, region = torch.tensor([1.0, 0.0, 1.0]), torch.ones(3, 1, 4, 4)
    loss, by_prediction = losses(weight=weight)
    prediction[1], gradient[1], region[1] = float("nan"), float("inf"), 0.0
    for options in ({}, {"region": region}):
        again = losses(prediction=prediction, gradient=gradient, weight=weight, **options)
        assert torch.equal(again[0], loss) and torch.equal(again[1], by_prediction)
    assert not by_prediction[1].any()
    assert losses(weight=torch.zeros(3))[0] == 0


def test_the_gradient_scales_with_that_of_the_reward_and_does_not_depend_on_the_split() -> None:
    made = torch.Generator().manual_seed(3)
    prediction, gradient = (torch.randn(3, 2, 4, 4, generator=made) for _ in range(2))
    _, once = losses()
    torch.testing.assert_close(losses(gradient=8 * gradient)[1], 8 * once, rtol=0, atol=0)
    c = torch.tensor([1.0, -0.5, 2.0])
    whole = linear_loss(prediction, gradient, c, normalizer=3.0)[0]
    parts = [linear_loss(prediction[i : i + 1], gradient[i : i + 1], c[i : i + 1], normalizer=3.0)[0] for i in range(3)]
    torch.testing.assert_close(torch.stack(parts).sum(), whole)


def test_other_shapes_are_refused() -> None:
    v = torch.zeros(2, 1, 2, 2)
    with pytest.raises(ValueError, match="one shape"):
        linear_loss(v, torch.zeros(2, 1, 2, 1), 1.0)
    with pytest.raises(ValueError, match="coefficient has shape"):
        linear_loss(v, v, torch.zeros(3))
