"""What the loop costs beside the network: how it is measured, and what was."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
RESULT: dict[str, Any] = json.loads((REPOSITORY / "benchmarks/results/loop_overhead.json").read_text(encoding="utf-8"))

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import loop_overhead  # noqa: E402

LIMIT = 1.03
"""Step time over the bare network calls that it needs."""


@pytest.mark.parametrize("row", RESULT["rows"], ids=lambda row: f"{row['algorithm']}-{row['train']}")
def test_the_committed_numbers_are_within_the_limit(row: dict[str, Any]) -> None:
    """Of a base where a forward of the batch takes at least 100 ms; by the time of the process."""
    assert row["forward_of_the_batch_s"] >= 0.1
    assert row["process_ratio"] <= LIMIT
    assert len(row["load"]) == 2


def test_both_algorithms_were_measured_under_lora_and_whole() -> None:
    measured = {(row["algorithm"], row["train"]) for row in RESULT["rows"]}
    assert measured == set(product(loop_overhead.ALGORITHMS, loop_overhead.TRAINED))


def test_ratios_are_of_neighbours() -> None:
    """A machine that slows down halfway must not tell between the two."""
    assert loop_overhead.compared("wall", [(1.1, 1.0), (2.2, 2.0), (4.0, 4.0)]) == {
        "wall_step_s": 2.2,
        "wall_calls_s": 2.0,
        "wall_ratio": 1.1,
        "wall_ratio_range": [1.0, 1.1],
    }


@pytest.mark.parametrize(
    ("algorithm", "without", "trained"), [("grpo", 4, 2), pytest.param("nft", 4 + 2 * 2, 2, marks=pytest.mark.full)]
)
def test_a_replay_is_every_call_of_an_epoch(algorithm: str, without: int, trained: int, tmp_path: Path) -> None:
    """Four steps of sampling, two micro-batches; NFT asks two snapshots of each."""
    small = Namespace(width=32, batch=4, side=32, pairs=1)
    row = loop_overhead.measure(algorithm, "lora", small, tmp_path)
    assert (row["forwards"], row["forwards_with_backward"]) == (without, trained)
    assert row["process_step_s"] > 0 and row["process_calls_s"] > 0
