"""Run directories of earlier commits; `make` has what is in them."""

from pathlib import Path

SETS = sorted(file.parent for file in Path(__file__).parent.glob("*/about.json"))
"""Their folders, one for each commit."""
