"""Run directories of earlier commits; `make` has what is in them."""

from pathlib import Path

HERE = Path(__file__).parent

COMMITS = sorted(file.parent.name for file in HERE.glob("*/about.json"))
"""Each has a folder of its own here, a set."""
