"""OCR alone and with the structure reward beside it: as committed. The seeds disagree, and the page says so."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import inputs  # noqa: E402
import structure_reward  # noqa: E402

from retouch.glyph_structure import FOLDER, WEIGHTS  # noqa: E402

Row = dict[str, Any]
RESULT: Row = json.loads((REPOSITORY / "benchmarks/results/structure_reward.json").read_text(encoding="utf-8"))
COMPARED = {
    algorithm: sorted(
        (row for row in RESULT["rows"] if row["algorithm"] == algorithm and "against_ocr" in row),
        key=lambda row: row["seed"],
    )
    for algorithm in structure_reward.ARMS
}


@pytest.mark.parametrize("algorithm", structure_reward.ARMS)
def test_both_arms_were_run_on_three_seeds_with_the_files_that_lie_here(algorithm: str) -> None:
    compared = COMPARED[algorithm]
    assert [row["seed"] for row in compared] == [0, 1, 2] and all(row["images"] >= 192 for row in compared)
    for arm, (prefix, file) in structure_reward.ARMS[algorithm].items():
        rows = [row for row in RESULT["rows"] if (row["algorithm"], row["arm"]) == (algorithm, arm)]
        assert sorted(row["run"] for row in rows) == [f"{prefix}-{seed}" for seed in range(3)]
        assert {row["inputs"]["run"] for row in rows} == {inputs.run_digest(file)}
    weights = inputs.digest((FOLDER / WEIGHTS).read_bytes())
    assert {row["inputs"]["glyph_structure"] for row in compared} == {weights}


def test_the_page_says_what_was_found() -> None:
    """DPO: the first seed gains .145, the second little, the third loses in both measures. NFT: each seed gains."""
    page = (REPOSITORY / "docs/rewards.md").read_text(encoding="utf-8")
    assert structure_reward.table(RESULT["rows"]) in page
    first, second, third = (row["against_ocr"] for row in COMPARED["dpo"])
    assert round(first["glyph_correlation"][0], 3) == 0.145 and 0 < second["glyph_correlation"][0] < 0.05
    assert third["glyph_correlation"][2] < 0 and third["ocr.ned"][2] < 0
    each = [row["against_ocr"] for row in COMPARED["nft"]]
    assert all(found[measure][1] > 0 for found in each for measure in ("glyph_correlation", "ocr.ned"))
    rounded = {measure: sorted(round(found[measure][0], 3) for found in each) for measure in each[0]}
    assert (rounded["glyph_correlation"][0], rounded["glyph_correlation"][-1]) == (0.027, 0.032)
    assert rounded["ocr.ned"][0] > 0.095 and rounded["ocr.ned"][-1] < 0.125
    assert (rounded["outside_l1"][0], rounded["outside_l1"][-1]) == (0.002, 0.003)
    alone = [row["seconds"] for row in RESULT["rows"] if (row["algorithm"], row["arm"]) == ("nft", "ocr")]
    both = [row["seconds"] for row in COMPARED["nft"]]
    assert round(sum(both) / sum(alone), 1) == 1.5
