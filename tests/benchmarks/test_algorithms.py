"""Every cell of family x algorithm x what is trained raises its reward: as committed, and again in `make test-slow`."""

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

import algorithms  # noqa: E402

CELLS = list(product(algorithms.FAMILIES, algorithms.ALGORITHMS, ("full", "lora")))

Row = dict[str, Any]


def check(row: Row) -> None:
    """RL: what OCR reads on held-out words rises after the warm-up, surely. SFT: its loss falls."""
    assert row["images"] >= 192
    if row["algorithm"] == "sft":
        assert row["loss"][1] < row["loss"][0]
    else:
        assert row["gain"]["ocr.ned"][1] > 0
        assert "warmed up" in row["held_out"]  # the gain is that of RL alone


def committed(name: str) -> list[Row]:
    return json.loads((REPOSITORY / f"benchmarks/results/{name}.json").read_text(encoding="utf-8"))["rows"]


ROWS = committed("algorithms")
ON_A_GPU = committed("algorithms_gpu")
"""Seed 3, 16 runs at a time beside each other on one GPU, each OCR server with one thread."""


@pytest.mark.parametrize("row", [*ROWS, *ON_A_GPU], ids=lambda row: row["run"])
def test_every_committed_run_raised_its_reward(row: Row) -> None:
    check(row)
    assert row["inputs"] == inputs.inputs(algorithms.config_file(row["family"], row["algorithm"], row["train"]))


def test_every_cell_was_run() -> None:
    for rows in (ROWS, ON_A_GPU):
        assert {(r["family"], r["algorithm"], r["train"]) for r in rows} == set(CELLS)
    assert {r["seed"] for r in ON_A_GPU} == {3}


@pytest.mark.parametrize("algorithm", algorithms.ALGORITHMS)
def test_full_weights_of_flux_fill_were_run_on_three_seeds(algorithm: str) -> None:
    """Those that the page compares."""
    runs = [r for r in ROWS if (r["family"], r["algorithm"], r["train"]) == ("flux_fill", algorithm, "full")]
    assert [r["seed"] for r in runs] == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "algorithm", "train"), CELLS)
def test_a_cell_raises_its_reward_again(family: str, algorithm: str, train: str, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    command = [sys.executable, str(REPOSITORY / "benchmarks/algorithms.py"), "--seeds", "3", "--families", family]
    command += ["--algorithms", algorithm, "--train", train, "--work", str(tmp_path / "work"), "--out", str(out)]
    subprocess.run(command, check=True)
    [row] = json.loads(out.read_text(encoding="utf-8"))["rows"]
    check(row)
