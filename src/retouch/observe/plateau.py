"""Whether the measure of a run's evaluations has risen and no longer rises, from paired differences of its examples.

A flat curve cannot be proven, but a small rise can: the run is over when what the last third of it added is, with
confidence, less than a share of what all of it gained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from retouch.config.training import FALSE_ALARMS, PLATEAU_EVALUATIONS, PLATEAU_EXAMPLES
from retouch.observe.guards import Row
from retouch.observe.statistics import paired_difference

SHARE = 0.1
"""Share of the gain below which the rise of the last third is none. An exponential rise is then within 2 % of its
plateau; a linear one adds 40 % at every length."""

EACH = 2
"""Evaluations that each third has at least."""

FIRST = PLATEAU_EVALUATIONS - 1
"""Number of earlier evaluations of the first that can end a run."""


def plateau_level(earlier: int) -> float:
    """Level of the interval of the evaluation after `earlier` ones, `FIRST` or more: it spends `FIRST` / (k (k + 1)) of
    `FALSE_ALARMS`, which over all k from `FIRST` add up to 1."""
    return 1 - 2 * FALSE_ALARMS * FIRST / (earlier * (earlier + 1))  # only an upper limit: one of two sides


@dataclass(frozen=True)
class Trend:
    """How a measure rises, by the means of the thirds of a run.

    Attributes:
        rise: of the last third over the one before.
        gain: of the last third over the first evaluation.
        over: the gain is above 0, and the rise below `SHARE` of it, both with confidence.
    """

    rise: float
    gain: float
    over: bool

    def __str__(self) -> str:
        return f"{self.rise:+.3g} in the last third of the evaluations, of {self.gain:+.3g} in all"


def trend(evaluations: Mapping[int, Sequence[Row]], measure: Callable[[Row], float | None]) -> Trend | None:
    """The trend of a measure over the evaluations of a run; None while there are too few of them, or of the examples
    that have it in the first one and in both thirds.

    Args:
        evaluations: step -> rows, oldest first.
    """
    steps = [*evaluations]
    images = [(row["example"], row["index"]) for row in evaluations[steps[0]]]
    values = np.full((len(steps), len(images)), np.nan)
    places = {image: i for i, image in enumerate(images)}
    for one, rows in zip(values, evaluations.values(), strict=True):
        for row in rows:
            value, place = measure(row), places.get((row["example"], row["index"]))
            if value is not None and place is not None:
                one[place] = value
    return trend_of(steps, values, [example for example, _ in images])


def lacking_after(evaluations: int) -> str | None:
    """The reason why so many evaluations have no trend; None if more of them are needed first."""
    if evaluations <= FIRST:
        return None
    return (
        f"it takes {PLATEAU_EXAMPLES} examples that are scored in the first evaluation and in the last two thirds of "
        f"all, and {EACH} evaluations or more in each of these"
    )


def trend_of(steps: Sequence[int], values: NDArray[np.float64], examples: Sequence[int]) -> Trend | None:
    """The trend of a measure.

    Args:
        steps: of the evaluations, in ascending order.
        values: [evaluations, images]; NaN where an image does not have the measure.
        examples: of the images; those of one example are not independent.
    """
    after, whole = 3 * (np.asarray(steps) - steps[0]), steps[-1] - steps[0]
    middle, last = (after > whole) & (after <= 2 * whole), after > 2 * whole
    if len(steps) <= FIRST or min(middle.sum(), last.sum()) < EACH:
        return None
    sound = np.isfinite(values[0]) & np.isfinite(values[middle]).any(0) & np.isfinite(values[last]).any(0)
    of = [example for example, one in zip(examples, sound, strict=True) if one]
    if len(set(of)) < PLATEAU_EXAMPLES:
        return None
    first, before, now = values[0, sound], *(np.nanmean(values[part][:, sound], 0) for part in (middle, last))
    rises, gains = now - before, now - first
    level = plateau_level(len(steps) - 1)
    gain, least, _ = paired_difference(gains, [0.0] * len(of), of)
    most = paired_difference(rises - SHARE * gains, [0.0] * len(of), of, level)[2]
    return Trend(paired_difference(rises, [0.0] * len(of), of)[0], gain, least > 0 > most)
