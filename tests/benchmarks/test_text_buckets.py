"""The committed measurement of `benchmarks/text_buckets.py`, and that the script runs."""

from __future__ import annotations

import json

from benchmarks.text_buckets import measure

from .test_region import REPOSITORY

RESULT = json.loads((REPOSITORY / "benchmarks/results/text_buckets.json").read_text(encoding="utf-8"))


def test_the_page_holds_the_measured_ratio() -> None:
    assert RESULT["ratio"] >= 1.4 and RESULT["largest_relative_difference"] < 3e-6
    assert f"{RESULT['ratio']:.2f} x less CPU time" in (REPOSITORY / "docs/speed.md").read_text(encoding="utf-8")


def test_both_ways_give_the_same_velocity() -> None:
    found = measure(layers=1, rows=1, repetitions=1, image_tokens=16)
    assert found["largest_relative_difference"] < 3e-6 and found["bucket_tokens"] == 64
