"""GRPO-Guard: ratios that are centred and alike at every noise level; steps balanced by their weight."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from retouch.core.objectives.grpo import grpo_loss, guard_log_probs
from retouch.core.steps import gaussian_log_prob

B, C, H, W = 4, 2, 4, 5
STD = torch.tensor([0.1, 0.3, 0.9, 1.5], dtype=torch.float64)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape or (B, C, H, W), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def wide(row: Tensor) -> Tensor:
    return row.view(-1, 1, 1, 1)


def regulated(
    delta: Tensor, eps: Tensor, std: Tensor = STD, old_mean: Tensor | None = None, region: Tensor | None = None
) -> Tensor:
    """Regulated log-ratio [B] of a state drawn as old_mean + std eps, under a mean that moved by `delta`."""
    old_mean = torch.zeros_like(delta) if old_mean is None else old_mean
    mean, x = old_mean + delta, old_mean + wide(std) * eps
    log_prob, old = (gaussian_log_prob(x, m, std, region) for m in (mean, old_mean))
    new, before = guard_log_probs(log_prob, old, mean, old_mean, std, region)
    return new - before


def test_the_regulated_log_ratio_in_closed_form() -> None:
    """q · mean(eps · delta / q) = mean(eps · delta): what the Gaussians' log-ratio holds besides is -delta² / 2q²."""
    delta, eps = 0.05 * draw(0), draw(1)
    expected = (eps * delta).mean(dim=(1, 2, 3))
    torch.testing.assert_close(regulated(delta, eps), expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(regulated(delta, eps, old_mean=draw(2)), expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(regulated(3 * delta, eps), 3 * expected, atol=1e-12, rtol=0)


def test_guard_by_hand() -> None:
    """q = .5, means 1 and 0 moved by .2 and 0: b = mean(.04, 0) / (2 · .25) = .04; (-.3 + .04) .5 and -.1 · .5."""
    mean, old_mean = torch.tensor([[1.2, 0.0]]), torch.tensor([[1.0, 0.0]])
    new, old = guard_log_probs(torch.tensor([-0.3]), torch.tensor([-0.1]), mean, old_mean, 0.5)
    assert (float(new), float(old)) == pytest.approx((-0.13, -0.05), abs=1e-6)


def test_its_spread_is_that_of_the_move_at_every_noise_level() -> None:
    delta, eps = (0.05 * draw(0, 1, C, H, W)).expand(B, C, H, W), draw(1, 1, C, H, W).expand(B, C, H, W)
    assert regulated(delta, eps).tolist() == pytest.approx([float(regulated(delta, eps)[0])] * B, abs=1e-12)
    plain = (gaussian_log_prob(wide(STD) * eps, delta, STD) - gaussian_log_prob(wide(STD) * eps, 0 * delta, STD)).abs()
    assert float(plain[0] / plain[3]) > 10  # without it the least noisy step would rule the clip


def test_the_expected_ratio_of_a_policy_that_moved_is_centred() -> None:
    """Without the correction its mean is -delta² / 2q²: below 1, where the clip does not look."""
    rows, q = 20_000, 0.4
    delta = torch.full((rows, 1, 2, 2), 0.3 * q, dtype=torch.float64)
    eps, std = draw(3, rows, 1, 2, 2), torch.full((rows,), q, dtype=torch.float64)
    standard_error = 0.3 / math.sqrt(4) / math.sqrt(rows)
    plain = gaussian_log_prob(q * eps, delta, std) - gaussian_log_prob(q * eps, torch.zeros_like(delta), std)
    assert float(plain.mean()) == pytest.approx(-(0.3**2) / 2, abs=4 * standard_error)
    assert float(regulated(delta, eps, std).mean() / q) == pytest.approx(0, abs=4 * standard_error)


def test_the_correction_is_each_rows_own() -> None:
    """Public code averages it over the batch (flow_grpo #244): a row would be pushed by what others did."""
    delta, eps = 0.05 * draw(0), draw(1)
    delta[0] = 0
    together = regulated(delta, eps)
    assert float(together[0]) == 0  # a row that did not move has ratio 1
    for i in range(B):
        alone = regulated(delta[i : i + 1], eps[i : i + 1], STD[i : i + 1])
        assert float(alone) == pytest.approx(float(together[i]), abs=1e-14)


def test_on_policy_the_ratio_is_exactly_1() -> None:
    mean, log_prob = draw(0).float(), draw(1, B).float()
    new, old = guard_log_probs(log_prob, log_prob.clone(), mean, mean.clone(), STD.float())
    assert torch.equal(new, old)
    _, metrics = grpo_loss(new, old, torch.ones(B), 2e-6)
    assert float(metrics["ratio"]) == 1 and float(metrics["max_abs_log_ratio"]) == 0


def test_the_correction_is_differentiated() -> None:
    """Of the whole: d mean(eps · delta) / d mean = eps / dims, on policy and off it."""
    for delta in (torch.zeros(B, C, H, W).double(), 0.05 * draw(0)):
        moved, eps = delta.clone().requires_grad_(), draw(1)
        regulated(moved, eps).sum().backward()
        assert moved.grad is not None
        torch.testing.assert_close(moved.grad, eps / (C * H * W), atol=1e-12, rtol=0)


def test_the_correction_is_taken_over_the_region() -> None:
    delta, eps, region = 0.05 * draw(0), draw(1), torch.zeros(B, 1, H, W, dtype=torch.float64)
    region[..., :2, 1:3] = 1
    found = regulated(delta, eps, region=region)
    torch.testing.assert_close(found, (eps * delta)[..., :2, 1:3].mean(dim=(1, 2, 3)), atol=1e-12, rtol=0)
    outside = delta + 100 * (1 - region)
    torch.testing.assert_close(regulated(outside, eps, region=region), found, atol=0, rtol=0)


def test_a_scalar_std_is_that_of_every_row() -> None:
    arguments = draw(0, B), draw(1, B), draw(2), draw(3)
    scalar = guard_log_probs(*arguments, 0.4)
    rows = guard_log_probs(*arguments, torch.full((B,), 0.4, dtype=torch.float64))
    for one, other in zip(scalar, rows, strict=True):
        torch.testing.assert_close(one, other, atol=0, rtol=1e-12)


def test_guard_refuses_shapes() -> None:
    with pytest.raises(ValueError, match="one shape"):
        guard_log_probs(draw(0, B), draw(0, B), draw(1), draw(1, 1, C, H, W), STD)
    with pytest.raises(ValueError, match="std has shape"):
        guard_log_probs(draw(0, B), draw(0, B), draw(1), draw(1), STD[:3])


# --- the weight of a step ---


def test_steps_weigh_what_they_are_given() -> None:
    """Ratio 1: the gradient of step w of row i is -A_i u_iw / (B W)."""
    log_prob = draw(0, 2, 3).requires_grad_()
    advantages, steps = torch.tensor([1.5, -2.0]).double(), torch.tensor([[10.0, 5.0, 2.0], [4.0, 1.0, 0.5]]).double()
    loss, _ = grpo_loss(log_prob, log_prob.detach(), advantages, 1e-4, step_weight=steps)
    loss.backward()
    assert log_prob.grad is not None
    torch.testing.assert_close(log_prob.grad, -advantages[:, None] * steps / 6, atol=0, rtol=1e-12)
    assert float(loss.detach()) == pytest.approx(float((-advantages[:, None] * steps).mean()))


def test_a_step_weight_of_one_is_none() -> None:
    log_prob, old, advantages = 0.01 * draw(0, B, 3), 0.01 * draw(1, B, 3), draw(2, B)
    plain, metrics = grpo_loss(log_prob, old, advantages, 1e-3)
    weighted, same = grpo_loss(log_prob, old, advantages, 1e-3, step_weight=torch.ones(B, 3).double())
    assert float(weighted) == float(plain)
    assert {k: float(m) for k, m in same.items()} == {k: float(m) for k, m in metrics.items()}
    # metrics are of ratios: no step weight enters
    _, heavy = grpo_loss(log_prob, old, advantages, 1e-3, step_weight=torch.full((B, 3), 9.0).double())
    assert {k: float(m) for k, m in heavy.items()} == {k: float(m) for k, m in metrics.items()}


def test_steps_balanced_by_minus_one_over_dt_pull_alike() -> None:
    """With -1 / dt and the regulated ratio, what a step does to its mean is eps · A / -dt / dims: no std in it."""
    eps, dt = draw(1), torch.tensor([-0.05, -0.1, -0.2, -0.4], dtype=torch.float64)
    mean, old_mean = draw(2).requires_grad_(), draw(2)
    x = old_mean + wide(STD) * eps
    new, old = guard_log_probs(
        gaussian_log_prob(x, mean, STD), gaussian_log_prob(x, old_mean, STD), mean, old_mean, STD
    )
    grpo_loss(new, old, torch.full((B,), 2.0).double(), 1e-3, step_weight=-1 / dt)[0].backward()
    assert mean.grad is not None
    torch.testing.assert_close(mean.grad, -2 * eps / wide(-dt) / (C * H * W) / B, atol=1e-12, rtol=0)


def test_a_step_weight_has_the_shape_of_the_log_probs() -> None:
    with pytest.raises(ValueError, match="step_weight"):
        grpo_loss(draw(0, 3, 3), draw(1, 3, 3), draw(2, 3), 1e-3, step_weight=torch.ones(3))
