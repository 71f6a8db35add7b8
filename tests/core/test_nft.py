"""The DiffusionNFT loss: its gradient at v_old is reward-weighted flow matching; values by hand and by the paper."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from retouch.core.objectives.nft import (
    SMALLEST_SCALE,
    Decay,
    Mode,
    effective_advantages,
    nft_loss,
    old_policy_decay,
    positive_share,
)
from retouch.core.objectives.sft import flow_matching_loss
from retouch.core.schedule import AlphaBarSchedule, FlowSchedule

B, C, H, W = 6, 2, 4, 5
NAN, INF = float("nan"), float("inf")
MODES: tuple[Mode, ...] = get_args(Mode)

ADVANTAGES = torch.tensor([-5.0, -1.3, 0.0, 0.4, 2.0, 5.0], dtype=torch.float64)
SIGMA = torch.tensor([0.05, 0.2, 0.4, 0.6, 0.9, 1.0], dtype=torch.float64)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape or (B, C, H, W), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def wide(row: Tensor) -> Tensor:
    return row.view(-1, 1, 1, 1)


def batch() -> dict[str, Any]:
    """Images, noised; v_old is what a model might say of them."""
    x0, noise = draw(0), draw(1)
    x_t = FlowSchedule.make(4).add_noise(x0, noise, SIGMA)
    return {"x_t": x_t, "x0": x0, "old_velocity": noise - x0 + 0.5 * draw(2), "sigma": SIGMA, "advantages": ADVANTAGES}


def gradient_at(v: Tensor, given: dict[str, Any], mix: float = 0.5, **options: Any) -> Tensor:
    v = v.clone().requires_grad_()
    nft_loss(v, **given, mix=mix, **options)[0].backward()
    assert v.grad is not None
    return v.grad


def loss_at(v: Tensor, given: dict[str, Any], mix: float = 0.5, **options: Any) -> float:
    return float(nft_loss(v, **given, mix=mix, **options)[0])


def scale(given: dict[str, Any]) -> Tensor:
    """w = mean |x0^ - x0| of each row at v_old."""
    return (given["x_t"] - wide(SIGMA) * given["old_velocity"] - given["x0"]).abs().mean(dim=(1, 2, 3))


# --- at v_old ---


@pytest.mark.parametrize("mix", [0.1, 0.5, 1.0])
def test_at_v_old_the_gradient_is_that_of_flow_matching_times_the_advantage(mix: float) -> None:
    """Row by row: A · (s² / w) · grad of mean |v - (noise - x0)|²."""
    given = batch()
    v = given["old_velocity"]
    reference = v.clone().requires_grad_()
    rows = ADVANTAGES * SIGMA**2 / scale(given)
    flow_matching_loss(reference, given["x0"], draw(1), weight=rows, normalizer=B)[0].backward()
    assert reference.grad is not None
    found = gradient_at(v, given, mix)
    torch.testing.assert_close(found, reference.grad, atol=1e-15, rtol=1e-9)
    half = {name: t.float() for name, t in given.items()}
    torch.testing.assert_close(gradient_at(v.float(), half, mix), reference.grad.float(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("epsilon", [False, True])
def test_a_prediction_without_gradient_serves_as_the_old_one(mode: Mode, epsilon: bool) -> None:
    """Bit for bit as another tensor of the same values, and mix has no effect: what trains is the advantage alone."""
    given, weights = batch(), draw(7, C, C)
    times = torch.tensor([3, 20, 40, 60, 80, 98])
    schedule = AlphaBarSchedule.make(torch.linspace(0.999, 0.02, 100), 4) if epsilon else FlowSchedule.make(4)
    time = times if epsilon else SIGMA
    x = schedule.add_noise(given["x0"], draw(1), time)

    def gradient(mix: float, copied: bool) -> Tensor:
        leaf = weights.clone().requires_grad_()
        prediction = torch.einsum("bchw,dc->bdhw", x, leaf)
        old = torch.einsum("bchw,dc->bdhw", x, weights) if copied else prediction.detach()
        x_t, velocity, sigma = schedule.as_flow(x, prediction, time)
        old_velocity = schedule.as_flow(x, old, time)[1]
        loss, _ = nft_loss(velocity, old_velocity, x_t, given["x0"], sigma, ADVANTAGES, mix, mode=mode)
        return torch.autograd.grad(loss, leaf)[0]

    for mix in (0.1, 0.5, 1.0):
        assert torch.equal(gradient(mix, copied=False), gradient(mix, copied=True))
        torch.testing.assert_close(gradient(mix, copied=False), gradient(1.0, copied=False), rtol=1e-9, atol=1e-12)


def test_at_v_old_an_advantage_of_0_has_no_gradient() -> None:
    given = {**batch(), "advantages": torch.zeros(B).double()}
    assert not bool(gradient_at(given["old_velocity"], given, mix=1.0).any())  # where mixing does not round
    assert float(gradient_at(given["old_velocity"], given, mix=0.3).abs().max()) < 1e-15


def test_beyond_the_clip_advantages_are_the_clip() -> None:
    given = batch()
    v = given["old_velocity"] + 0.1 * draw(3)
    beyond = {**given, "advantages": ADVANTAGES * 100}
    clipped = {**given, "advantages": (ADVANTAGES * 100).clamp(-5, 5)}
    assert torch.equal(gradient_at(v, beyond), gradient_at(v, clipped))
    at_2 = gradient_at(given["old_velocity"], beyond, advantage_clip=2.0)
    torch.testing.assert_close(
        at_2, gradient_at(given["old_velocity"], {**given, "advantages": (ADVANTAGES * 100).clamp(-2, 2)})
    )


def test_at_v_old_the_value_says_nothing_of_the_rewards() -> None:
    """People take it for a bug: the loss of a fresh epoch is one number, whatever was scored."""
    given = batch()
    values = [loss_at(given["old_velocity"], {**given, "advantages": a}) for a in (ADVANTAGES, -ADVANTAGES, draw(5, B))]
    assert values == pytest.approx([values[0]] * 3, rel=1e-12)
    # clip / mix times the mean over rows of mean (x0^ - x0)² / w
    error = given["x_t"] - wide(SIGMA) * given["old_velocity"] - given["x0"]
    rows = (error**2).mean(dim=(1, 2, 3)) / scale(given)
    assert values[0] == pytest.approx(5 / 0.5 * float(rows.mean()), rel=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_a_step_on_a_good_image_goes_to_it_and_on_a_bad_one_away(mode: Mode) -> None:
    given = batch()
    v = given["old_velocity"]
    stepped = v - 1e-3 * gradient_at(v, given, mode=mode)

    def distance(velocity: Tensor) -> Tensor:
        return (given["x_t"] - wide(SIGMA) * velocity - given["x0"]).abs().mean(dim=(1, 2, 3))

    change = distance(stepped) - distance(v)
    moved = torch.where(change.abs() > 1e-12, change.sign(), 0.0)
    assert torch.equal(moved, -effective_advantages(ADVANTAGES, 5.0, mode).sign())


def test_the_models_own_estimate_as_the_target_would_have_no_reward_in_it() -> None:
    """The public defect. At v_old such a target is hit exactly, whatever the advantage; the image itself is not."""
    given = batch()
    v = given["old_velocity"]
    own = {**given, "x0": given["x_t"] - wide(SIGMA) * v}
    assert float(gradient_at(v, own, mix=1.0).abs().max()) == 0
    good, bad = (gradient_at(v, {**given, "advantages": torch.full((B,), a).double()}) for a in (1.0, -1.0))
    torch.testing.assert_close(good, -bad)
    assert float(good.abs().amax(dim=(1, 2, 3)).min()) > 1e-4


# --- away from v_old ---


def test_away_from_v_old_a_row_of_advantage_0_is_pulled_back_to_it() -> None:
    """So a failed reward must have weight 0; advantage 0 would train on it."""
    given = {**batch(), "advantages": torch.zeros(B).double()}
    away = 0.1 * draw(4)
    found = gradient_at(given["old_velocity"] + away, given)
    assert bool(((found * away).sum(dim=(1, 2, 3)) > 0).all())


def test_a_row_of_weight_0_is_inert() -> None:
    given, weight = batch(), torch.tensor([1.0, 1.0, 0.0, 1.0, 2.0, 0.0], dtype=torch.float64)
    v = given["old_velocity"] + 0.1 * draw(4)
    kept = weight != 0
    few = {name: t[kept] for name, t in given.items()}
    loss, metrics = nft_loss(v, **given, mix=0.5, weight=weight)
    alone, alone_metrics = nft_loss(v[kept], **few, mix=0.5, weight=weight[kept])
    assert float(loss) == pytest.approx(float(alone), rel=1e-15)
    assert {k: float(m) for k, m in metrics.items()} == pytest.approx({k: float(m) for k, m in alone_metrics.items()})
    found = gradient_at(v, given, weight=weight)
    torch.testing.assert_close(found[kept], gradient_at(v[kept], few, weight=weight[kept]))
    assert not bool(found[~kept].any())


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("name", ["velocity", "old_velocity", "x_t", "x0", "advantages"])
def test_whatever_a_row_of_weight_0_holds(name: str, bad: float) -> None:
    given, weight = batch(), torch.tensor([1.0, 1, 1, 1, 1, 0], dtype=torch.float64)
    given["velocity"] = given["old_velocity"] + 0.1 * draw(4)
    expected, expected_metrics = nft_loss(**given, mix=0.5, weight=weight)
    spoiled = given[name].clone()
    spoiled[5] = bad
    loss, metrics = nft_loss(**{**given, name: spoiled}, mix=0.5, weight=weight)
    assert float(loss) == float(expected)
    assert {k: float(m) for k, m in metrics.items()} == {k: float(m) for k, m in expected_metrics.items()}


@pytest.mark.parametrize("name", ["velocity", "old_velocity", "x_t", "x0", "advantages"])
def test_it_has_no_gradient_either(name: str) -> None:
    tensors, weight = batch(), torch.tensor([1.0, 1, 1, 1, 1, 0], dtype=torch.float64)
    tensors["velocity"] = tensors["old_velocity"] + 0.1 * draw(4)
    tensors[name] = tensors[name].clone()
    tensors[name][5] = NAN
    assert not bool(gradient_at(tensors.pop("velocity"), tensors, weight=weight)[5].any())


# --- values ---


def test_nft_by_hand() -> None:
    """One row of two dims; s = .5, x_t = (1, 2), x0 = (0, 1), v_old = (1, 1), v = (3, 1), m = .5, A = 2.5, c = 5.

    v+ = (2, 1), v- = (0, 1); x0+ = (0, 1.5), x0- = (1, 1.5); errors (0, .5) and (1, .5).
    w+ = .25, w- = .75; L+ = .125 / .25 = .5, L- = .625 / .75 = 5/6; r = 2.5 / 10 + .5 = .75.
    """
    v = torch.tensor([[3.0, 1.0]], dtype=torch.float64, requires_grad=True)
    given = [torch.tensor([row], dtype=torch.float64) for row in ((1.0, 1.0), (1.0, 2.0), (0.0, 1.0))]
    loss, metrics = nft_loss(v, *given, 0.5, torch.tensor([2.5]).double(), mix=0.5)
    assert float(loss.detach()) == pytest.approx(5 * (0.75 * 0.5 + 0.25 * 5 / 6) / 0.5, abs=1e-12)
    assert {k: float(m) for k, m in metrics.items()} == pytest.approx(
        {"positive_error": 0.125, "negative_error": 0.625, "old_velocity_distance": 2.0, "positive_share": 0.75}
    )
    loss.backward()
    # d L± / d x0± = (error) / w±; d x0+ / d v = -s m, d x0- / d v = + s m
    expected = [5 * (0.75 * e / 0.25 * -0.25 + 0.25 * f / 0.75 * 0.25) / 0.5 for e, f in ((0.0, 1.0), (0.5, 0.5))]
    assert v.grad is not None and v.grad[0].tolist() == pytest.approx(expected, abs=1e-12)


def by_the_paper(
    given: dict[str, Any],
    mix: float,
    clip: float,
    mode: str,
    region: np.ndarray | None,
    weight: np.ndarray,
    normalizer: float,
) -> float:
    """Equations of the paper and the self-normalisation of its code, one row after the other, in numpy."""
    total = 0.0
    v, v_old, x_t, x0 = (given[name].numpy() for name in ("velocity", "old_velocity", "x_t", "x0"))
    for i, sigma in enumerate(given["sigma"].tolist()):
        a = float(given["advantages"][i])
        a = {
            "normal": min(max(a, -clip), clip),
            "positive_only": min(max(a, 0.0), clip),
            "negative_only": min(max(a, -clip), 0.0),
            "one_only": 1.0 if a > 0 else 0.0,
            "binary": float(np.sign(a)),
        }[mode]
        r = min(max(a / clip / 2 + 0.5, 0.0), 1.0)
        inside = np.ones((H, W), bool) if region is None else region[i, 0] > 0
        error: list[float] = []
        for implicit in (mix * v[i] + (1 - mix) * v_old[i], (1 + mix) * v_old[i] - mix * v[i]):
            difference = (x_t[i] - sigma * implicit - x0[i])[:, inside]
            error.append(float(np.mean(difference**2) / max(float(np.mean(np.abs(difference))), 1e-5)))
        total += weight[i] * clip * (r * error[0] + (1 - r) * error[1]) / mix
    return total / normalizer


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("region", [False, True])
@pytest.mark.parametrize(("mix", "clip"), [(0.1, 5.0), (1.0, 3.0)])
def test_it_is_the_papers(mode: Mode, region: bool, mix: float, clip: float) -> None:
    given = {**batch(), "velocity": batch()["old_velocity"] + 0.3 * draw(7), "advantages": 2 * ADVANTAGES}
    holes = (draw(8, B, 1, H, W) > 0).double() if region else None
    weight = torch.tensor([1.0, 0.0, 1.0, 0.5, 2.0, 1.0], dtype=torch.float64)
    loss, _ = nft_loss(
        **given, mix=mix, advantage_clip=clip, mode=mode, region=holes, weight=weight, normalizer=torch.tensor(7.0)
    )
    expected = by_the_paper(given, mix, clip, mode, None if holes is None else holes.numpy(), weight.numpy(), 7.0)
    assert float(loss) == pytest.approx(expected, rel=1e-12)


def test_weights_and_a_normalizer_make_micro_batches_add_up() -> None:
    given, weight = batch(), torch.tensor([1.0, 1, 0, 1, 1, 1], dtype=torch.float64)
    v = given["old_velocity"] + 0.2 * draw(4)
    parts = [
        loss_at(v[s], {n: t[s] for n, t in given.items()}, weight=weight[s], normalizer=5.0)
        for s in (slice(0, 1), slice(1, 4), slice(4, 6))
    ]
    assert sum(parts) == pytest.approx(loss_at(v, given, weight=weight), rel=1e-12)


def test_an_image_that_is_hit_does_not_blow_up() -> None:
    """The scale is SMALLEST_SCALE at least: an error of 1e-7 costs 1e-14 / 1e-5, not 1e-7."""
    x0 = draw(0)
    x_t = x0 + 0.5 * draw(1)
    hit = (x_t - x0) / 0.5
    given = {"x_t": x_t, "x0": x0, "sigma": 0.5, "advantages": ADVANTAGES, "old_velocity": hit}
    assert float(gradient_at(hit, given).abs().max()) < 1e-9
    near = {**given, "old_velocity": hit + 2e-7}
    assert SMALLEST_SCALE == 1e-5
    assert loss_at(hit + 2e-7, near) == pytest.approx(5 / 0.5 * 1e-14 / 1e-5, rel=1e-4)


def test_the_scale_is_a_constant_of_the_gradient() -> None:
    """The gradient of mean e² / w with w = mean |e| held, not that of the quotient."""
    given = {**batch(), "advantages": torch.full((B,), 5.0).double()}
    found = gradient_at(given["old_velocity"], given, mix=1.0)
    error = given["x_t"] - wide(SIGMA) * given["old_velocity"] - given["x0"]
    expected = 5 * 2 * error * -wide(SIGMA) / wide(scale(given)) / (C * H * W) / B
    torch.testing.assert_close(found, expected, atol=0, rtol=1e-12)


def test_half_precision_velocities_are_worked_on_in_fp32() -> None:
    given = {name: t.float() for name, t in batch().items()}
    v = (given["old_velocity"] + 0.1).bfloat16()
    loss, metrics = nft_loss(v, **given, mix=0.5)
    assert loss.dtype == metrics["positive_error"].dtype == torch.float32
    assert float(loss) == loss_at(v.float(), given)


def test_a_scalar_time_is_that_of_every_row() -> None:
    given = batch()
    v = given["old_velocity"] + 0.1
    by_row = loss_at(v, {**given, "sigma": torch.full((B,), 0.4, dtype=torch.float64)})
    assert loss_at(v, {**given, "sigma": 0.4}) == pytest.approx(by_row, rel=1e-12)


# --- modes ---


@pytest.mark.parametrize(
    ("mode", "trained", "shares"),
    [
        ("normal", [-5, -2, 0, 3, 5], [0, 0.3, 0.5, 0.8, 1]),
        ("positive_only", [0, 0, 0, 3, 5], [0.5, 0.5, 0.5, 0.8, 1]),
        ("negative_only", [-5, -2, 0, 0, 0], [0, 0.3, 0.5, 0.5, 0.5]),
        ("one_only", [0, 0, 0, 1, 1], [0.5, 0.5, 0.5, 0.6, 0.6]),
        ("binary", [-1, -1, 0, 1, 1], [0.4, 0.4, 0.5, 0.6, 0.6]),
    ],
)
def test_what_a_mode_makes_of_advantages(mode: Mode, trained: list[float], shares: list[float]) -> None:
    found = effective_advantages(torch.tensor([-7.0, -2, 0, 3, 9], dtype=torch.float64), 5.0, mode)
    assert found.tolist() == trained
    assert positive_share(found, 5.0).tolist() == pytest.approx(shares, abs=1e-12)


def test_every_mode_stands_in_the_table() -> None:
    assert set(MODES) == {"normal", "positive_only", "negative_only", "one_only", "binary"}
    wrong: Any = "both"
    with pytest.raises(ValueError, match="mode is 'both'; it must be normal, positive_only, negative_only, one"):
        effective_advantages(torch.zeros(1), 5.0, wrong)
    with pytest.raises(ValueError, match="mode is 'both'"):
        nft_loss(draw(0), **batch(), mix=0.5, mode=wrong)


# --- the region ---


def hole() -> Tensor:
    region = torch.zeros(B, 1, H, W, dtype=torch.float64)
    region[:, :, 1:3, 1:4] = 1
    region[0, :, 3, 3] = 0.5  # a seam
    return region


@pytest.mark.parametrize("name", ["velocity", "old_velocity", "x_t", "x0"])
@pytest.mark.parametrize("change", [100.0, NAN, INF])
def test_nothing_outside_the_region_counts(name: str, change: float) -> None:
    given, region = batch(), hole()
    given["velocity"] = given["old_velocity"] + 0.2 * draw(4)
    expected, metrics = nft_loss(**given, mix=0.5, region=region)
    moved = torch.where(region.expand(B, C, H, W) > 0, given[name], torch.full_like(given[name], change))
    loss, moved_metrics = nft_loss(**{**given, name: moved}, mix=0.5, region=region)
    assert float(loss) == float(expected)
    assert {k: float(m) for k, m in moved_metrics.items()} == {k: float(m) for k, m in metrics.items()}


@pytest.mark.parametrize("name", ["velocity", "old_velocity", "x_t", "x0"])
@pytest.mark.parametrize("change", [100.0, NAN, INF])
def test_nor_does_it_have_or_change_a_gradient(name: str, change: float) -> None:
    given, region = batch(), hole()
    inside = region.expand(B, C, H, W) > 0
    v = given["old_velocity"] + 0.2 * draw(4)
    expected = gradient_at(v, given, region=region)
    assert not bool(expected[~inside].any()) and bool(expected[inside].any())
    tensors = {**given, "velocity": v}
    tensors[name] = torch.where(inside, tensors[name], torch.full_like(v, change))
    assert torch.equal(gradient_at(tensors.pop("velocity"), tensors, region=region), expected)


def test_the_scale_too_is_that_of_the_region() -> None:
    """At v_old: A · (s² / w) · flow matching over the region, with w over the region."""
    given, region = batch(), hole()
    v = given["old_velocity"]
    error = given["x_t"] - wide(SIGMA) * v - given["x0"]
    weights = region.expand(B, C, H, W)
    w = (error.abs() * weights).sum(dim=(1, 2, 3)) / weights.sum(dim=(1, 2, 3))
    reference = v.clone().requires_grad_()
    rows = ADVANTAGES * SIGMA**2 / w
    flow_matching_loss(reference, given["x0"], draw(1), region, weight=rows, normalizer=B)[0].backward()
    assert reference.grad is not None
    torch.testing.assert_close(gradient_at(v, given, region=region), reference.grad, atol=1e-15, rtol=1e-9)


def test_a_row_of_weight_0_may_have_an_empty_region() -> None:
    given, region, weight = batch(), hole(), torch.tensor([1.0, 1, 0, 1, 2, 1], dtype=torch.float64)
    v = given["old_velocity"] + 0.2 * draw(4)
    full, full_metrics = nft_loss(v, **given, mix=0.5, region=region, weight=weight)
    expected = gradient_at(v, given, region=region, weight=weight)
    region[2] = 0
    loss, metrics = nft_loss(v, **given, mix=0.5, region=region, weight=weight)
    assert float(loss) == float(full)
    assert {k: float(m) for k, m in metrics.items()} == {k: float(m) for k, m in full_metrics.items()}
    assert torch.equal(gradient_at(v, given, region=region, weight=weight), expected)
    for others in (None, torch.ones(B).double()):
        with pytest.raises(ValueError, match="a row has an empty region"):
            nft_loss(v, **given, mix=0.5, region=region, weight=others)


def test_a_region_of_everything_is_none() -> None:
    given = batch()
    v = given["old_velocity"] + 0.2 * draw(4)
    everything = torch.ones(B, 1, H, W, dtype=torch.float64)
    assert loss_at(v, given, region=everything) == pytest.approx(loss_at(v, given), abs=1e-12)
    torch.testing.assert_close(gradient_at(v, given, region=everything), gradient_at(v, given), atol=1e-14, rtol=0)


# --- the old policy ---


@pytest.mark.parametrize(
    ("kind", "decays"),
    [
        ("copy", {0: 0, 100: 0, 10_000: 0}),
        ("frozen", {0: 1, 100: 1, 10_000: 1}),
        ("ramp_half", {0: 0, 1: 0.001, 100: 0.1, 499: 0.499, 500: 0.5, 1000: 0.5}),
        ("ramp_full", {0: 0, 74: 0, 75: 0, 76: 0.0075, 100: 0.1875, 208: 0.9975, 209: 0.999, 10_000: 0.999}),
    ],
)
def test_decays_of_the_old_policy(kind: Decay, decays: dict[int, float]) -> None:
    assert {step: old_policy_decay(step, kind) for step in decays} == pytest.approx(decays, abs=1e-12)


def test_every_decay_stands_in_the_table() -> None:
    assert set(get_args(Decay)) == {"copy", "frozen", "ramp_half", "ramp_full"}
    wrong: Any = "slow"
    with pytest.raises(ValueError, match="kind is 'slow'; it must be copy, frozen, ramp_half or ramp_full"):
        old_policy_decay(3, wrong)


# --- errors ---


@pytest.mark.parametrize("mix", [0.0, -0.1, 1.5, NAN])
def test_a_mix_outside_0_to_1(mix: float) -> None:
    with pytest.raises(ValueError, match=r"mix is .*; it must lie in \(0, 1\]"):
        loss_at(draw(0), batch(), mix=mix)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"x0": draw(0, B, C, H, 1)}, "one shape"),
        ({"x_t": draw(0, 1, C, H, W)}, "one shape"),
        ({"old_velocity": draw(0, B, 1, H, W)}, "one shape"),
        ({"advantages": draw(0, B - 1)}, r"advantages have shape \(5,\); they must be \[B\] = \[6\]"),
        ({"advantages": draw(0, B, 1)}, r"advantages have shape \(6, 1\)"),
        ({"sigma": draw(0, B - 1)}, "sigma has shape"),
        ({"weight": torch.ones(1)}, "weight has shape"),
        ({"region": torch.ones(1, 1, H, W)}, "region has shape"),
    ],
)
def test_wrong_shapes_are_errors_not_broadcasts(wrong: dict[str, Any], message: str) -> None:
    given = {**batch(), "velocity": draw(9), **wrong}
    with pytest.raises(ValueError, match=message):
        nft_loss(**given, mix=0.5)


# --- an epsilon model ---


def test_an_epsilon_model_trains_on_the_velocity_that_its_prediction_implies() -> None:
    """At the old prediction the gradient with respect to eps is A · (b² / a²) / w times that of |eps - noise|², w over
    the model's own x0^: nothing of the (a + b) that the state was divided by is left."""
    alpha_bars = torch.tensor([0.98, 0.81, 0.64, 0.36, 0.1, 0.01], dtype=torch.float64)
    schedule = AlphaBarSchedule.make(alpha_bars, 3, steps_offset=0)
    time, x0, noise = torch.arange(B).float(), draw(0), draw(1)
    x = schedule.add_noise(x0, noise, time)
    old = noise + 0.3 * draw(2)
    prediction = old.clone().requires_grad_()
    x_t, velocity, sigma = schedule.as_flow(x, prediction, time)
    old_velocity = schedule.as_flow(x, old, time)[1]
    nft_loss(velocity, old_velocity, x_t, x0, sigma, ADVANTAGES, mix=0.5)[0].backward()
    a, b = alpha_bars.sqrt(), (1 - alpha_bars).sqrt()
    w = ((x - wide(b) * old) / wide(a) - x0).abs().mean(dim=(1, 2, 3))
    expected = wide(ADVANTAGES * (b / a) ** 2 / w) * 2 * (old - noise) / (C * H * W) / B
    assert prediction.grad is not None
    torch.testing.assert_close(prediction.grad, expected, atol=1e-7, rtol=1e-5)  # levels are fp32


