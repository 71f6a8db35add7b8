"""What `region: mask` changed, as committed."""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
ROWS: list[dict[str, Any]] = json.loads((REPOSITORY / "benchmarks/results/region.json").read_text(encoding="utf-8"))[
    "rows"
]

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import inputs  # noqa: E402

import algorithms  # noqa: E402


def test_both_ways_on_the_same_three_seeds() -> None:
    runs = {(r["algorithm"], r["region"], r["seed"]) for r in ROWS if r["family"] == "flux_fill"}
    assert runs == set(product(("grpo", "nft"), ("all", "mask"), (0, 1, 2)))


def test_the_page_says_how_much_masks_changed() -> None:
    page = " ".join((REPOSITORY / "docs/measured.md").read_text(encoding="utf-8").split())
    last = {(r["algorithm"], r["region"], r["seed"]): r["held_out"]["last"] for r in ROWS}

    def changes(algorithm: str, measure: str) -> list[float]:
        return [last[algorithm, "mask", s][measure] - last[algorithm, "all", s][measure] for s in range(3)]

    ned = [change for algorithm in ("grpo", "nft") for change in changes(algorithm, "ocr.ned")]
    low, high = (f"{end:+.3f}".replace("0.", ".") for end in (min(ned), max(ned)))
    assert f"NED with the mask differs by {low} to {high}" in page
    drift = changes("grpo", "outside_l1")
    assert f"drifts between {-min(drift):.4f}".replace(" 0.", " .") in page and f"{max(drift):.4f}"[1:] in page
    assert all(round(-change, 3) == 0.002 for change in changes("nft", "outside_l1")) and ".002 less with NFT" in page


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["run"])
def test_a_row_is_of_the_run_file_and_base_that_lie_here_and_raised_its_reward(row: dict[str, Any]) -> None:
    assert row["inputs"] == inputs.inputs(algorithms.config_file(row["family"], row["algorithm"], row["train"]))
    assert row["gain"]["ocr.ned"][1] > 0
