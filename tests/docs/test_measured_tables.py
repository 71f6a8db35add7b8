"""The tables of measurements on the pages are what tools/measured_tables.py writes from the committed results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tools import measured_tables

PAGES = measured_tables.pages()


@pytest.mark.parametrize(("page", "text"), PAGES.items(), ids=[page.name for page in PAGES])
def test_a_page_is_current(page: Path, text: str) -> None:
    """Run `python tools/measured_tables.py` where it is not."""
    assert page.read_text(encoding="utf-8") == text


def test_every_mark_has_its_table() -> None:
    """A mark without its end would keep a table that nothing writes."""
    marks = re.findall(r"<!-- (\w+): written by tools/measured_tables", "".join(PAGES.values()))
    assert sorted(marks) == sorted(
        name for text in PAGES.values() for _, name, _ in measured_tables.TABLE.findall(text)
    )
    assert len(marks) == len(set(marks)) and set(measured_tables.OTHERS) < set(marks)
