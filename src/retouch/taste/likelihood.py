"""How probable the answers of a voter are, and the fit of a linear score to them. numpy alone.

An image has a score s. Two images side by side are a choice among alternatives with these log-weights (Davidson 1970,
"On extending the Bradley-Terry model to accommodate ties"; the constant alternative of Luce's choice axiom):

    left: s_l        right: s_r        tie: (s_l + s_r) / 2 + t        both bad: b

An image alone is accepted with log-weight s, and rejected with b. So the two kinds of votes share one scale, and b is
the score of an image that the voter would as soon have as not. With s = <w, x> all log-weights are linear in (w, t, b):
the negative log-likelihood is convex, and with a quadratic penalty on w it has one minimum.

Answers that never occur are no alternatives: t and b are then no parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

Answer = Literal["left", "right", "tie", "both_bad", "good", "bad"]

PAIR_ANSWERS: tuple[Answer, ...] = ("left", "right", "tie", "both_bad")
SINGLE_ANSWERS: tuple[Answer, ...] = ("good", "bad")

_WEAK = 1e-2
"""Penalty on t and b: they stay finite where all answers are the same."""

_STEPS = 100
"""Newton steps, at most; about 8 are taken."""


@dataclass(frozen=True)
class Choices:
    """Votes as choices. Legend: N votes, D numbers of an image, K = 4 alternatives.

    Attributes:
        alternatives: [N, K, D + 2] rows such that log-weights are `alternatives @ (w, t, b)`.
        offered: [N, K] whether an alternative was one.
        answers: [N] index of the alternative that was chosen.
    """

    alternatives: Floats
    offered: NDArray[np.bool_]
    answers: NDArray[np.intp]

    def __len__(self) -> int:
        return len(self.answers)

    def __getitem__(self, chosen: NDArray[np.bool_] | NDArray[np.intp]) -> Choices:
        return Choices(self.alternatives[chosen], self.offered[chosen], self.answers[chosen])


def choices(left: Floats, right: Floats, answers: Sequence[Answer]) -> Choices:
    """The choices of votes.

    Args:
        left, right: [N, D] of the two images of a pair; of an image alone, both are its numbers.
        answers: [N].
    """
    count, width = left.shape
    alternatives = np.zeros((count, 4, width + 2))
    alternatives[:, 0, :width], alternatives[:, 1, :width] = left, right
    alternatives[:, 2, :width] = (left + right) / 2
    alternatives[:, 2, width] = alternatives[:, 3, width + 1] = 1
    alone = np.array([answer in SINGLE_ANSWERS for answer in answers], dtype=bool)
    rejects = bool(alone.any()) or "both_bad" in answers
    offered = np.ones((count, 4), dtype=bool)
    offered[:, 1], offered[:, 2], offered[:, 3] = ~alone, ~alone & ("tie" in answers), rejects
    index = {**{name: k for k, name in enumerate(PAIR_ANSWERS)}, "good": 0, "bad": 3}
    return Choices(alternatives, offered, np.array([index[answer] for answer in answers], dtype=np.intp))


@dataclass(frozen=True)
class Fit:
    """A fitted score.

    Attributes:
        weights: [D].
        tie, bad: t and b of the module.
        curvature: [D + 2, D + 2] Hessian of the penalised negative log-likelihood, for (weights, tie, bad).
        loss: negative log-likelihood without the penalty, summed over votes.
    """

    weights: Floats
    tie: float
    bad: float
    curvature: Floats
    loss: float

    @property
    def covariance(self) -> Floats:
        """[D + 2, D + 2] of the Laplace approximation."""
        return np.asarray(np.linalg.inv(self.curvature), np.float64)

    @property
    def parameters(self) -> Floats:
        """[D + 2]."""
        return np.append(self.weights, [self.tie, self.bad])


def log_probabilities(found: Choices, parameters: Floats) -> Floats:
    """[N, K] logarithms of the probabilities of the alternatives; -inf where one is not offered."""
    logits = np.where(found.offered, found.alternatives @ parameters, -np.inf)
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def negative_log_likelihood(found: Choices, parameters: Floats) -> float:
    """Summed over votes."""
    return -float(log_probabilities(found, parameters)[np.arange(len(found)), found.answers].sum())


def fit(found: Choices, penalty: float, start: Floats | None = None) -> Fit:
    """The minimum of the negative log-likelihood + penalty / 2 |w|², by Newton's method.

    Args:
        start: [D + 2] parameters to start from, which change the time that it takes; None: 0.
    """
    size = found.alternatives.shape[2]
    weight = np.full(size, _WEAK)
    weight[:-2] = penalty
    at, value = np.zeros(size) if start is None else start, np.inf
    for _ in range(_STEPS):
        gradient, curvature = _derivatives(found, at, weight)
        step = np.linalg.solve(curvature, gradient)
        before = negative_log_likelihood(found, at) + float(weight @ (at * at)) / 2
        length = 1.0
        while True:  # halved until the value falls as a convex function's must
            new = at - length * step
            value = negative_log_likelihood(found, new) + float(weight @ (new * new)) / 2
            if value <= before - 1e-4 * length * float(gradient @ step) or length < 1e-6:
                break
            length /= 2
        at = new
        if before - value < 1e-10 * max(1.0, before):
            break
    curvature = _derivatives(found, at, weight)[1]
    return Fit(at[:-2], float(at[-2]), float(at[-1]), curvature, negative_log_likelihood(found, at))


def _derivatives(found: Choices, at: Floats, weight: Floats) -> tuple[Floats, Floats]:
    """Gradient [P] and Hessian [P, P] of the penalised negative log-likelihood."""
    used = found.offered.any(axis=0)  # two of four, of voters who always decide
    probability, alternatives = np.exp(log_probabilities(found, at))[:, used], found.alternatives[:, used]
    mean = np.einsum("nk,nkp->np", probability, alternatives)
    chosen = found.alternatives[np.arange(len(found)), found.answers]
    flat = (alternatives * np.sqrt(probability)[:, :, None]).reshape(-1, alternatives.shape[2])
    return (mean - chosen).sum(0) + weight * at, flat.T @ flat - mean.T @ mean + np.diag(weight)
