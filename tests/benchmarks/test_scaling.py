"""One process against two: how it is measured, and what was."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
FILE = REPOSITORY / "benchmarks/results/scaling.json"
RESULT: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import scaling  # noqa: E402

from retouch.config import derive  # noqa: E402


def test_the_committed_numbers_are_of_shares() -> None:
    """Rows are counted: a process of two has half of a step, and all of one that is twice as large."""
    assert RESULT["strong"]["share_of_rows"] == 0.5
    assert RESULT["weak"]["share_of_rows"] == 1.0
    assert len(RESULT["load"]) == 2
    for kind in ("strong", "weak"):
        one, two = RESULT["one"], RESULT[kind]
        expected = two["process_step_s"] / one["process_step_s"] / two["share_of_rows"]
        assert two["process_overhead"] == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(("kind", "steps"), [("one", 8), ("strong", 8), ("weak", 16)])
def test_every_kind_takes_one_step_an_epoch(kind: str, steps: int, tmp_path: Path) -> None:
    small = Namespace(width=32, side=32)
    config = scaling.shared_out(kind, small, tmp_path / "work")
    numbers = derive(config, scaling.KINDS[kind][0])
    assert (numbers.optimizer_steps_per_epoch, numbers.global_rows_per_step) == (1, steps)
    assert numbers.global_images_per_epoch == steps and numbers.padded_images_per_epoch == 0


def test_the_slowest_process_counts_and_shares_are_taken_out() -> None:
    def a_run(kind: str, *ranks: tuple[float, float, float]) -> dict[str, Any]:
        return {"kind": kind, "ranks": [{"wall_s": w, "process_s": p, "rows": r} for w, p, r in ranks]}

    found = scaling.compared(
        [a_run("one", (4, 4, 40)), a_run("strong", (2, 1, 20), (2.5, 2.2, 20)), a_run("weak", (5, 4, 40), (4, 4.4, 40))]
    )
    assert (found["strong"]["process_overhead"], found["strong"]["wall_efficiency"]) == (1.1, 0.8)
    assert (found["weak"]["process_overhead"], found["weak"]["wall_efficiency"]) == (1.1, 0.8)
