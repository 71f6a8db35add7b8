"""Differences and measures with their confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


def paired_difference(after: Sequence[float], before: Sequence[float]) -> tuple[float, float, float]:
    """Mean difference of paired measures and its 95 % interval: mean ± t s / sqrt(n), s the standard deviation (n - 1)
    of the differences and t Student's quantile. A single pair has an infinite interval.

    Raises:
        ValueError: no values, or different numbers of them.
    """
    if len(after) != len(before) or not len(after):
        raise ValueError(f"{len(after)} and {len(before)} values are no pairs")
    difference = np.asarray(after, np.float64) - np.asarray(before, np.float64)
    mean, n = float(difference.mean()), len(difference)
    half = student(n - 1) * float(difference.std(ddof=1)) / n**0.5 if n > 1 else float("inf")
    return mean, mean - half, mean + half


@lru_cache
def student(degrees: int) -> float:
    """97.5 % quantile of Student's t, by bisection: 95 % lie within plus and minus it.

    Args:
        degrees: of freedom, at least 1.
    """
    low, high = 1.95, 12.71  # below the quantile of infinitely many degrees, and above that of one
    while high - low > 1e-12:
        middle = (low + high) / 2
        low, high = (middle, high) if _student_within(middle, degrees) < 0.95 else (low, middle)
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
    """95 % intervals of measures of a sample: the 2.5 and 97.5 percentiles over samples of the same size, taken
    from it with replacement (Efron's percentile bootstrap), with a fixed seed.

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
    limits = {name: np.percentile(values, [2.5, 97.5]) for name, values in usual.items()}
    return {name: (float(low), float(high)) for name, (low, high) in limits.items()}
