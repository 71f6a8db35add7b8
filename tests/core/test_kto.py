"""The KTO loss: hand-computed values, its gradient, the published formula, relation to DPO, inert rows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from retouch.core.objectives.dpo import dpo_loss
from retouch.core.objectives.kto import kto_baseline, kto_loss

NAN, INF = float("nan"), float("inf")


def rows(*values: float, grad: bool = False) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def flags(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.bool)


def drawn(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """(error with gradient, reference error, good)."""
    generator = torch.Generator().manual_seed(seed)
    error, reference = (torch.rand(*shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return error.requires_grad_(), reference, torch.rand(shape[0], generator=generator) < 0.6


def gradient(loss: Tensor, error: Tensor) -> Tensor:
    [found] = torch.autograd.grad(loss, error)
    return found


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


# --- values ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_at_the_reference_the_loss_is_half_the_mean_weight(dtype: torch.dtype) -> None:
    error, _, good = (t.detach() for t in drawn(8))
    error = error.to(dtype)
    loss, metrics = kto_loss(error, error.clone(), good, 1000.0)
    assert loss.dtype == dtype and float(loss) == 0.5
    assert {name: float(value) for name, value in metrics.items()} == {"label_accuracy": 0.0, "label_margin": 0.0}
    share = float(good.double().mean())
    weighted = kto_loss(error, error.clone(), good, 1000.0, good_weight=3.0, bad_weight=0.5)[0]
    assert float(weighted) == pytest.approx((3 * share + 0.5 * (1 - share)) / 2, abs=1e-7)


def test_kto_by_hand() -> None:
    """Gains .3 and -.1 have mean .1 = z. Good: 1 - sigmoid(10 (.3 - .1)); bad: 1 - sigmoid(-10 (-.1 - .1))."""
    loss, metrics = kto_loss(rows(0.2, 0.6), rows(0.5, 0.5), flags(1, 0), beta=10)
    assert float(loss.detach()) == pytest.approx(1 - sigmoid(2), abs=1e-12)
    assert float(metrics["label_accuracy"]) == 1.0
    assert float(metrics["label_margin"]) == pytest.approx((0.3 + 0.1) / 2, abs=1e-12)


def test_a_baseline_is_never_negative() -> None:
    """Gains -.3 and -.1: z is 0, not -.2."""
    loss, _ = kto_loss(rows(0.8, 0.6), rows(0.5, 0.5), flags(1, 0), beta=10)
    assert float(loss.detach()) == pytest.approx((1 - sigmoid(-3) + 1 - sigmoid(1)) / 2, abs=1e-12)
    assert float(kto_baseline(rows(-0.2)[0])) == 0.0 and float(kto_baseline(rows(0.2)[0])) == 0.2


@pytest.mark.parametrize("weights", [(1.0, 1.0), (2.0, 0.25)])
@pytest.mark.parametrize("seed", range(4))
def test_the_published_formula(seed: int, weights: tuple[float, float]) -> None:
    """jacklishufan/diffusion-kto (`--loss kto --halo sigmoid`), transcribed as formulas: h = sigmoid of the label's
    sign times beta times the centered log-probability ratio, loss the mean of w (1 - h); errors are minus
    log-probabilities. Value and gradient to 1e-12."""
    error, reference, good = drawn(9, seed=seed)
    ratio = -error - (-reference)
    centered = ratio - ratio.mean().detach().clamp(min=0)
    signs = good.double() * 2 - 1
    lambdas = weights[0] * good.double() + weights[1] * (~good).double()
    published = (lambdas * (1 - torch.sigmoid(signs * 50.0 * centered))).mean()
    loss, _ = kto_loss(error, reference, good, 50.0, *weights)
    assert float(loss.detach()) == pytest.approx(float(published.detach()), abs=1e-12)
    torch.testing.assert_close(gradient(loss, error), gradient(published, error), atol=1e-12, rtol=1e-12)


# --- gradients ---


def test_at_the_reference_the_gradient_is_the_label_times_that_of_the_error() -> None:
    """beta w / 4 / B times +1 for good and -1 for bad: a signed flow matching (facts: k = sign(A) beta / 4)."""
    error, _, good = drawn(6)
    loss, _ = kto_loss(error, error.detach().clone(), good, beta=40, good_weight=2.0)
    expected = torch.where(good, 2 * 10.0, -10.0).double() / 6
    torch.testing.assert_close(gradient(loss, error), expected, atol=1e-12, rtol=0)


def test_a_row_far_from_the_baseline_has_no_gradient() -> None:
    """On either side: won, or hopeless."""
    error = rows(0.0, 2.0, 1.0, grad=True)
    loss, _ = kto_loss(error, rows(1.0, 1.0, 1.0), flags(1, 1, 1), beta=100, baseline=0.0)
    found = gradient(loss, error)
    assert found[:2].abs().max() < 1e-12 and float(found[2]) == pytest.approx(25 / 3)


def test_the_baseline_has_no_gradient() -> None:
    """With it given as a number, value and gradient are the same."""
    error, reference, good = drawn(5, seed=3)
    own, _ = kto_loss(error, reference, good, 20.0)
    given, _ = kto_loss(error, reference, good, 20.0, baseline=float((reference - error.detach()).mean().clamp(min=0)))
    assert float(own.detach()) == pytest.approx(float(given.detach()), abs=1e-12)
    torch.testing.assert_close(gradient(own, error), gradient(given, error), atol=1e-12, rtol=0)


def test_a_good_and_a_bad_row_pull_as_a_pair_of_dpo_at_the_reference() -> None:
    """beta / 4 each over two rows, against beta / 2 times sigmoid(0) of one pair: a quarter of DPO's gradient."""
    error, reference = rows(0.4, 0.7, grad=True), rows(0.4, 0.7)
    kto, _ = kto_loss(error, reference, flags(1, 0), beta=12)
    dpo, _ = dpo_loss(error[:1], error[1:], reference[:1], reference[1:], beta=12)
    torch.testing.assert_close(gradient(kto, error) * 2, gradient(dpo, error), atol=1e-12, rtol=0)


