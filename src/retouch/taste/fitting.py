"""The fit of a taste: a linear score on frozen features from votes, with what it is worth on images it has not seen.

Every number about quality is measured on held-out examples: all votes on the images of an example, or of one
photograph, are in the same fold, and the settings of a fold's fit are chosen on the other folds alone. Legend: V votes,
I images, D numbers of an image.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from retouch.errors import ConfigError
from retouch.observe.statistics import bootstrap_intervals
from retouch.taste.head import Votable
from retouch.taste.likelihood import PAIR_ANSWERS, Choices, Fit, Floats, choices, fit
from retouch.taste.votes import MIRRORED, Vote, groups_of

PENALTIES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Tried for features of the variance 1 in all."""

SHARES = (0.0, 0.3, 1.0)
"""Tried weights of an encoder's vectors beside the statistics: tastes of colour and contrast need none of them."""

_FOLDS = 5
_MOST_COMPONENTS = 256
"""Directions of the features that are fitted, those in which the voted images differ most."""

MIN_EXAMPLES = 10
"""Fewer give no folds and no interval worth a decision."""

_PARTS = (0.25, 0.5, 0.75, 1.0)
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

    Votes on pairs are about differences within examples: features are scaled by these, which are small beside those
    between examples. Statistics and vectors have the same variance in all, times `share`² for the vectors.

    Attributes:
        keys: of images (`VotedImage.key`) -> row.
        values: [I, D].
        statistics: number of the last features, which are no encoder's; None: all.
        share: see `SHARES`.
        pairs, alone: whether any vote is on a pair, and on a single image.
    """

    keys: Mapping[str, int]
    values: Floats
    statistics: int | None = None
    share: float = 1.0
    pairs: bool = True
    alone: bool = False

    @cached_property
    def _centred(self) -> Floats:
        """[I, D] differences from the mean of the example; without pairs, of all."""
        rows: dict[str, list[int]] = {}
        for key, row in self.keys.items():
            rows.setdefault(key.rpartition(" ")[0] if self.pairs else "", []).append(row)
        centred = np.zeros_like(self.values)
        for group in rows.values():
            centred[group] = self.values[group] - self.values[group].mean(axis=0)
        return centred

    @cached_property
    def scale(self) -> Floats:
        """[D] factors; those of a constant are not large: its rounding in fp32 must not become a feature."""
        deviation, width = self._centred.std(axis=0), self.values.shape[1]
        least = 1e-8 + 1e-5 * np.abs(self.values.mean(axis=0))
        vectors = 0 if self.statistics is None else width - self.statistics
        weight = np.full(width, (width - vectors) ** -0.5)
        weight[:vectors] = self.share * max(1, vectors) ** -0.5
        return weight / np.where(deviation > least, deviation, 1.0)

    @cached_property
    def directions(self) -> Floats:
        """[D, C] orthonormal: a penalty on w is the same in them as in the scaled features. Those of differences within
        examples are blind to an example of one image, which a vote on it alone is not."""
        differences = self.values - self.values.mean(axis=0) if self.alone else self._centred
        _, sizes, rows = np.linalg.svd(differences * self.scale, full_matrices=False)
        return rows[: min(_MOST_COMPONENTS, int((sizes > 1e-6 * sizes[0]).sum()) or 1)].T

    @cached_property
    def components(self) -> Floats:
        """[I, C]."""
        return (self.values - self.values.mean(axis=0)) * self.scale @ self.directions

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
    share: float
    noise: float


def fit_head(features: Features, votes: Sequence[Vote]) -> FittedTaste:
    """The head of all votes."""
    variants = _variants(features, votes)
    share, penalty = best_setting({share: one.choices(votes) for share, one in variants.items()})
    features = variants[share]
    found = features.choices(votes)
    fitted = fit(found, penalty)
    scores, zero, unit = features.components @ fitted.weights, fitted.bad, 1.0
    if not found.offered[:, 3].any():
        # pairs alone give no zero and compare no examples: the voted images are its middle, and examples whose
        # scores lie far apart must not all have the value 0 or 1, which has no gradient
        zero, unit = float(scores.mean()), max(1.0, float(scores.std()))
    weights = features.scale * (features.directions @ fitted.weights) / unit
    threshold = zero / unit + float(weights @ features.values.mean(axis=0))
    noise = _noise(fitted, features, votes, (scores - zero) / unit) / unit
    return FittedTaste(weights, threshold, penalty, share, noise)


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


def votable(statistics: Floats) -> Votable:
    """The images that are like those with these statistics [I, S]: within the Mahalanobis distance of 95 % of them. The
    covariance of few images is too narrow, and is shrunk towards its diagonal."""
    count, width = statistics.shape
    center, covariance = statistics.mean(axis=0), np.cov(statistics.T)
    diagonal = np.diag(np.diag(covariance) + 1e-5)
    shrunk = (count * covariance + width * diagonal) / (count + width) + 1e-2 * diagonal
    whitening = np.linalg.cholesky(np.linalg.inv(shrunk))
    distances = np.linalg.norm((statistics - center) @ whitening, axis=1)
    return Votable(center, whitening, float(np.quantile(distances, 0.95)))


def folds_of(votes: Sequence[Vote]) -> NDArray[np.intp]:
    """[V] fold of each vote: that of its group (`groups_of`), sampled with a fixed seed.

    Raises:
        ConfigError: fewer groups than a fit needs.
    """
    groups = groups_of(votes)
    examples = sorted({*groups})
    if len(examples) < MIN_EXAMPLES:
        raise ConfigError(
            f"votes on the images of {len(examples)} examples or photographs; a fit needs {MIN_EXAMPLES} or more, "
            "because it is measured on examples that it has not seen; vote on images of more examples (40 for --half)"
        )
    random.Random(0).shuffle(examples)
    fold = {example: place % _FOLDS for place, example in enumerate(examples)}
    return np.array([fold[group] for group in groups], dtype=np.intp)


def _variants(features: Features, votes: Sequence[Vote]) -> Mapping[float, Features]:
    """The features with each share of `SHARES`; statistics alone have one."""
    pairs = {vote.right is not None for vote in votes}
    features = replace(features, pairs=True in pairs, alone=False in pairs)
    shares = (1.0,) if features.statistics is None else SHARES
    return {share: replace(features, share=share) for share in shares}


def best_setting(found: Mapping[float, Choices]) -> tuple[float, float]:
    """Share and penalty with the highest evidence: the likelihood of the votes by the mean over all weights, of which
    the penalty is the prior (Laplace approximation; MacKay 1992, "The evidence framework applied to classification
    networks"). It needs no held-out votes, of which there are few.

    Args:
        found: by share.
    """
    evidence: dict[tuple[float, float], float] = {}
    for share, one in found.items():
        at = None
        for penalty in reversed(PENALTIES):  # each fit starts from the one before
            fitted = fit(one, penalty, at)
            at, weights = fitted.parameters, fitted.weights
            prior = len(weights) * np.log(penalty) - penalty * float(weights @ weights)
            evidence[share, penalty] = (prior - np.linalg.slogdet(fitted.curvature)[1]) / 2 - fitted.loss
    return max(evidence, key=evidence.__getitem__)


def measure(features: Features, votes: Sequence[Vote]) -> Quality:
    """The quality of a fit to votes, see the module."""
    variants, folds = _variants(features, votes), folds_of(votes)
    by_share = {share: one.choices(votes) for share, one in variants.items()}
    settings = {
        int(fold): best_setting({share: one[folds != fold] for share, one in by_share.items()})
        for fold in np.unique(folds)
    }
    found = next(iter(by_share.values()))
    held = _held_out(by_share, folds, settings, 1.0)
    examples = groups_of(votes)
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
            (part, _agreement(_held_out(by_share, folds, settings, part), found, decided))
            for part in (_PARTS if decided.any() else ())
        ),
    )


def _held_out(
    by_share: Mapping[float, Choices], folds: NDArray[np.intp], settings: Mapping[int, tuple[float, float]], part: float
) -> Floats:
    """[V, K] log-weights of the alternatives by a fit without the vote's fold, to a part of the other votes."""
    result, draw = np.zeros((len(folds), len(PAIR_ANSWERS))), np.random.default_rng(0)
    for fold, (share, penalty) in settings.items():
        found, train = by_share[share], draw.permutation(np.flatnonzero(folds != fold))
        fitted = fit(found[train[: max(1, round(part * len(train)))]], penalty)
        result[folds == fold] = found.alternatives[folds == fold] @ fitted.parameters
    return result


def _agreement(held: Floats, found: Choices, decided: NDArray[np.bool_]) -> float:
    return float((((held[:, 0] > held[:, 1]) == (found.answers == 0))[decided]).mean())


def _interval(of: Callable[[NDArray[np.intp]], Mapping[str, float]], units: int, least: int) -> tuple[float, float]:
    """The interval of the one measure of `of`; all values where `least`, examples of an answer, is too small for any:
    samples of few that agree all agree, too."""
    found = bootstrap_intervals(units, of) if least >= MIN_EXAMPLES else {}
    return next(iter(found.values()), (0.0, 1.0))


def _share(agrees: NDArray[np.bool_], examples: NDArray[np.str_]) -> Measured | None:
    """A share of votes; the interval samples examples, because the votes of one are not independent."""
    if not len(agrees):
        return None
    rows = [np.flatnonzero(examples == example) for example in dict.fromkeys(examples.tolist())]

    def of(drawn: NDArray[np.intp]) -> Mapping[str, float]:
        return {"share": float(agrees[np.concatenate([rows[i] for i in drawn])].mean())}

    low, high = _interval(of, len(rows), len(rows))
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
    low, high = _interval(of, len(rows), min(len({*examples[good].tolist()}), len({*examples[~good].tolist()})))
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
