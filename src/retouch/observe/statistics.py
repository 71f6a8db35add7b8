"""Differences and measures with their confidence intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray


def paired_difference(after: Sequence[float], before: Sequence[float]) -> tuple[float, float, float]:
    """Mean difference of paired measures and its 95 % interval: mean ± 1.96 s / sqrt(n), s the standard deviation
    (n - 1) of the differences. A single pair has an infinite interval.

    Raises:
        ValueError: no values, or different numbers of them.
    """
    if len(after) != len(before) or not len(after):
        raise ValueError(f"{len(after)} and {len(before)} values are no pairs")
    difference = np.asarray(after, np.float64) - np.asarray(before, np.float64)
    mean = float(difference.mean())
    half = 1.96 * float(difference.std(ddof=1)) / len(difference) ** 0.5 if len(difference) > 1 else float("inf")
    return mean, mean - half, mean + half


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