# --- rows, weights, shapes ---


def test_split_rows_with_a_given_baseline_add_up() -> None:
    error, reference, good = drawn(7, 2, seed=1)
    z = kto_baseline((reference - error).mean())
    whole, _ = kto_loss(error, reference, good, 30.0, baseline=z)
    parts = [
        kto_loss(error[a:b], reference[a:b], good[a:b], 30.0, baseline=z, normalizer=7)[0] for a, b in ((0, 3), (3, 7))
    ]
    assert float((parts[0] + parts[1]).detach()) == pytest.approx(float(whole.detach()), abs=1e-12)


@pytest.mark.parametrize("poison", [NAN, INF])
def test_a_row_of_weight_zero_is_inert(poison: float) -> None:
    error, reference, good = drawn(3)
    alone, plain = kto_loss(error, reference, good, 30.0)
    more = torch.cat([error.detach(), rows(poison)]).requires_grad_()
    loss, metrics = kto_loss(
        more, torch.cat([reference, rows(0.5)]), torch.cat([good, flags(1)]), 30.0, weight=rows(1, 1, 1, 0)
    )
    assert float(loss.detach()) == pytest.approx(float(alone.detach()), abs=1e-12)
    assert {n: float(v) for n, v in metrics.items()} == pytest.approx({n: float(v) for n, v in plain.items()})
    found = gradient(loss, more)
    torch.testing.assert_close(found[:3], gradient(alone, error), atol=1e-12, rtol=0)
    assert float(found[3]) == 0.0


@pytest.mark.parametrize(
    ("error", "reference", "good", "says"),
    [
        (rows(1, 2), rows(1), flags(1, 0), "share one shape"),
        (rows(1, 2), rows(1, 2), flags(1), "good must be"),
        (rows(1, 2), rows(1, 2), rows(1, 0), "it must be bool"),
        (rows(1)[None, None], rows(1)[None, None], flags(1), "share one shape"),
    ],
)
def test_wrong_shapes_are_refused(error: Tensor, reference: Tensor, good: Tensor, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        kto_loss(error, reference, good, 10.0)
