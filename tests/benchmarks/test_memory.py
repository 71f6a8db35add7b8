"""What is counted is what is held: how it is measured, and what was."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

REPOSITORY = Path(__file__).parents[2]
RESULT: dict[str, Any] = json.loads((REPOSITORY / "benchmarks/results/memory.json").read_text(encoding="utf-8"))

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import memory  # noqa: E402

LIMIT = 0.1
"""Relative difference."""


def test_every_case_was_measured() -> None:
    assert [row["case"] for row in RESULT["rows"]] == list(memory.CASES)


@pytest.mark.parametrize("row", RESULT["rows"], ids=lambda row: row["case"])
def test_the_committed_numbers_are_within_the_limit(row: dict[str, Any]) -> None:
    assert abs(row["held_bytes"] / row["counted_bytes"] - 1) <= LIMIT
    assert row["ratio"] == round(row["held_bytes"] / row["counted_bytes"], 4)


def test_a_storage_counts_once_with_its_gradient() -> None:
    cpu = torch.device("cpu")
    before = memory.held_bytes(cpu)
    weight = torch.nn.Parameter(torch.zeros(1000))
    views = [weight.detach()[i:] for i in range(10)]
    assert memory.held_bytes(cpu) - before == 4000
    weight.sum().backward()
    assert memory.held_bytes(cpu) - before == 8000
    del views


@pytest.mark.full
def test_what_a_run_holds_is_what_is_counted(tmp_path: Path) -> None:
    """Weights, gradients, moments, the average and the reference of a network that is trained whole."""
    row = memory.measure("sd_inpaint-full-tiny", tmp_path)
    assert row["held_bytes"] == pytest.approx(row["counted_bytes"], rel=0.01)
