"""Differences and measures with their confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

MIN_EXAMPLES = 6
"""Least number of examples for a verdict. Five paired differences without any effect all have the same sign in 6 % of
cases, and if they are equal, as those of exact matches often are, every interval excludes 0."""


def paired_difference(
    after: Sequence[float], before: Sequence[float], examples: Sequence[Hashable] | None = None, level: float = 0.95
) -> tuple[float, float, float]:
    """Mean difference of paired measures and its interval: mean ± t s / sqrt(n), s the standard deviation (n - 1) of
    the differences of n examples and t Student's quantile. A single example has an infinite interval.

    Args:
        examples: of each pair; None: each is an example. The images of an example share its prompt, source and mask
            and are not independent: their differences are averaged first, and every example counts the same.
        level: probability that the interval covers the true mean.

    Raises:
        ValueError: no values, or different numbers of them.
    """
    if len(after) != len(before) or not len(after) or (examples is not None and len(examples) != len(after)):
        raise ValueError(f"{len(after)} and {len(before)} values are no pairs")
    difference = np.asarray(after, np.float64) - np.asarray(before, np.float64)
    if examples is not None:
        difference = mean_of_each(difference, examples)
    mean, n = float(difference.mean()), len(difference)
    half = student(n - 1, level) * float(difference.std(ddof=1)) / n**0.5 if n > 1 else float("inf")
    return mean, mean - half, mean + half


def mean_of_each(values: NDArray[np.float64], examples: Sequence[Hashable]) -> NDArray[np.float64]:
    """Means of the values of each example."""
    places = {example: i for i, example in enumerate(dict.fromkeys(examples))}
    index = np.asarray([places[example] for example in examples])
    return np.bincount(index, values) / np.bincount(index)


@lru_cache
def student(degrees: int, level: float = 0.95) -> float:
    """Quantile of Student's t by bisection: a share `level` lies within plus and minus it.

    Args:
        degrees: of freedom, at least 1.
    """
    low, high = 0.0, 1.0
    while _student_within(high, degrees) < level:
        low, high = high, 2 * high
    while high - low > 1e-13 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _student_within(middle, degrees) < level else (low, middle)
    return high


def _student_within(t: float, degrees: int) -> float:
    """Probability that Student's t lies within ± t: a finite sum for a whole number of degrees of freedom (Abramowitz
    and Stegun, 26.7.3 and 26.7.4)."""
    angle, odd = math.atan2(t, math.sqrt(degrees)), degrees % 2
    cosine, i = math.cos(angle), np.arange(1, degrees // 2)
    ratios = (2 * i - 1 + odd) / (2 * i + odd) * cosine**2
    total = (cosine if odd else 1.0) * (1.0 + float(ratios.cumprod().sum())) if degrees > 1 else 0.0
    within = math.sin(angle) * total
    return 2 / math.pi * (angle + within) if odd else within


def bootstrap_intervals(
    units: int, measure: Callable[[NDArray[np.intp]], Mapping[str, float]], draws: int = 1000
) -> dict[str, tuple[float, float]]:
    """95 % intervals of measures of a sample: `bootstrap_percentiles` over samples of the same size, taken from it with
    replacement (Efron's bootstrap), with a fixed seed.

    Args:
        units: number of independent units.
        measure: from the indices of sampled units [units] to measures by name. One that it leaves out counts as
            undefined for that sample.

    Returns:
        (low, high) by name, of the measures that most samples define; of fewer than two units, none.
    """
    if units < 2:
        return {}
    source = np.random.default_rng(0)
    found: dict[str, list[float]] = {}
    for _ in range(draws):
        for name, value in measure(source.integers(0, units, units)).items():
            found.setdefault(name, []).append(value)
    usual = {name: values for name, values in found.items() if len(values) > draws / 2}
    limits = {name: np.percentile(values, bootstrap_percentiles(units)) for name, values in usual.items()}
    return {name: (float(low), float(high)) for name, (low, high) in limits.items()}


def bootstrap_percentiles(units: int) -> list[float]:
    """The percentiles that are the limits of a 95 % interval of n units, at least 2: those of -+ t sqrt(n / (n - 1))
    under the normal distribution (Hesterberg 2015, "What teachers should know about the bootstrap", expanded
    percentiles). A bootstrap with 2.5 and 97.5 is as much too narrow as an interval with 1.96 and a standard deviation
    over n."""
    outside = 100 * NormalDist().cdf(-student(units - 1) * math.sqrt(units / (units - 1)))
    return [outside, 100 - outside]