def test_weighted_by_the_gain_the_gradient_is_that_of_a_flow_model() -> None:
    """By what each network predicts, at one sigma, with one x0 and one direction of error: s · A · unit error, so that
    noisy times do not weigh sqrt(1 - alpha_bar) / sqrt(alpha_bar)."""
    alpha_bars = torch.tensor([0.98, 0.81, 0.64, 0.36, 0.1, 0.01], dtype=torch.float64)
    schedule = AlphaBarSchedule.make(alpha_bars, 3, steps_offset=0)
    time, x0, noise, wrong = torch.arange(B).float(), draw(0), draw(1), 0.3 * draw(2)

    def gradient(predicted: Tensor, as_flow: Any, weight: Tensor | None) -> Tensor:
        prediction = predicted.clone().requires_grad_()
        x_t, velocity, sigma = as_flow(prediction)
        old = as_flow(predicted)[1]
        nft_loss(velocity, old, x_t, x0, sigma, ADVANTAGES, mix=0.5, weight=weight, normalizer=B)[0].backward()
        assert prediction.grad is not None
        return prediction.grad

    x = schedule.add_noise(x0, noise, time)
    weight = 1 / schedule.velocity_gain(time)
    by_eps = gradient(noise + wrong, lambda eps: schedule.as_flow(x, eps, time), weight)
    sigma = schedule.sigma(time)
    x_t = (1 - wide(sigma)) * x0 + wide(sigma) * noise
    by_velocity = gradient(noise - x0 + wrong, lambda v: (x_t, v, sigma), None)
    torch.testing.assert_close(by_eps, by_velocity, atol=1e-7, rtol=1e-5)
