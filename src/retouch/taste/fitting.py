"""The fit of a taste: a linear score on frozen features from votes, with what it is worth on images it has not seen.

Every number about quality is measured on held-out examples: all votes on the images of an example are in the same fold,
and the penalty of a fold's fit is chosen on the other folds alone. Legend: V votes, I images, D numbers of an image.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from retouch.errors import ConfigError
from retouch.observe.statistics import bootstrap_intervals
from retouch.taste.likelihood import Choices, Fit, Floats, choices, fit, negative_log_likelihood
from retouch.taste.votes import MIRRORED, Vote

PENALTIES = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Tried for features of variance 1 each."""

_FOLDS = 5
_MOST_COMPONENTS = 256
"""Directions of the features that are fitted, those in which the voted images differ most."""

MIN_EXAMPLES = 10
"""Fewer give no folds and no interval worth a decision."""

_SHARES = (0.25, 0.5, 0.75, 1.0)
_BINS = ((0.5, 0.6), (0.6, 0.7), (0.7, 0.8), (0.8, 0.9), (0.9, 1.0))


@dataclass(frozen=True)
class Measured:
    """A share and its 95 % interval.

    Attributes:
        count: of what it is a share of.
    """

    value: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}] of {self.count}"


@dataclass(frozen=True)
class Quality:
    """Quality of a fit.

    Attributes:
        accuracy: share of held-out votes for one of two images in which the score agrees; None without such votes.
        ranking: probability that a held-out image that was called good scores above one that was called bad; None
            without votes on single images.
        consistency: share of repeated pairs that the voter answered with the same image.
        ceiling: highest accuracy of any score, from the repeated pairs that were decided both times: errors at a
            rate e agree in (1 - e)² + e² of them.
        calibration: (expected, observed, votes) of held-out votes by the probability of their likelier side.
        curve: (share of the training votes, accuracy).
    """

    accuracy: Measured | None
    ranking: Measured | None
    consistency: Measured | None
    ceiling: Measured | None
    calibration: tuple[tuple[float, float, int], ...]
    curve: tuple[tuple[float, float], ...]

    @property
    def is_above_chance(self) -> bool:
        """At 95 %, in one kind of votes."""
        return any(one is not None and one.low > 0.5 for one in (self.accuracy, self.ranking))


@dataclass(frozen=True)
class Features:
    """Numbers of images, and the directions in which they are fitted.

    Attributes:
        keys: of images (`VotedImage.key`) -> row.
        values: [I, D].
    """

    keys: Mapping[str, int]
    values: Floats

    @cached_property
    def scale(self) -> tuple[Floats, Floats]:
        """Mean and standard deviation [D] over the images; 1 for a constant one, whose rounding in fp32 must not become
        a feature."""
        mean, deviation = self.values.mean(axis=0), self.values.std(axis=0)
        return mean, np.where(deviation > 1e-8 + 1e-5 * np.abs(mean), deviation, 1.0)

    @cached_property
    def directions(self) -> Floats:
        """[D, C] orthonormal: a penalty on w is the same in them as in the standardised features."""
        mean, deviation = self.scale
        _, sizes, rows = np.linalg.svd((self.values - mean) / deviation, full_matrices=False)
        return rows[: min(_MOST_COMPONENTS, int((sizes > 1e-8 * sizes[0]).sum()) or 1)].T

    @cached_property
    def components(self) -> Floats:
        """[I, C]."""
        mean, deviation = self.scale
        return (self.values - mean) / deviation @ self.directions

    def choices(self, votes: Sequence[Vote]) -> Choices:
        left = self.components[[self.keys[vote.left.key] for vote in votes]]
        right = self.components[[self.keys[(vote.right or vote.left).key] for vote in votes]]
        return choices(left, right, [vote.answer for vote in votes])


@dataclass(frozen=True)
class FittedTaste:
    """A score of an image: sigmoid(<weights, features> - threshold), the probability that the voter accepts it.

    Attributes:
        weights: [D] for the features as the extractor returns them.
        noise: standard deviation of the value of an image, relative to others of its example, for want of votes.
    """

    weights: Floats
    threshold: float
    penalty: float
    noise: float


