"""The committed counts of `benchmarks/second_device.py`."""

from __future__ import annotations

import json
from pathlib import Path

from retouch.families import FAMILIES
from tests.algorithms.test_cells import ALGORITHMS, TRAIN

REPOSITORY = Path(__file__).parents[2]
ROWS = json.loads((REPOSITORY / "benchmarks/results/second_device.json").read_text(encoding="utf-8"))["rows"]
SPEED = " ".join((REPOSITORY / "docs/speed.md").read_text(encoding="utf-8").split())


def test_every_family_and_algorithm_had_the_numbers_of_the_cpu() -> None:
    assert not [row for row in ROWS if row["faults"]]
    assert {row["family"] for row in ROWS} == set(FAMILIES)
    assert {row["algorithm"] for row in ROWS} == set(ALGORITHMS)
    assert {row["kind"] for row in ROWS} == {*TRAIN, "ip_adapter"}


def test_the_page_holds_what_a_step_reads_back() -> None:
    """The same with networks that wait on the CPU and without: no weight is copied back."""
    for offload, words in ((True, "times where networks wait on the CPU"), (False, "times where none does")):
        counts = [row["waits"]["to_host"] for row in ROWS if row["offload"] == offload]
        assert f"{min(counts):.0f} to {max(counts):.0f} {words}" in SPEED
