"""Paired differences with their confidence intervals."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


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
