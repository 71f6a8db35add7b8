"""A stop at a plateau: by hand, and in simulated runs of many shapes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from retouch.config.training import FALSE_ALARMS, PLATEAU_EXAMPLES
from retouch.observe.plateau import FIRST, plateau_level, trend, trend_of

Array = NDArray[np.float64]
EXAMPLES = range(PLATEAU_EXAMPLES)


def curve(*means: float, examples: int = PLATEAU_EXAMPLES) -> Array:
    """Evaluations with these means; each example has its own level and, from the second evaluation, its own noise."""
    source = np.random.default_rng(0)
    noise = source.normal(0, 0.001, (len(means), examples))
    return np.asarray(means)[:, None] + source.normal(0, 1, examples) + noise


RISEN = (0.0, 0.9, 1.0, 1.0, 1.0, 1.0, 1.0)


def over(values: Array, steps: list[int] | None = None, examples: Any = None) -> bool | None:
    found = trend_of(
        steps or [*range(len(values))], values, [*range(values.shape[1])] if examples is None else examples
    )
    return None if found is None else found.over


def test_the_thirds_of_a_run_by_hand() -> None:
    found = trend_of([0, 10, 20, 30, 40, 50, 60], curve(0.0, 9.0, 9.0, 0.3, 0.5, 0.7, 0.9), EXAMPLES)
    assert found is not None and not found.over
    assert (found.rise, found.gain) == (pytest.approx(0.4, abs=0.01), pytest.approx(0.8, abs=0.01))
    assert str(found).startswith("+0.4") and "in the last third of the evaluations, of +0.8" in str(found)


@pytest.mark.parametrize(
    ("means", "expected"),
    [
        (RISEN, True),
        ((0.0, 0.9, 1.0, 1.2, 1.2, 1.1, 1.1), True),  # it falls from its best
        ((0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2), False),
        ((0.0, 0.9, 1.0, 1.0, 1.0, 1.15, 1.15), False),  # a rise of .15 is above a tenth of 1.15
        ((0.0,) * 7, False),  # nothing rose yet
        ((0.0, -0.9, -1.0, -1.0, -1.0, -1.5, -1.5), False),  # it falls from its start: no plateau of a rise
        (RISEN[:-1], None),
    ],
)
def test_what_is_a_plateau(means: tuple[float, ...], expected: bool | None) -> None:
    assert over(curve(*means)) is expected


def test_a_last_third_whose_examples_differ_has_no_plateau_yet() -> None:
    """Half of them rise by 1 and half fall by 1: the mean stands still, but so few examples do not show it."""
    values = curve(*RISEN)
    values[5:] += np.where(np.arange(PLATEAU_EXAMPLES) % 2, 1.0, -1.0)
    found = trend_of([*range(7)], values, EXAMPLES)
    assert found is not None and not found.over
    assert (found.rise, found.gain) == (pytest.approx(0, abs=0.01), pytest.approx(1, abs=0.01))
    assert over(np.repeat(values, 50, axis=1)) is True


def test_the_parts_are_thirds_of_the_steps_however_often_they_are_evaluated() -> None:
    """Evaluations that come more often later on make no third shorter."""
    values = curve(0.0, 0.4, 0.5, 1.0, 1.0, 1.0, 1.0)
    assert over(values, [0, 10, 20, 30, 40, 50, 60]) is True
    assert over(values, [0, 40, 50, 70, 72, 74, 76]) is False  # the middle third is 26 to 50
    assert over(values, [0, 10, 50, 70, 72, 74, 76]) is None  # one evaluation is no third


def test_too_few_examples_have_no_verdict() -> None:
    values = curve(*RISEN)
    assert over(values[:, 1:]) is None
    values[4, 0] = np.nan  # the other evaluation of its third has it
    assert over(values) is True
    values[0, 0] = np.nan
    assert over(values) is None


def test_images_of_one_example_are_one() -> None:
    """Of half as many examples with two images each there are too few."""
    assert over(curve(*RISEN), examples=[i // 2 for i in EXAMPLES]) is None
    double = np.repeat(curve(*RISEN), 2, axis=1)
    assert over(double, examples=[i // 2 for i in range(2 * len(EXAMPLES))]) is True


def test_images_are_paired_by_name() -> None:
    values = curve(*RISEN)
    rows = [[{"example": i, "index": 0, "r": value} for i, value in enumerate(column)] for column in values]
    rows[3].reverse()
    rows[5].append({"example": 99, "index": 0, "r": -1e9})  # an example that was not in the first one
    rows[4][0]["r"] = None
    evaluations = dict(zip(range(0, 70, 10), rows, strict=True))
    found = trend(evaluations, lambda row: row["r"])
    values[4, 0] = np.nan
    assert found == trend_of([*evaluations], values, EXAMPLES)


def test_the_false_stops_of_all_evaluations_add_up() -> None:
    spent = sum((1 - plateau_level(k)) / 2 for k in range(FIRST, 100_000))
    assert spent == pytest.approx(FALSE_ALARMS, abs=1e-5)


# --- simulated runs ---


Shape = Callable[[Array], Array]


def exponential(rate: float, start: float = 0.0) -> Shape:
    """The rise from 0 to 1 with a time constant, after a flat start."""
    return lambda t: np.where(t < start, 0.0, 1 - np.exp(-np.maximum(0, t - start) / rate))


SHAPES: dict[str, Shape] = {
    "fast": exponential(0.05),
    "exponential": exponential(0.1),
    "delayed": exponential(0.08, start=0.15),
    "sigmoid": lambda t: np.tanh(t / 0.15) ** 3,
    "ramp": lambda t: np.minimum(1.0, t / 0.3),
    "two stages": lambda t: 0.6 * exponential(0.05)(t) + 0.4 * exponential(0.05, start=0.2)(t),
    "two rates": lambda t: 0.5 * exponential(0.02)(t) + 0.5 * exponential(0.2)(t),
}
"""Share of the final gain by the share of the longest run. The first of two stages has 95 % of its gain at .15, a third
of the time before the second. The slower of two rates has a tenth of the other's."""

