"""docs/costs.md is what tools/cost_table.py writes today."""

from __future__ import annotations

from pathlib import Path

from tools import cost_table


def test_the_page_is_current() -> None:
    """Run `python tools/cost_table.py` where it is not."""
    assert Path(cost_table.PAGE).read_text(encoding="utf-8") == cost_table.page()