def fit_head(features: Features, votes: Sequence[Vote]) -> FittedTaste:
    """The head of all votes."""
    found, folds = features.choices(votes), folds_of(votes)
    penalty = best_penalty(found, folds)
    fitted = fit(found, penalty)
    mean, deviation = features.scale
    weights = features.directions @ fitted.weights / deviation
    scores = features.components @ fitted.weights
    # without a rejecting answer the scale has no zero: the middle of the voted images takes its place
    zero = fitted.bad if found.offered[:, 3].any() else float(scores.mean())
    return FittedTaste(weights, zero + float(weights @ mean), penalty, _noise(fitted, features, votes, scores - zero))


def _noise(fitted: Fit, features: Features, votes: Sequence[Vote], scores: Floats) -> float:
    """Median uncertainty of a voted image's value: the difference of two scores of an example has the variance d' C d,
    d the difference of their features. 0 where no example has two images."""
    of_example: dict[str, set[int]] = {}
    for vote in votes:
        of_example.setdefault(vote.left.example, set()).update(features.keys[image.key] for image in vote.images)
    pairs = np.array([pair for rows in of_example.values() for pair in combinations(sorted(rows), 2)], dtype=np.intp)
    if not len(pairs):
        return 0.0
    differences = features.components[pairs[:, 0]] - features.components[pairs[:, 1]]
    variance = np.einsum("np,pq,nq->n", differences, fitted.covariance[:-2, :-2], differences)
    values = 1 / (1 + np.exp(-scores))
    return float(np.median(np.sqrt(variance / 2))) * float((values * (1 - values)).mean())


def folds_of(votes: Sequence[Vote], count: int = _FOLDS) -> NDArray[np.intp]:
    """[V] fold of each vote: that of its example, sampled with a fixed seed.

    Raises:
        ConfigError: fewer examples than a fit needs.
    """
    examples = sorted({vote.left.example for vote in votes})
    if len(examples) < MIN_EXAMPLES:
        raise ConfigError(
            f"votes on the images of {len(examples)} examples; a fit needs {MIN_EXAMPLES} or more, because it is "
            "measured on examples that it has not seen; vote on more"
        )
    random.Random(0).shuffle(examples)
    fold = {example: place % count for place, example in enumerate(examples)}
    return np.array([fold[vote.left.example] for vote in votes], dtype=np.intp)


def best_penalty(found: Choices, folds: NDArray[np.intp]) -> float:
    """The penalty under which votes of left-out folds are likeliest."""

    losses = dict.fromkeys(PENALTIES, 0.0)
    for fold in np.unique(folds):
        train, held, at = found[folds != fold], found[folds == fold], None
        for penalty in reversed(PENALTIES):  # each fit starts from the one before
            at = fit(train, penalty, at).parameters
            losses[penalty] += negative_log_likelihood(held, at)
    return min(losses, key=losses.__getitem__)


def measure(features: Features, votes: Sequence[Vote]) -> Quality:
    """The quality of a fit to votes, see the module."""
    found, folds = features.choices(votes), folds_of(votes)
    penalties = {int(f): best_penalty(found[folds != f], folds[folds != f]) for f in np.unique(folds)}
    held = _held_out(found, folds, penalties, 1.0)
    examples = [vote.left.example for vote in votes]
    scores = np.where(found.offered[:, 1], held[:, 0] - held[:, 1], held[:, 0] - held[:, 3])
    pairs, alone = found.offered[:, 1], ~found.offered[:, 1]
    decided = pairs & (found.answers < 2)
    agrees = (scores > 0) == (found.answers == 0)
    sure = 1 / (1 + np.exp(-np.abs(scores[decided])))
    return Quality(
        accuracy=_share(agrees[decided], np.array(examples)[decided]),
        ranking=_ranking(scores[alone], found.answers[alone] == 0, np.array(examples)[alone], folds[alone]),
        consistency=(repeats := consistency(votes))[0],
        ceiling=repeats[1],
        calibration=tuple(
            (float(sure[inside].mean()), float(agrees[decided][inside].mean()), int(inside.sum()))
            for low, high in _BINS
            if (inside := (sure >= low) & ((sure < high) | (high == 1.0))).any()
        ),
        curve=tuple(
            (share, _agreement(_held_out(found, folds, penalties, share), found, decided))
            for share in (_SHARES if decided.any() else ())
        ),
    )


