"""Families, algorithms and trained weights on the second device: the CPU's numbers, and no tensor on the wrong one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from retouch.families import FAMILIES
from tests import forked
from tests.algorithms.test_cells import ALGORITHMS, TRAIN

FEW = ["sd3,grpo,lora", "z_image,sft,full"]
"""Cells of `make test-ci`: a policy that samples and one that does not, text of a fixed length and of its own."""


def walked(folder: Path, cells: list[str], offload: str) -> dict[str, Any]:
    """Cells in two processes, see `tests.rehearsal.use` -> what the device found."""
    for where in ("cpu", "rehearsal"):
        command = [sys.executable, "-m", "tests.rehearsal.use", str(folder), where, offload, *cells]
        forked.run(command, check=True, timeout=7200)
    return json.loads((folder / "rehearsal.json").read_text(encoding="utf-8"))


def faults(found: dict[str, Any]) -> dict[str, list[str]]:
    return {cell: one["faults"] for cell, one in found.items() if one["faults"]}


def test_a_run_on_the_device_has_the_numbers_of_the_cpu(tmp_path: Path) -> None:
    found = walked(tmp_path, FEW, "on")
    assert not faults(found)
    for one in found.values():
        assert not [place for place in one["places"] if "in predict" in place]


@pytest.mark.full
@pytest.mark.parametrize("offload", ["on", "off"])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_cell_of_a_family_has_the_numbers_of_the_cpu(family: str, offload: str, tmp_path: Path) -> None:
    assert not faults(walked(tmp_path, [f"{family},{a},{kind}" for a in ALGORITHMS for kind in TRAIN], offload))
