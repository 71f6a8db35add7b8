"""Seconds of OCR an image: how they are measured, and what was."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean

import pytest

from retouch.rewards.scorers.reading import SECONDS_A_PAGE

REPOSITORY = Path(__file__).parents[2]

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import reading_time  # noqa: E402


def test_the_cost_of_a_run_has_the_measured_seconds() -> None:
    result = json.loads((REPOSITORY / "benchmarks/results/reading_time.json").read_text(encoding="utf-8"))
    assert [(row["side"], row["lines"]) for row in result["rows"]] == list(reading_time.PAGES)
    measured = {side: [row["seconds"] for row in result["rows"] if row["side"] == side] for side in (512, 1024)}
    assert fmean(measured[512]) == pytest.approx(SECONDS_A_PAGE, abs=0.01)
    assert 1.5 * SECONDS_A_PAGE < measured[1024][0] < 2.5 * SECONDS_A_PAGE


@pytest.mark.full
def test_pages_are_measured(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    result = reading_time.main(["--images", "1", "--out", str(out)])
    assert json.loads(out.read_text(encoding="utf-8")) == result
    assert all(row["seconds"] > 0 for row in result["rows"])
