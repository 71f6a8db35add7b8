"""The committed counts of `benchmarks/second_device.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.rehearsal.test_runs import CELLS, READ, is_frugal
from tests.selection import meetings

REPOSITORY = Path(__file__).parents[2]
ROWS = json.loads((REPOSITORY / "benchmarks/results/second_device.json").read_text(encoding="utf-8"))["rows"]
NAMES = ("family", "algorithm", "kind", "offload")
SPEED = " ".join((REPOSITORY / "docs/speed.md").read_text(encoding="utf-8").split())


def test_every_two_choices_of_a_run_had_the_numbers_of_the_cpu() -> None:
    """Of family, algorithm, trained weights, and whether networks wait on the CPU."""
    assert not [row for row in ROWS if row["faults"]]
    met = set[Any]().union(*(meetings([row[name] for name in NAMES], 2) for row in ROWS))
    assert met == set[Any]().union(*(meetings([*cell, offload], 2) for cell in CELLS for offload in (True, False)))


def test_every_run_copied_and_read_back_what_the_full_tier_allows() -> None:
    beyond = [row for row in ROWS if not is_frugal(",".join(row[name] for name in NAMES[:3]), row)]
    assert not beyond + [row for row in ROWS if row["waits"]["to_host"] > READ]


def test_the_page_holds_what_a_step_reads_back() -> None:
    """The same with networks that wait on the CPU and without: no weight is copied back."""
    for offload, words in ((True, "times where networks wait on the CPU"), (False, "times where none does")):
        counts = [row["waits"]["to_host"] for row in ROWS if row["offload"] == offload]
        assert f"{min(counts):.0f} to {max(counts):.0f} {words}" in SPEED


def test_the_page_holds_what_a_forward_copies() -> None:
    assert {row["moved"]["conditions"] for row in ROWS} == {1}
    others = [row["moved"]["others"] for row in ROWS]
    assert f"copies its condition once and {min(others):.0f} to {max(others):.0f} tensors beside it" in SPEED
