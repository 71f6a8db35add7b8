"""Flow-DPPO's mask and TempFlow-GRPO's step weight in the tiny runs of GRPO, as committed."""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import inputs  # noqa: E402
import step_options  # noqa: E402

import algorithms  # noqa: E402

ROWS: list[dict[str, Any]] = json.loads(
    (REPOSITORY / "benchmarks/results/step_options.json").read_text(encoding="utf-8")
)["rows"]


def test_both_options_were_run_with_the_files_that_lie_here() -> None:
    """Those of the two options; the arms to compare them with were not run."""
    found = {(row["family"], row["arm"], row["seed"]) for row in ROWS}
    assert found == set(product(step_options.FAMILIES, ("step weight std", "2 passes, mask 1e-5"), range(3)))
    for row in ROWS:
        overrides = [step_options.STEPS, *step_options.ARMS[row["arm"]]]
        file = algorithms.config_file(row["family"], "grpo", "full")
        assert row["inputs"] == inputs.inputs(file, overrides=overrides) and row["images"] >= 192


def test_ned_rises_in_every_run_and_the_mask_acts() -> None:
    """Paired by held-out word, with the lower end of the interval above 0."""
    for row in ROWS:
        assert row["gain"]["ocr.ned"][1] > 0
        assert (row["clip_fraction"] > 0) == ("passes" in row["arm"])
