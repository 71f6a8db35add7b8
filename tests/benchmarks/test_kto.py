"""KTO on labelled samples: the committed runs rise on every seed of the tiny FLUX.1-Fill."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import inputs  # noqa: E402
import kto  # noqa: E402

from retouch.config import derive, load_run  # noqa: E402

ROWS: list[dict[str, Any]] = json.loads((REPOSITORY / "benchmarks/results/kto.json").read_text(encoding="utf-8"))[
    "rows"
]
KTO = [row for row in ROWS if row["arm"] == "kto"]
CONTROL = [row for row in ROWS if row["arm"] == "sft good"]


def test_the_runs_are_of_the_run_files_and_bases_in_the_tree() -> None:
    assert [(row["family"], row["seed"]) for row in KTO] == [
        (family, seed) for family in kto.FAMILIES for seed in range(3)
    ]
    for row in KTO:
        file = kto.config_file(row["family"])
        assert row["inputs"] == inputs.inputs(file)
        run = load_run(file)
        images = run.optimizer.rows_per_step(1) * run.training.max_steps
        assert row["forwards"] == images * derive(run).forwards_per_image
        assert sum(row["labels"].values()) == kto.WORDS and min(row["labels"].values()) > 0


def test_ned_rises_on_every_seed() -> None:
    """Paired by held-out word, with the lower end of the interval above 0; glyph correlation rises, and drift does not
    pass twice that of the base."""
    for row in KTO:
        base, last = row["held_out"]["base"], row["held_out"]["last"]
        assert row["gain"]["ocr.ned"][1] > 0 and last["glyph_correlation"] > base["glyph_correlation"]
        assert last["outside_l1"] < 2 * base["outside_l1"]
        assert row["label_margin"][0] == 0 and row["label_margin"][1] > 0


def test_the_control_has_the_forwards_of_kto() -> None:
    """Within one step; on the good samples alone it gains more on FLUX.1-Fill and less on Stable Diffusion, as the page
    states."""
    assert [(row["family"], row["seed"]) for row in CONTROL] == [(row["family"], row["seed"]) for row in KTO]
    for control, row in zip(CONTROL, KTO, strict=True):
        assert control["forwards"] == pytest.approx(row["forwards"], rel=0.01) and control["labels"] == row["labels"]
        assert control["label_margin"] == []
        gains = [one["gain"]["ocr.ned"] for one in (control, row)]
        if row["family"] == "flux_fill":
            assert gains[0][1] > gains[1][2]
        else:
            assert gains[0][1] < 0 < gains[1][1] and gains[0][0] < gains[1][0]
