"""The DPO loss: exact values at the reference, hand-computed ones away from it, gradients, inert rows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from retouch.core.objectives.dpo import dpo_loss
from retouch.core.objectives.sft import denoising_rows
from retouch.core.schedule import FlowSchedule

NAN, INF = float("nan"), float("inf")


def rows(*values: float, grad: bool = False) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def random_errors(*shape: int, seed: int = 0) -> list[Tensor]:
    """Of win and lose, under the policy and under the reference."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(*shape, generator=generator, dtype=torch.float64) for _ in range(4)]


def numbers(metrics: dict[str, Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


# --- values ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("beta", [1.0, 100.0, 5000.0])
def test_at_the_reference_the_loss_is_ln_2_exactly(dtype: torch.dtype, beta: float) -> None:
    win, lose, _, _ = (e.to(dtype) for e in random_errors(4))
    loss, metrics = dpo_loss(win, lose, win.clone(), lose.clone(), beta)
    assert loss.dtype == dtype
    assert float(loss) == float(torch.log(torch.tensor(2, dtype=dtype)))
    assert numbers(metrics) == {
        "logit": 0.0,
        "preference_accuracy": 0.0,  # nothing is preferred yet
        "win_error_change": 0.0,
        "lose_error_change": 0.0,
    }


def test_dpo_by_hand() -> None:
    """beta 10. Changes -.1 and .1: logit -5 (-.1 - .1) = 1. Changes .4 and 0: logit -2."""
    loss, metrics = dpo_loss(rows(0.2, 0.5), rows(0.5, 0.1), rows(0.3, 0.1), rows(0.4, 0.1), beta=10)
    assert float(loss) == pytest.approx((math.log(1 + math.exp(-1)) + math.log(1 + math.exp(2))) / 2, abs=1e-12)
    assert numbers(metrics) == pytest.approx(
        {"logit": -0.5, "preference_accuracy": 0.5, "win_error_change": 0.15, "lose_error_change": 0.05}
    )


def test_only_the_changes_against_the_reference_count() -> None:
    win, lose, reference_win, reference_lose = random_errors(4)
    loss, _ = dpo_loss(win, lose, reference_win, reference_lose, beta=8)
    more = [e + 3 for e in (win, lose, reference_win, reference_lose)]
    assert float(dpo_loss(*more, beta=8)[0]) == pytest.approx(float(loss), abs=1e-12)
    # of a policy that explains both worse, if the rejected one by more
    assert float(dpo_loss(rows(2.0), rows(4.0), rows(1.0), rows(1.0), beta=1)[0]) < math.log(2)


def test_beta_is_for_means_over_dims() -> None:
    """A beta published for sums is smaller by the number of dims."""
    errors, dims = random_errors(4), 4096
    means, _ = dpo_loss(*errors, beta=5000)
    sums, _ = dpo_loss(*(e * dims for e in errors), beta=5000 / dims)
    assert float(sums) == pytest.approx(float(means), rel=1e-12)
    assert [float(dpo_loss(*errors, beta=b)[1]["logit"]) / b for b in (1, 30)] == pytest.approx(
        [float(dpo_loss(*errors, beta=2)[1]["logit"]) / 2] * 2
    )


def test_a_pair_the_other_way_round_has_the_other_probability() -> None:
    win, lose, reference_win, reference_lose = random_errors(1)
    there, metrics = dpo_loss(win, lose, reference_win, reference_lose, beta=7)
    back, swapped = dpo_loss(lose, win, reference_lose, reference_win, beta=7)
    assert math.exp(-float(there)) + math.exp(-float(back)) == pytest.approx(1, abs=1e-12)
    assert float(swapped["logit"]) == pytest.approx(-float(metrics["logit"]), abs=1e-12)


def test_a_hopeless_pair_does_not_overflow() -> None:
    win = rows(1.0, grad=True)
    loss, _ = dpo_loss(win, rows(0.0), rows(0.0), rows(0.0), beta=5000)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(2500) and gradient(win).tolist() == [2500.0]


# --- gradients ---


def gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def test_the_gradient_pulls_the_win_error_down_and_the_lose_error_up() -> None:
    """beta / 2 · sigmoid(-logit) / B for the win error, the same with a minus for the other."""
    win, lose, reference_win, reference_lose = random_errors(5)
    win.requires_grad_(), lose.requires_grad_()
    loss, _ = dpo_loss(win, lose, reference_win, reference_lose, beta=12)
    loss.backward()
    logit = -6 * ((win - reference_win) - (lose - reference_lose)).detach()
    torch.testing.assert_close(gradient(win), 6 * torch.sigmoid(-logit) / 5, atol=0, rtol=1e-12)
    torch.testing.assert_close(gradient(lose), -gradient(win), atol=0, rtol=0)


def test_metrics_carry_no_gradient() -> None:
    win = rows(0.3, grad=True)
    _, metrics = dpo_loss(win, rows(0.1), rows(0.2), rows(0.2), beta=3)
    assert not any(value.requires_grad for value in metrics.values())


# --- rows, weights, shapes ---


def test_noised_copies_are_pairs_of_their_own() -> None:
    """Means over W of the losses, not the loss of mean errors: each copy compares at its own (t, noise)."""
    errors = random_errors(3, 4)
    loss, metrics = dpo_loss(*errors, beta=20)
    columns = [dpo_loss(*(e[:, w] for e in errors), beta=20) for w in range(4)]
    assert float(loss) == pytest.approx(sum(float(one) for one, _ in columns) / 4, abs=1e-12)
    assert float(metrics["preference_accuracy"]) == pytest.approx(
        sum(float(m["preference_accuracy"]) for _, m in columns) / 4
    )
    assert float(dpo_loss(*(e.mean(1) for e in errors), beta=20)[0]) != pytest.approx(float(loss), abs=1e-3)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("place", range(4))
def test_a_row_of_weight_0_is_inert_whatever_it_holds(bad: float, place: int) -> None:
    errors = random_errors(3)
    alone, metrics = dpo_loss(*(e[:2] for e in errors), beta=5)
    errors[place][2] = bad
    loss, with_bad = dpo_loss(*errors, beta=5, weight=rows(1, 1, 0))
    assert float(loss) == float(alone)
    assert numbers(with_bad) == numbers(metrics)


def test_a_row_of_weight_0_has_no_gradient() -> None:
    win, lose = rows(0.1, 0.9, grad=True), rows(0.3, 0.2, grad=True)
    dpo_loss(win, lose, rows(0.2, 0.2), rows(0.2, 0.2), beta=5, weight=rows(1, 0))[0].backward()
    assert float(gradient(win)[1]) == float(gradient(lose)[1]) == 0
    assert float(gradient(win)[0]) > 0 > float(gradient(lose)[0])


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_nor_has_it_one_where_it_is_not_finite(bad: float) -> None:
    win = rows(0.1, bad, grad=True)
    dpo_loss(win, rows(0.1, 0.1), rows(0.2, 0.2), rows(0.2, 0.2), beta=5, weight=rows(1, 0))[0].backward()
    assert float(gradient(win)[1]) == 0


def test_weights_and_a_normalizer_make_micro_batches_add_up() -> None:
    errors, weight = random_errors(5, 2), rows(1, 1, 0, 1, 2)
    whole, _ = dpo_loss(*errors, beta=9, weight=weight)
    by_hand = sum(float(w) * float(dpo_loss(*(e[i : i + 1] for e in errors), beta=9)[0]) for i, w in enumerate(weight))
    assert float(whole) == pytest.approx(by_hand / 5, abs=1e-12)
    parts = [
        dpo_loss(*(e[s] for e in errors), beta=9, weight=weight[s], normalizer=5.0)[0]
        for s in (slice(0, 2), slice(2, 5))
    ]
    assert float(sum(parts)) == pytest.approx(float(whole), abs=1e-12)


def test_no_pair_at_all_gives_zero_and_zero_gradient() -> None:
    win = rows(0.1, 0.2, grad=True)
    loss, metrics = dpo_loss(win, rows(0, 0), rows(0, 0), rows(0, 0), beta=5, weight=rows(0, 0))
    loss.backward()
    assert float(loss.detach()) == 0 and gradient(win).tolist() == [0, 0]
    assert set(numbers(metrics).values()) == {0.0}


@pytest.mark.parametrize(
    "shapes",
    [
        [(2,), (2,), (2,), (3,)],
        [(2, 3), (2, 3), (2,), (2,)],
        [(2, 1), (2, 3), (2, 3), (2, 3)],
        [(1,), (2,), (2,), (2,)],
        [(), (), (), ()],
        [(2, 3, 4)] * 4,
    ],
)
def test_wrong_shapes_are_errors_not_broadcasts(shapes: list[tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match=r"the four errors must share one shape \[B\] or \[B, W\]; given"):
        dpo_loss(*(torch.zeros(shape) for shape in shapes), beta=1)


def test_weights_are_one_a_row() -> None:
    with pytest.raises(ValueError, match=r"weight has shape \(3,\); it must be .*\[B\] = \[2\]"):
        dpo_loss(*random_errors(2, 3), beta=1, weight=torch.ones(3))


# --- with the errors of a model ---


def denoising_errors(
    x0: Tensor, noise: Tensor, time: Tensor, gain: float = 0.5, region: Tensor | None = None
) -> Tensor:
    """Of the model whose velocity is `gain` times its input."""
    schedule = FlowSchedule.make(4)
    prediction = gain * schedule.add_noise(x0, noise, time)
    return denoising_rows(prediction, schedule.target(x0, noise), region)


def images(rows: int = 4, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Latents of a preferred and of a rejected picture, and noise."""
    generator = torch.Generator().manual_seed(seed)
    win, lose, noise = (torch.randn(rows, 3, 8, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    return win, lose, noise


def test_a_noise_or_a_time_of_its_own_for_the_reference_would_be_seen() -> None:
    """Public code draws both anew for the reference: a policy that equals it then has any loss but ln 2."""
    win, lose, noise = images(64)
    time = torch.rand(64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    own = denoising_errors(win, noise, time), denoising_errors(lose, noise, time)
    same, _ = dpo_loss(*own, *own, beta=2000)
    assert float(same) == pytest.approx(math.log(2), abs=1e-15)
    others: list[dict[str, Any]] = [{"noise": noise.flip(0), "time": time}, {"noise": noise, "time": time.flip(0)}]
    for other in others:
        reference = denoising_errors(win, **other), denoising_errors(lose, **other)
        assert float(dpo_loss(*own, *reference, beta=2000)[0]) > 20


def test_one_noise_for_both_members_leaves_only_what_differs_between_the_pictures() -> None:
    """Of a pair of equal pictures the logit is 0 under any policy; with two noises it is not."""
    win, _, noise = images()
    time = torch.full((4,), 0.6, dtype=torch.float64)

    def logit(lose_noise: Tensor) -> float:
        policy = denoising_errors(win, noise, time, gain=0.7), denoising_errors(win, lose_noise, time, gain=0.7)
        reference = denoising_errors(win, noise, time), denoising_errors(win, lose_noise, time)
        return float(dpo_loss(*policy, *reference, beta=2000)[1]["logit"])

    assert logit(noise) == 0
    assert abs(logit(noise.flip(0))) > 1


def test_with_errors_of_a_region_nothing_outside_counts() -> None:
    """The loss sees rows: the region is that of `denoising_rows`."""
    win, lose, noise = images()
    time = torch.full((4,), 0.6, dtype=torch.float64)
    region = torch.zeros(4, 1, 8, 8, dtype=torch.float64)
    region[..., 2:6, 2:6] = 1

    def loss(win: Tensor, lose: Tensor, noise: Tensor, region: Tensor | None) -> float:
        policy = [denoising_errors(x, noise, time, 0.7, region) for x in (win, lose)]
        reference = [denoising_errors(x, noise, time, 0.5, region) for x in (win, lose)]
        return float(dpo_loss(*policy, *reference, beta=20)[0])

    outside = (1 - region) * 50
    inside_only = loss(win, lose, noise, region)
    assert loss(win + outside, lose - outside, noise + outside, region) == inside_only
    assert loss(win, lose, noise, torch.ones_like(region)) == pytest.approx(loss(win, lose, noise, None), abs=1e-12)
    assert inside_only != pytest.approx(loss(win, lose, noise, None), abs=1e-6)
