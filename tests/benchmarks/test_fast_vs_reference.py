"""What the fast preset saves, and what it costs: how it is measured."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from retouch.data.edits import COLOURS, draw_shape, painted

REPOSITORY = Path(__file__).parents[2]

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import colours  # noqa: E402
import fast_vs_reference as benchmark  # noqa: E402


def test_sums_say_what_pairs_say() -> None:
    """Mean and interval of differences [0.1, -0.2, 0.3] of one seed and [0.2] of another."""
    rows = [
        {"fast_against": {"reference": {"reward": [3, 0.2, 0.14]}}},
        {"fast_against": {"reference": {"reward": [1, 0.2, 0.04]}}},
    ]
    mean, low, high = benchmark.difference(rows, "reference", "reward")
    pairs = np.array([0.1, -0.2, 0.3, 0.2])
    assert mean == pytest.approx(pairs.mean())
    half = 1.96 * pairs.std(ddof=1) / 2
    assert [mean - low, high - mean] == pytest.approx([half, half])


def test_what_is_rewarded_and_what_is_seen() -> None:
    mask = draw_shape(colours.Random(1))
    for asked in COLOURS:
        for shown in COLOURS:
            image = np.asarray(painted(mask, shown))
            assert colours._right(image, asked) == float(asked == shown)
            assert colours._clean(image) == 1.0
    flooded = np.full((32, 32, 3), COLOURS["red"], np.uint8)
    assert (colours._right(flooded, "red"), colours._clean(flooded)) == (1.0, 0.0)  # what gold is for
    assert (colours._right(np.asarray(painted(mask, "red")) * 0 + 225, "red"), colours._clean(flooded * 0 + 225)) == (
        0,
        0,
    )


def test_costs_are_counted_beside_each_other(tmp_path: Path) -> None:
    """A run of the smallest kind; 6 solver steps, 10, and 6 of which those before the window are taken once."""
    small = Namespace(groups=1, flux_updates=2, lr=1e-4, pairs=1, base=tmp_path)
    benchmark.make_inputs(tmp_path, small)
    row = benchmark.side_by_side("flux_fill", 0, small, tmp_path)
    counted = {name: run["forwards_per_image"]["rollout"] for name, run in row["runs"].items()}
    assert (counted["reference"], counted["published"]) == (6.0, 10.0)
    assert 4.25 <= counted["fast"] <= 6.0
    assert row["fast_against"]["reference"]["wall"] > 0 and "reward_one_sampler" not in row["fast_against"]["reference"]