def _held_out(found: Choices, folds: NDArray[np.intp], penalties: Mapping[int, float], share: float) -> Floats:
    """[V, K] log-weights of the alternatives by a fit without the vote's fold, to a share of the other votes."""
    result, draw = np.zeros(found.offered.shape), np.random.default_rng(0)
    for fold, penalty in penalties.items():
        train = draw.permutation(np.flatnonzero(folds != fold))
        fitted = fit(found[train[: max(1, round(share * len(train)))]], penalty)
        result[folds == fold] = found.alternatives[folds == fold] @ fitted.parameters
    return result


def _agreement(held: Floats, found: Choices, decided: NDArray[np.bool_]) -> float:
    return float((((held[:, 0] > held[:, 1]) == (found.answers == 0))[decided]).mean())


def _share(agrees: NDArray[np.bool_], examples: NDArray[np.str_]) -> Measured | None:
    """A share of votes; the interval samples examples, because the votes of one are not independent."""
    if not len(agrees):
        return None
    rows = [np.flatnonzero(examples == example) for example in dict.fromkeys(examples.tolist())]

    def of(drawn: NDArray[np.intp]) -> Mapping[str, float]:
        return {"share": float(agrees[np.concatenate([rows[i] for i in drawn])].mean())}

    low, high = bootstrap_intervals(len(rows), of).get("share", (0.0, 1.0))
    return Measured(float(agrees.mean()), low, high, len(agrees))


def _ranking(
    scores: Floats, good: NDArray[np.bool_], examples: NDArray[np.str_], folds: NDArray[np.intp]
) -> Measured | None:
    """Share of the pairs of a good and a bad image of one fold in which the good one scores higher."""
    rows = [np.flatnonzero(examples == example) for example in dict.fromkeys(examples.tolist())]

    def of(drawn: Sequence[int] | NDArray[np.intp]) -> Mapping[str, float]:
        chosen = np.concatenate([rows[i] for i in drawn])
        wins, pairs = 0.0, 0
        for fold in np.unique(folds[chosen]):
            inside = chosen[folds[chosen] == fold]
            difference = scores[inside][good[inside]][:, None] - scores[inside][~good[inside]][None]
            wins, pairs = wins + float((difference > 0).sum() + (difference == 0).sum() / 2), pairs + difference.size
        return {"ranking": wins / pairs} if pairs else {}

    if not len(rows) or not (whole := of(range(len(rows)))):
        return None
    low, high = bootstrap_intervals(len(rows), of).get("ranking", (0.0, 1.0))
    return Measured(whole["ranking"], low, high, len(scores))


def consistency(votes: Sequence[Vote]) -> tuple[Measured | None, Measured | None]:
    """Consistency and ceiling from the pairs that were shown twice."""
    first: dict[tuple[str, int | None], Vote] = {(vote.voter, vote.number): vote for vote in votes}
    pairs = [(first[vote.voter, vote.repeats], vote) for vote in votes if (vote.voter, vote.repeats) in first]
    alike = [MIRRORED.get(one.answer, one.answer) == again.answer for one, again in pairs]
    both = [same for same, pair in zip(alike, pairs, strict=True) if all(v.answer in MIRRORED for v in pair)]
    found = wilson(sum(both), len(both))
    if found is not None:
        low, high = _best_accuracy(found.low), _best_accuracy(found.high)
        found = Measured(_best_accuracy(found.value), low, high, found.count)
    return wilson(sum(alike), len(alike)), found


def _best_accuracy(agreement: float) -> float:
    """1 - e where (1 - e)² + e² is the agreement."""
    return (1 + max(0.0, 2 * agreement - 1) ** 0.5) / 2


def wilson(hits: int, count: int) -> Measured | None:
    """A share with Wilson's score interval at 95 %; None of nothing."""
    if not count:
        return None
    z, share = 1.959964, hits / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * (share * (1 - share) / count + z * z / (4 * count * count)) ** 0.5
    return Measured(share, max(0.0, middle - half), min(1.0, middle + half), count)
