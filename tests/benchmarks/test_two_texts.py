"""A tiny base learns to write two texts into one image: as committed, and again in `make test-slow`."""

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
import two_texts  # noqa: E402

Row = dict[str, Any]
RESULT: Row = json.loads((REPOSITORY / "benchmarks/results/two_texts.json").read_text(encoding="utf-8"))


def check(row: Row) -> None:
    """Each line is read better after RL than after the warm-up alone, and more of its ink is the word's: the paired
    intervals exclude 0."""
    assert row["images"] >= 96
    assert row["gain"]["line NED"][1] > 0 and row["gain"]["glyph correlation"][1] > 0
    assert row["means"]["base"]["line NED"] < row["means"]["warmed up"]["line NED"]


@pytest.mark.parametrize("row", RESULT["rows"], ids=lambda row: row["run"])
def test_every_seed_writes_both_lines_better(row: Row) -> None:
    check(row)
    assert row["inputs"]["run"] == inputs.run_digest(two_texts.CONFIG)


def test_three_seeds_were_run_and_the_page_says_what_was_found() -> None:
    assert [row["seed"] for row in RESULT["rows"]] == [0, 1, 2]
    assert two_texts.table(RESULT["rows"]) in (REPOSITORY / "docs/measured.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_another_seed_finds_the_same(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    command = [sys.executable, str(REPOSITORY / "benchmarks/two_texts.py"), "--seeds", "3", "--out", str(out)]
    subprocess.run([*command, "--work", str(tmp_path / "work")], check=True)
    [row] = json.loads(out.read_text(encoding="utf-8"))["rows"]
    check(row)
