"""Host memory of loading: what was measured, and what the pages say of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
RESULT: dict[str, Any] = json.loads((REPOSITORY / "benchmarks/results/loading_memory.json").read_text(encoding="utf-8"))
ROWS: dict[str, dict[str, Any]] = {row["case"]: row for row in RESULT["rows"]}


@pytest.mark.parametrize("case", [case for case in ROWS if case.startswith("mapped") and "zero3" not in case])
def test_a_process_holds_its_share_and_at_most_one_block(case: str) -> None:
    row = ROWS[case]
    assert row["fits"] and row["peak_gb"] <= row["share_gb"] + row["block_gb"] + 0.5
    assert row["peak_gb"] <= 1.05 * row["share_gb"] + 0.1  # in fact not even the block


def test_zero3_holds_most_when_it_has_loaded() -> None:
    """What its optimizer keeps is more than a weight that is not sharded yet."""
    [row] = [row for case, row in ROWS.items() if "zero3" in case]
    assert row["peak_gb"] == row["held_gb"]


def test_the_page_has_the_measured_numbers() -> None:
    page = (REPOSITORY / "docs/scaling.md").read_text(encoding="utf-8")
    for row in ROWS.values():
        if row["case"].startswith("mapped"):
            assert f"{row['peak_gb']:.2f} GB" in page, row["case"]
