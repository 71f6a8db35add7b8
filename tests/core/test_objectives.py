"""Losses: hand-computed values, gradients, inert rows, regions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from retouch.core.objectives.dpo import dpo_loss
from retouch.core.objectives.grpo import gaussian_kl, grpo_loss
from retouch.core.objectives.sft import denoising_loss, denoising_rows, flow_matching_loss
from retouch.core.reduce import weighted_mean


def rows(*values: float, grad: bool = False) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


# --- grpo ---


def test_grpo_by_hand() -> None:
    """Ratios 1.1 and .8, clip .15: A = 2 keeps -2.2; A = -1 clips .8 to .85: max(.8, .85)."""
    log_prob = torch.log(rows(1.1, 0.8))
    loss, metrics = grpo_loss(log_prob, torch.zeros(2).double(), rows(2.0, -1.0), 0.15)
    assert float(loss) == pytest.approx((-2.2 + 0.85) / 2)
    assert float(metrics["ratio"]) == pytest.approx(0.95)
    assert float(metrics["clip_fraction"]) == 0.5
    assert float(metrics["max_abs_log_ratio"]) == pytest.approx(-math.log(0.8))
    assert float(metrics["approx_kl"]) == pytest.approx(((1.1 - 1 - math.log(1.1)) + (0.8 - 1 - math.log(0.8))) / 2)


def test_gradient_at_ratio_one_is_minus_advantage_over_n() -> None:
    log_prob = rows(0.3, -0.2, 0.1, grad=True)
    advantages = rows(1.5, -0.5, 0.0)
    loss, _ = grpo_loss(log_prob, log_prob.detach(), advantages, 1e-4)
    loss.backward()
    assert log_prob.grad is not None
    torch.testing.assert_close(log_prob.grad, -advantages / 3, atol=0, rtol=1e-12)


def test_steps_of_a_row_share_its_weight() -> None:
    log_prob = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    loss, _ = grpo_loss(log_prob, log_prob.detach(), rows(1.0, -2.0), 1e-4)
    loss.backward()
    assert log_prob.grad is not None
    torch.testing.assert_close(log_prob.grad, torch.tensor([[-1.0] * 3, [2.0] * 3]).double() / 6)


def test_clipping_stops_the_gradient_only_in_the_advantages_direction() -> None:
    log_prob = torch.log(rows(1.2, 1.2, 0.8, 0.8)).requires_grad_()
    loss, _ = grpo_loss(log_prob, torch.zeros(4).double(), rows(1.0, -1.0, 1.0, -1.0), 0.1)
    loss.backward()
    assert log_prob.grad is not None
    assert [g != 0 for g in log_prob.grad.tolist()] == [False, True, True, False]


def test_rows_of_weight_0_are_inert_whatever_they_hold() -> None:
    log_prob = rows(0.1, 0.2, grad=True)
    old = rows(0.0, 0.0)
    loss, metrics = grpo_loss(log_prob, old, rows(1.0, float("nan")), 10.0, weight=rows(1.0, 0.0))
    alone, alone_metrics = grpo_loss(log_prob[:1], old[:1], rows(1.0), 10.0)
    assert float(loss.detach()) == float(alone.detach())
    assert {k: float(v) for k, v in metrics.items()} == {k: float(v) for k, v in alone_metrics.items()}
    loss.backward()
    assert log_prob.grad is not None and float(log_prob.grad[1]) == 0.0


@pytest.mark.parametrize("bad", [float("nan"), 800.0])
def test_nor_has_it_a_gradient_where_its_ratio_is_not_finite(bad: float) -> None:
    log_prob = rows(0.1, bad, grad=True)
    grpo_loss(log_prob, rows(0.0, 0.0), rows(1.0, 1.0), 10.0, weight=rows(1.0, 0.0))[0].backward()
    assert log_prob.grad is not None and float(log_prob.grad[1]) == 0.0


def test_nor_a_place_in_the_metrics() -> None:
    _, metrics = grpo_loss(rows(0.1, float("nan")), rows(0.0, 0.0), rows(1.0, 1.0), 10.0, weight=rows(1.0, 0.0))
    assert float(metrics["max_abs_log_ratio"]) == pytest.approx(0.1)


def test_a_normalizer_makes_micro_batches_add_up() -> None:
    log_prob, old = rows(0.1, -0.1, 0.2, 0.05, 0.3), torch.zeros(5).double()
    advantages, weight = rows(1.0, -1.0, 0.5, 2.0, -3.0), rows(1.0, 1.0, 0.0, 1.0, 1.0)
    whole, _ = grpo_loss(log_prob, old, advantages, 0.5, weight)
    parts = [grpo_loss(log_prob[s], old[s], advantages[s], 0.5, weight[s], 4.0)[0] for s in (slice(0, 2), slice(2, 5))]
    assert float(sum(parts)) == pytest.approx(float(whole), abs=1e-12)  # type: ignore[arg-type]


def test_no_weight_at_all_gives_zero_and_zero_gradient() -> None:
    log_prob = rows(0.1, 0.2, grad=True)
    loss, _ = grpo_loss(log_prob, rows(0.0, 0.0), rows(1.0, 1.0), 0.1, weight=rows(0.0, 0.0))
    loss.backward()
    assert float(loss.detach()) == 0.0 and log_prob.grad is not None and log_prob.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("shape", [(0,), (0, 3)])
def test_a_batch_of_no_rows_is_zero(shape: tuple[int, ...]) -> None:
    """As in the other objectives."""
    log_prob = torch.zeros(shape, requires_grad=True)
    loss, metrics = grpo_loss(log_prob, torch.zeros(shape), torch.zeros(0), 1e-4)
    loss.backward()
    assert float(loss.detach()) == 0 and {k: float(v) for k, v in metrics.items()} == dict.fromkeys(metrics, 0.0)
    nothing = torch.zeros(0, 2, 4, 4)
    assert float(flow_matching_loss(nothing, nothing, nothing)[0]) == 0


def test_grpo_refuses_shapes() -> None:
    with pytest.raises(ValueError, match=r"must both be \[B\] or \[B, W\]"):
        grpo_loss(torch.zeros(2, 3), torch.zeros(2), torch.zeros(2), 0.1)
    with pytest.raises(ValueError, match="advantages"):
        grpo_loss(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(3), 0.1)


def test_weights_are_one_a_row() -> None:
    with pytest.raises(ValueError, match=r"weight has shape \(3,\)"):
        grpo_loss(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2), 0.1, weight=torch.ones(3))


def test_kl_equals_torch_distributions() -> None:
    generator = torch.Generator().manual_seed(0)
    mean, other = (
        torch.randn(2, 3, 4, 5, generator=generator).double(),
        torch.randn(2, 3, 4, 5, generator=generator).double(),
    )
    std = torch.tensor([0.5, 2.0]).double()
    wide = std[:, None, None, None]
    normal = torch.distributions.Normal
    expected = torch.distributions.kl_divergence(normal(mean, wide), normal(other, wide)).mean(dim=(1, 2, 3))
    torch.testing.assert_close(gaussian_kl(mean, other, std), expected, atol=1e-12, rtol=0)
    dt = torch.tensor([-0.1, -0.3]).double()
    published = gaussian_kl(mean, other, std, mode="published", dt=dt)
    torch.testing.assert_close(published, expected * -dt, atol=1e-12, rtol=0)
    with pytest.raises(ValueError, match="needs dt"):
        gaussian_kl(mean, other, std, mode="published")


def test_dt_is_of_rows() -> None:
    for bad in (torch.tensor([[-0.1], [-0.2]]), torch.tensor([[-0.1, -0.2]]), torch.tensor([-0.1])):
        with pytest.raises(ValueError, match="dt has shape"):
            gaussian_kl(torch.ones(2, 3), torch.zeros(2, 3), 1.0, mode="published", dt=bad)


def test_kl_of_an_unknown_mode_is_an_error() -> None:
    wrong: Any = "exakt"
    with pytest.raises(ValueError, match="mode is 'exakt'; it must be exact, published or flow_grpo"):
        gaussian_kl(torch.ones(2, 3), torch.zeros(2, 3), 1.0, mode=wrong, dt=-0.1)


def test_kl_of_a_region_ignores_the_outside() -> None:
    mean, other = torch.zeros(1, 2, 4, 4), torch.zeros(1, 2, 4, 4)
    mean[..., 0, 0] = 3.0
    mean[..., 3, 3] = float("nan")
    region = torch.zeros(1, 1, 4, 4)
    region[..., :2, :2] = 1
    assert float(gaussian_kl(mean, other, 1.0, region)) == pytest.approx(9 / 2 / 4)


# --- sft ---


def test_flow_matching_by_hand() -> None:
    """Target noise - x0 = 2; prediction 1.5 and 4: errors .25 and 4."""
    prediction = torch.tensor([[1.5], [4.0]], requires_grad=True)
    loss, metrics = flow_matching_loss(prediction, torch.full((2, 1), 1.0), torch.full((2, 1), 3.0))
    assert float(loss.detach()) == pytest.approx(2.125) and float(metrics["error"]) == pytest.approx(2.125)
    loss.backward()
    assert prediction.grad is not None and prediction.grad.flatten().tolist() == pytest.approx([-0.5, 2.0])


def test_flow_matching_region_and_full_mask() -> None:
    generator = torch.Generator().manual_seed(0)
    prediction, x0, noise = (torch.randn(2, 3, 4, 4, generator=generator) for _ in range(3))
    region = torch.zeros(2, 1, 4, 4)
    region[:, :, 1:3] = 1
    inside, _ = flow_matching_loss(prediction, x0, noise, region)
    moved = prediction + (1 - region) * 100
    assert float(flow_matching_loss(moved, x0, noise, region)[0]) == float(inside)
    everywhere, _ = flow_matching_loss(prediction, x0, noise, torch.ones_like(region))
    assert float(everywhere) == pytest.approx(float(flow_matching_loss(prediction, x0, noise)[0]), abs=1e-6)


def test_flow_matching_of_a_row_of_weight_0_is_inert_whatever_it_holds() -> None:
    generator = torch.Generator().manual_seed(0)
    prediction, x0, noise = (torch.randn(3, 3, 4, 4, generator=generator) for _ in range(3))
    region, weight = torch.ones(3, 1, 4, 4), torch.tensor([1.0, 0.0, 2.0])
    region[:, :, :2], region[1] = 0, 0
    few = [t[[0, 2]] for t in (prediction, x0, noise, region, weight)]
    expected, expected_metrics = flow_matching_loss(*few)
    for spoiled in (prediction, x0, noise):
        spoiled[1] = float("nan")
    prediction.requires_grad_()
    loss, metrics = flow_matching_loss(prediction, x0, noise, region, weight)
    loss.backward()
    assert float(loss.detach()) == float(expected) and float(metrics["error"]) == float(expected_metrics["error"])
    assert prediction.grad is not None and not bool(prediction.grad[1].any()) and bool(prediction.grad[0].any())
    with pytest.raises(ValueError, match="a row has an empty region"):
        flow_matching_loss(prediction, x0, noise, region, torch.tensor([1.0, 1e-3, 2.0]))
    with pytest.raises(ValueError, match="a row has an empty region"):
        flow_matching_loss(prediction, x0, noise, region)
    with pytest.raises(ValueError, match="region has shape"):
        flow_matching_loss(prediction, x0, noise, region[:1], weight)


def test_denoising_rows_are_fp32_means() -> None:
    prediction = torch.full((1, 4), 256.0, dtype=torch.bfloat16)
    assert denoising_rows(prediction, torch.zeros(1, 4)).tolist() == [65536.0]


def test_denoising_loss_weights() -> None:
    loss, metrics = denoising_loss(rows(1.0, 3.0, float("inf")), weight=rows(1.0, 3.0, 0.0))
    assert float(loss) == pytest.approx(2.5)
    assert float(metrics["error"]) == pytest.approx(2.0)


HALVES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_is_worked_on_in_fp32(dtype: torch.dtype) -> None:
    """1 / 3 is no number of either; a difference of 131,000 is none of fp16."""
    log_prob, old = torch.tensor([0.25, -0.5, 0.125], dtype=dtype), torch.zeros(3, dtype=dtype)
    advantages = torch.tensor([1.0, -0.25, 2.0], dtype=dtype)
    loss, metrics = grpo_loss(log_prob, old, advantages, 10.0)
    exact, exact_metrics = grpo_loss(log_prob.float(), old.float(), advantages.float(), 10.0)
    assert loss.dtype == torch.float32 and torch.equal(loss, exact) and metrics == exact_metrics
    errors = [torch.tensor(e, dtype=dtype) for e in ([0.5, 0.25, 1], [1, 0.5, 2], [0.5, 0.125, 1], [1, 1, 1])]
    loss, metrics = dpo_loss(*errors, beta=0.3)
    exact, exact_metrics = dpo_loss(*(e.float() for e in errors), beta=0.3)
    assert loss.dtype == torch.float32 and torch.equal(loss, exact) and metrics == exact_metrics
    x0, noise = torch.full((1, 2), -65504.0).to(dtype), torch.full((1, 2), 65504.0).to(dtype)
    target = noise.float() - x0.float()
    assert float(flow_matching_loss(target + 1, x0, noise)[0]) == 1.0


@pytest.mark.parametrize("dtype", HALVES)
def test_a_mean_of_halves_is_one_of_fp32(dtype: torch.dtype) -> None:
    found = weighted_mean(torch.tensor([1.0, 1.0, 0.0], dtype=dtype))
    assert found.dtype == torch.float32 and float(found) == pytest.approx(2 / 3, abs=1e-7)


@pytest.mark.parametrize("normalizer", [4, torch.tensor(4), torch.tensor([4.0])])
def test_a_loss_is_a_scalar_whatever_shape_its_normalizer_has(normalizer: Any) -> None:
    found = weighted_mean(rows(1.0, 3.0), normalizer=normalizer)
    assert found.shape == () and float(found) == 1.0


def test_a_normalizer_is_one_number() -> None:
    with pytest.raises(ValueError, match=r"normalizer has shape \(2,\); it must be a scalar"):
        weighted_mean(rows(1.0, 3.0), normalizer=torch.ones(2))


def test_weighted_mean_refuses_shapes() -> None:
    with pytest.raises(ValueError, match="rows"):
        weighted_mean(torch.zeros(2, 3, 4))
    with pytest.raises(ValueError, match="weight"):
        weighted_mean(torch.zeros(2), torch.zeros(3))
