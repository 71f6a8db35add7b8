"""Families, algorithms and trained weights on the second device: the CPU's numbers, and no tensor on the wrong one."""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from retouch.families import FAMILIES
from tests import forked
from tests.algorithms.test_cells import ALGORITHMS, TRAIN

CELLS = [
    (family, algorithm, kind)
    for family, algorithm, kind in product(FAMILIES, ALGORITHMS, [*TRAIN, "ip_adapter"])
    if kind != "ip_adapter" or FAMILIES[family].spec.adapter
] + [("sd_inpaint", "grpo", "shared")]
"""The product, and a first step that images of a group share. Every test is a run on the CPU, one on the device and a
resumed one: `make test-ci` takes one cell."""

READ = 45
"""Copies to the host and their waits in a step: of rows, images and examples that are encoded, none of a weight. The
most is 42, of KTO with a style adapter."""


def walked(folder: Path, chosen: list[str], offload: str) -> dict[str, Any]:
    """Cells in two processes, see `tests.rehearsal.use` -> what the device found."""
    for where in ("cpu", "rehearsal"):
        command = [sys.executable, "-m", "tests.rehearsal.use", str(folder), where, offload, *chosen]
        forked.run(command, check=True, timeout=7200)
    return json.loads((folder / "rehearsal.json").read_text(encoding="utf-8"))


MOVED = {"sft": 3.5, "grpo": 6, "ppo": 6, "dpo": 4.5, "kto": 3.5, "nft": 4, "reward_gradient": 3.5, "shared": 9}
"""Algorithm, or `shared` for GRPO with a first step that images share, which copies the rows of its inputs, too ->
tensors that a forward of its steps copies to the device, beside one condition: states or noise, times, and what the
loss takes of each row, which predictions of a snapshot do without. Tables of the schedule are there already, except in
SFT, which samples nothing before: its first of three steps copies the table of an epsilon model."""

OF_DIFFUSERS = {"qwen_image": 1, "qwen_image_edit": 1.25}
"""Family -> copies more: a number in diffusers' own forward, and where a batch of prompts not seen before is padded."""


def faults(found: dict[str, Any]) -> dict[str, list[str]]:
    """What differs from the CPU, weights that are copied back, and copies beyond the budget."""
    read = {cell: [f"{one['waits']}"] for cell, one in found.items() if one.get("waits", {}).get("to_host", 0) > READ}
    read |= {cell: [f"{one['moved']}"] for cell, one in found.items() if "moved" in one and not is_frugal(cell, one)}
    return read | {cell: one["faults"] for cell, one in found.items() if one["faults"]}


def is_frugal(cell: str, found: dict[str, Any]) -> bool:
    """Whether a cell's steps copy one condition for a forward, and no other tensors than `MOVED` counts."""
    moved, (family, algorithm, kind) = found["moved"], cell.split(",")
    most = MOVED["shared" if kind == "shared" else algorithm] + OF_DIFFUSERS.get(family, 0)
    return moved["conditions"] <= 1 and moved["others"] <= most


def test_a_run_on_the_device_has_the_numbers_of_the_cpu(tmp_path: Path) -> None:
    """A policy that samples, after a warm-up that does not; of an epsilon model, whose noise levels are a table."""
    assert not faults(walked(tmp_path, ["sd_inpaint,grpo,lora", "sd_inpaint,nft,lora"], "on"))


@pytest.mark.full
@pytest.mark.parametrize("offload", ["on", "off"])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_cell_of_a_family_has_the_numbers_of_the_cpu(family: str, offload: str, tmp_path: Path) -> None:
    assert not faults(walked(tmp_path, [",".join(cell) for cell in CELLS if cell[0] == family], offload))
