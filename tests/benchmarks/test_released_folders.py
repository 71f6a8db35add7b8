"""The committed outcomes of `benchmarks/released_folders.py`."""

from __future__ import annotations

import json

from retouch.families import FAMILIES

from .test_region import REPOSITORY

ROWS = json.loads((REPOSITORY / "benchmarks/results/released_folders.json").read_text(encoding="utf-8"))


def test_every_command_read_a_folder_of_released_widths() -> None:
    """Of all families but FLUX.2 dev, which the tool leaves out."""
    assert ROWS.keys() == FAMILIES.keys() - {"flux2_dev"}
    for family, row in ROWS.items():
        assert not {name: of for name, of in row["commands"].items() if of["exit_code"]}, family
        assert {"doctor", "check --memory", "train", "sample", "eval", "read by diffusers"} <= row["commands"].keys()
