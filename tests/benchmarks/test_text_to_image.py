"""RL raises the reward of text-to-image models: as committed, and again in `make test-slow`."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import inputs  # noqa: E402
import text_to_image  # noqa: E402

CELLS = list(product(text_to_image.FAMILIES, text_to_image.ALGORITHMS))

Row = dict[str, Any]


def check(row: Row) -> None:
    """What OCR reads on held-out words rises: the paired interval excludes 0."""
    assert row["images"] >= 64
    assert row["gain"]["ocr.ned"][1] > 0


RESULT: Row = json.loads((REPOSITORY / "benchmarks/results/text_to_image.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("row", RESULT["rows"], ids=lambda row: row["run"])
def test_every_committed_run_raised_its_reward(row: Row) -> None:
    check(row)
    file = text_to_image.config_file(row["family"], row["algorithm"])
    assert row["inputs"]["run"] == inputs.run_digest(file)


def test_every_cell_was_run_on_three_seeds_from_one_base() -> None:
    rows = RESULT["rows"]
    assert [(r["family"], r["algorithm"], r["seed"]) for r in rows] == [(*c, s) for c in CELLS for s in range(3)]
    for family in text_to_image.FAMILIES:
        assert len({r["inputs"]["base"] for r in rows if r["family"] == family}) == 1
        # mediocre: it generates letters, and there is something to gain
        assert 0.3 < RESULT["bases"][family]["held_out"]["ocr.ned"] < 0.6


def test_a_base_is_evaluated_alike_in_all_runs() -> None:
    for family in text_to_image.FAMILIES:
        assert len({r["held_out"]["base"]["ocr.ned"] for r in RESULT["rows"] if r["family"] == family}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("family", text_to_image.FAMILIES)
def test_a_base_is_built_and_raises_its_reward_again(family: str, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    command = [sys.executable, str(REPOSITORY / "benchmarks/text_to_image.py"), "--seeds", "3", "--families", family]
    subprocess.run([*command, "--work", str(tmp_path / "work"), "--out", str(out)], check=True)
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert [row["algorithm"] for row in rows] == list(text_to_image.ALGORITHMS)
    for row in rows:
        check(row)
