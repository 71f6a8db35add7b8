"""The likelihood of votes against hand-computed values, its invariants, and its minimum against another optimizer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from retouch.taste.likelihood import Answer, Choices, Floats, choices, fit, log_probabilities, negative_log_likelihood

LN2 = float(np.log(2))


def probabilities(left: float, right: float, answers: list[Answer], tie: float = 0.0, bad: float = 0.0) -> Floats:
    rows = [np.full((len(answers), 1), value) for value in (left, right)]
    return np.exp(log_probabilities(choices(rows[0], rows[1], answers), np.array([1.0, tie, bad])))


def test_probabilities_are_those_of_davidson_with_a_constant_alternative() -> None:
    alone = probabilities(LN2, 0.0, ["left"])
    np.testing.assert_allclose(alone, [[2 / 3, 1 / 3, 0, 0]])  # Bradley and Terry: 2 to 1
    tied = probabilities(LN2, 0.0, ["left", "tie"], tie=LN2)
    total = 2 + 1 + 2 * 2**0.5  # the tie weighs nu sqrt(2 x 1), nu = 2
    np.testing.assert_allclose(tied, [[2 / total, 1 / total, 2 * 2**0.5 / total, 0]] * 2)
    rejected = probabilities(LN2, 0.0, ["left", "both_bad"], bad=np.log(3))
    np.testing.assert_allclose(rejected, [[2 / 6, 1 / 6, 0, 3 / 6]] * 2)
    single = probabilities(LN2, LN2, ["good"], bad=0.0)
    np.testing.assert_allclose(single, [[2 / 3, 0, 0, 1 / 3]])


def test_both_bad_leaves_the_odds_of_the_two_images_as_they_are() -> None:
    free = probabilities(1.3, -0.4, ["left"])
    also = probabilities(1.3, -0.4, ["left", "tie", "both_bad"], tie=0.7, bad=-0.2)
    np.testing.assert_allclose(also[:, 0] / also[:, 1], free[0, 0] / free[0, 1])


def test_a_fit_of_one_feature_is_the_log_odds() -> None:
    left = np.ones((10, 1))
    found = fit(choices(left, 0 * left, ["left"] * 8 + ["right"] * 2), penalty=1e-9)
    assert found.weights[0] == pytest.approx(np.log(8 / 2), abs=1e-6)
    assert (found.tie, found.bad) == (0.0, 0.0)  # never given: no parameters
    assert found.covariance[0, 0] == pytest.approx(1 / (10 * 0.8 * 0.2), rel=1e-6)


def votes(count: int = 60, width: int = 4) -> Choices:
    draw = np.random.default_rng(3)
    left, right = draw.normal(size=(2, count, width))
    answers: list[Answer] = [
        *draw.choice(np.array(["left", "right", "tie", "both_bad"]), count - 8),
        *["good"] * 5,
        *["bad"] * 3,
    ]
    return choices(left, right, answers)


@pytest.mark.parametrize("penalty", [0.1, 10.0])
def test_the_fit_is_the_minimum_that_another_optimizer_finds(penalty: float) -> None:
    found = votes()
    ours = fit(found, penalty)
    at = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    rows, offered = torch.tensor(found.alternatives), torch.tensor(found.offered)
    weight = torch.tensor([penalty] * 4 + [1e-2] * 2, dtype=torch.float64)
    optimizer = torch.optim.LBFGS([at], max_iter=500, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        logits = (rows @ at).masked_fill(~offered, -torch.inf)
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(found.answers), reduction="sum")
        loss = loss + (weight * at * at).sum() / 2
        loss.backward()
        return loss

    optimizer.step(closure)
    np.testing.assert_allclose(ours.parameters, at.detach().numpy(), atol=1e-5)
    assert ours.loss == pytest.approx(negative_log_likelihood(found, ours.parameters))


def test_left_and_right_are_alike() -> None:
    draw = np.random.default_rng(1)
    left, right = draw.normal(size=(2, 30, 3))
    answers: list[Answer] = [*draw.choice(np.array(["left", "right", "tie"]), 30)]
    mirrored: list[Answer] = [{"left": "right", "right": "left"}.get(a, a) for a in answers]  # type: ignore[misc]
    one, other = fit(choices(left, right, answers), 1.0), fit(choices(right, left, mirrored), 1.0)
    np.testing.assert_allclose(one.parameters, other.parameters, atol=1e-9)


def test_answers_that_are_all_alike_give_a_finite_fit() -> None:
    left = np.ones((20, 1))
    for answer in ("left", "tie", "both_bad", "good", "bad"):
        found = fit(choices(left, 0 * left, [answer] * 20), 1.0)
        assert np.isfinite(found.parameters).all(), answer
