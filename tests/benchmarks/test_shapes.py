"""The committed numbers of `benchmarks/shapes.py`, and what the page says of them."""

from __future__ import annotations

import json
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
RESULT = json.loads((REPOSITORY / "benchmarks/results/shapes.json").read_text(encoding="utf-8"))
PAGE = " ".join((REPOSITORY / "docs/data.md").read_text(encoding="utf-8").split())


def test_four_shapes_of_as_many_pixels_are_as_fast_as_one() -> None:
    measured = RESULT["throughput"]
    assert measured["ratio"] >= 0.95 and len(measured["seconds"]) >= 5
    assert len({height * width for height, width in measured["shapes"]}) == 1
    low, high = measured["range"]
    assert f"{measured['ratio']:.2f} ({low:.2f} to {high:.2f}) times the throughput of one" in PAGE


def test_held_out_images_of_each_shape_improve() -> None:
    shapes = RESULT["gains"]["shapes"]
    assert len(shapes) == 4
    for shape, row in shapes.items():
        gain, low, high = row["gain"]
        assert low > 0, shape
        assert f"| {shape} | {row['before']:.3f} | {gain:+.3f} [{low:+.3f}, {high:+.3f}] |" in PAGE