ENDLESS: dict[str, Shape] = {
    "linear": lambda t: t,
    "square root": np.sqrt,
    "flat": np.zeros_like,
    "falling": lambda t: -t,
}
"""No plateau of a rise."""


@dataclass
class Simulated:
    """A run: the values of its evaluations, and the share of its final gain at each."""

    share: Array
    values: Array

    def stop(self) -> int | None:
        """The evaluation that ends it."""
        for k in range(FIRST, len(self.values)):
            found = trend_of([*range(k + 1)], self.values[: k + 1], [*range(self.values.shape[1])])
            if found is not None and found.over:
                return k
        return None


def simulated(source: np.random.Generator, shape: Shape, examples: int, evaluations: int, noise: float) -> Simulated:
    """Rewards in [0, 1] that rise from a mean of about .4 by .3. An example has its own level and gain; its values
    change between evaluations with a standard deviation of `noise`, half of which is left at the next one."""
    share = shape(np.arange(evaluations + 1) / evaluations)
    drift = source.normal(size=(evaluations + 1, examples))
    for k in range(1, evaluations + 1):
        drift[k] = 0.5 * drift[k - 1] + math.sqrt(0.75) * drift[k]
    gain = 0.3 * (1 + 0.5 * source.normal(size=examples))
    return Simulated(share, 0.4 + source.normal(0, 0.2, examples) + share[:, None] * gain + noise * drift)


def stops(shape: Shape, examples: int, evaluations: int, runs: int, noise: float = 0.2) -> list[tuple[float, float]]:
    """(share of the run, share of the final gain) at which each run stops; runs that do not stop are left out."""
    source = np.random.default_rng([examples, evaluations])
    made = [simulated(source, shape, examples, evaluations, noise) for _ in range(runs)]
    return [(stop / evaluations, one.share[stop]) for one in made if (stop := one.stop()) is not None]


def require_sound(reached: list[float], runs: int) -> None:
    """Of so many runs 9 in 10 do not stop before they are within a tenth of the plateau, and none does below half of
    the final gain."""
    assert min(reached, default=1.0) >= 0.5
    assert sum(share < 0.9 for share in reached) <= runs / 10


def test_a_noisy_run_does_not_stop_before_its_plateau() -> None:
    """Two runs of each shape with noise of a fifth of the gain: most stop."""
    found = [share for shape in SHAPES.values() for _, share in stops(shape, 64, 24, 2, noise=0.06)]
    assert len(found) >= 10
    require_sound(found, 14)


@pytest.mark.parametrize("shape", ENDLESS)
def test_a_run_without_a_plateau_does_not_stop(shape: str) -> None:
    assert stops(ENDLESS[shape], 64, 28, 2) == []


@pytest.mark.slow
@pytest.mark.parametrize(("examples", "evaluations"), [(64, 24), (64, 96), (256, 48), (1024, 24), (1024, 48)])
@pytest.mark.parametrize("shape", SHAPES)
def test_simulated_runs_stop_within_a_tenth_of_their_plateau(shape: str, examples: int, evaluations: int) -> None:
    """The noise is two thirds of the gain. Few examples and evaluations stop few runs, and none too early."""
    found = stops(SHAPES[shape], examples, evaluations, 40)
    require_sound([share for _, share in found], 40)
    assert examples < 1024 or len(found) >= 36
    assert (examples, evaluations) != (64, 24) or len(found) < 20
    if (shape, examples) == ("exponential", 1024):
        assert 0.45 < float(np.median([at for at, _ in found])) < 0.7  # within a tenth of the plateau at .23


@pytest.mark.slow
@pytest.mark.parametrize("examples", [64, 1024])
@pytest.mark.parametrize("shape", ENDLESS)
def test_simulated_runs_without_a_plateau_stop_in_5_of_100_at_most(shape: str, examples: int) -> None:
    assert len(stops(ENDLESS[shape], examples, 48, 40)) <= 2
