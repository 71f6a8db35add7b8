"""KTO on labelled samples: the committed runs rise on every seed of the tiny FLUX.1-Fill."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import inputs  # noqa: E402
import kto  # noqa: E402

from retouch.config import derive, load_run  # noqa: E402

ROWS: list[dict[str, Any]] = json.loads((REPOSITORY / "benchmarks/results/kto.json").read_text(encoding="utf-8"))[
    "rows"
]
KTO = [row for row in ROWS if row["arm"] == "kto"]


def test_the_runs_are_of_the_run_files_and_bases_in_the_tree() -> None:
    assert [(row["family"], row["seed"]) for row in KTO] == [
        (family, seed) for family in kto.FAMILIES for seed in range(3)
    ]
    for row in KTO:
        file = kto.config_file(row["family"])
        assert row["inputs"] == inputs.inputs(file)
        run = load_run(file)
        images = run.optimizer.batch_size_per_device * run.optimizer.gradient_accumulation * run.training.max_steps
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
