"""Committed intervals are of Student's t over examples, as `retouch.observe.statistics` computes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from retouch.observe.statistics import paired_difference

RESULTS = Path(__file__).parents[2] / "benchmarks/results"


@pytest.mark.parametrize(
    ("name", "measure"),
    [
        ("demo_gain", "ocr.exact"),
        ("demo_gain_30_minutes", "ocr.exact"),
        ("text_to_image", "ocr.exact"),
        ("style", "font_right"),
    ],
)
def test_an_interval_is_that_of_whole_numbers_of_changed_words(name: str, measure: str) -> None:
    """Words are right or wrong: the mean tells how many more became right than wrong, and the interval how many of
    both. With 1.96 in place of t, or of another number of units, no whole number fits."""
    rows: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    for row in rows:
        mean, low, high = row["gain"][measure]
        words, more = row["images"], round(mean * row["images"])
        misfits = []
        for worse in range(max(0, -more), (words - more) // 2 + 1):
            changes = [1.0] * (more + worse) + [-1.0] * worse
            changes += [0.0] * (words - len(changes))
            _, *ends = paired_difference(changes, [0.0] * words)
            misfits.append(max(abs(ends[0] - low), abs(ends[1] - high)))
        assert min(misfits) < 2e-4, row["run"]
