"""Beside OCR, the structure reward makes letters more whole: as committed, and again in `make test-slow`."""

from __future__ import annotations

import json
import subprocess
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
COMPARED = [row for row in RESULT["rows"] if "against_ocr" in row]


def check(row: Row) -> None:
    """Glyph correlation, of which no reward is computed, is higher by .05 than with OCR alone; NED is no lower."""
    assert row["images"] >= 192
    assert row["against_ocr"]["glyph_correlation"][0] >= 0.05 and row["against_ocr"]["glyph_correlation"][1] > 0
    assert row["against_ocr"]["ocr.ned"][2] > 0


@pytest.mark.parametrize("row", COMPARED, ids=lambda row: row["run"])
def test_letters_are_more_whole_than_with_ocr_alone(row: Row) -> None:
    check(row)


def test_both_arms_were_run_on_three_seeds_with_the_files_that_lie_here() -> None:
    assert sorted(row["seed"] for row in COMPARED) == [0, 1, 2]
    for arm, (prefix, file) in structure_reward.ARMS.items():
        rows = [row for row in RESULT["rows"] if row["arm"] == arm]
        assert sorted(row["run"] for row in rows) == [f"{prefix}-{seed}" for seed in range(3)]
        assert {row["inputs"]["run"] for row in rows} == {inputs.run_digest(file)}
    weights = inputs.digest((FOLDER / WEIGHTS).read_bytes())
    assert {row["inputs"]["glyph_structure"] for row in COMPARED} == {weights}


def test_the_page_says_what_was_found() -> None:
    assert structure_reward.table(RESULT["rows"]) in (REPOSITORY / "docs/rewards.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_another_seed_finds_the_same(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    command = [sys.executable, str(REPOSITORY / "benchmarks/structure_reward.py"), "--seeds", "3", "--out", str(out)]
    subprocess.run([*command, "--work", str(tmp_path / "work")], check=True)
    [row] = [row for row in json.loads(out.read_text(encoding="utf-8"))["rows"] if "against_ocr" in row]
    check(row)
