"""How much of the gain that a trained reader measures do readers confirm that nothing was trained on?

A policy that is trained on what one OCR reads can learn images that this OCR alone reads. Every reader reports `ned`,
the similarity of what it reads to the target text. Over the images that two evaluations share, by reader:

    gain        mean of ned after - ned before
    transfer    gain of an untouched reader / gain of the trained one: 1 is all of it, 0 none
    index       gain of the trained reader - mean gain of the untouched ones (the hacking index)

Intervals are over examples: Student's t for differences (`paired_difference`), the bootstrap for ratios.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retouch.observe.statistics import MIN_EXAMPLES, bootstrap_intervals, mean_of_each, paired_difference

Row = Mapping[str, Any]
"""Measures of one image of an evaluation by name."""

Interval = tuple[float, float, float]
"""Mean, and the limits of its 95 % interval."""

MEASURE = "ned"
"""Detail of a reward that reads."""

_CLEAR = 0.0005
"""Least gain that a share is taken of: smaller ones are shown as 0.000."""


@dataclass(frozen=True)
class Transfer:
    """The part of a trained reader's gain that untouched readers confirm.

    Attributes:
        trained: name of its reward.
        gain: of the trained reader; its interval is above 0.
        gains: of each untouched reader.
        shares: `transfer` of each untouched reader.
        index: the hacking index.
        examples: number of examples.
    """

    trained: str
    gain: Interval
    gains: Mapping[str, Interval]
    shares: Mapping[str, Interval]
    index: Interval
    examples: int

    def measures(self) -> dict[str, float]:
        """Hacking index and shares by name of the measure, for the record of an evaluation."""
        shares = {f"{name}.transfer_of_{self.trained}": share[0] for name, share in self.shares.items()}
        return {f"{self.trained}.hacking_index": self.index[0], **shares}

    def text(self) -> str:
        """One sentence for the log."""
        shares = ", ".join(f"{name} {shown_interval(share, '.2f')}" for name, share in self.shares.items())
        return (
            f"{self.trained}.{MEASURE} rose by {shown_interval(self.gain)}; share that untouched readers confirm: "
            f"{shares}; hacking index {shown_interval(self.index)}"
        )


def shown_interval(value: Interval, form: str = "+.3f") -> str:
    """A mean and its interval, each in a format."""
    mean, low, high = (format(one, form) for one in value)
    return f"{mean} [{low}, {high}]"


def readers_of(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    """Those of the rewards that report what a reader measures."""
    return [name for name in names if any(_is_read(row, f"{name}.{MEASURE}") for row in rows)]


def _is_read(row: Row, measure: str) -> bool:
    return isinstance(row.get(measure), int | float)


def transfers(
    before: Sequence[Row], after: Sequence[Row], trained: Sequence[str], gold: Sequence[str]
) -> list[Transfer]:
    """The transfer of each trained reader whose gain is clear; none without an untouched reader.

    Args:
        trained, gold: names of the rewards that training optimizes, and of those that it never does.
    """
    others = readers_of(before, readers_of(after, gold))
    found = [_transfer(before, after, name, others) for name in readers_of(after, trained)] if others else []
    return [one for one in found if one is not None]


def _transfer(before: Sequence[Row], after: Sequence[Row], trained: str, others: Sequence[str]) -> Transfer | None:
    """None where there are too few examples with a value of every reader, or no clear gain of the trained one."""
    examples, changes = _changes(before, after, [trained, *others])
    units = len(set(examples))
    if units < MIN_EXAMPLES:
        return None
    zeros = [0.0] * len(examples)
    gains = {name: paired_difference(list(change), zeros, examples) for name, change in changes.items()}
    gain = gains.pop(trained)
    if gain[1] < _CLEAR:
        return None
    apart = changes[trained] - np.mean([changes[name] for name in others], axis=0)
    means = {name: mean_of_each(change, examples) for name, change in changes.items()}
    return Transfer(
        trained, gain, gains, _shares(means, trained), paired_difference(list(apart), zeros, examples), units
    )


def _shares(means: Mapping[str, NDArray[np.float64]], trained: str) -> dict[str, Interval]:
    """Ratios of the mean changes, with bootstrap intervals.

    Args:
        means: of each reader, the mean change of every example.
    """

    def measured(index: NDArray[np.intp]) -> dict[str, float]:
        whole = float(means[trained][index].mean())
        if whole <= 0:  # a share of no gain is undefined
            return {}
        return {name: float(change[index].mean()) / whole for name, change in means.items() if name != trained}

    units = len(means[trained])
    intervals = bootstrap_intervals(units, measured)
    return {name: (share, *intervals[name]) for name, share in measured(np.arange(units)).items()}


def _changes(
    before: Sequence[Row], after: Sequence[Row], readers: Sequence[str]
) -> tuple[list[Any], dict[str, NDArray[np.float64]]]:
    """Examples of the images that both evaluations have a value of every reader of, and by reader the changes."""
    names = [f"{reader}.{MEASURE}" for reader in readers]
    earlier = {(row["example"], row["index"]): row for row in before}
    pairs = [(row, earlier.get((row["example"], row["index"]), {})) for row in after]
    complete = [(now, old) for now, old in pairs if all(_is_read(r, n) for r in (now, old) for n in names)]
    changes = {
        reader: np.asarray([float(now[name]) - float(old[name]) for now, old in complete], np.float64)
        for reader, name in zip(readers, names, strict=True)
    }
    return [now["example"] for now, _ in complete], changes
