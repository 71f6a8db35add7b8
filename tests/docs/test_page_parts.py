"""Tables of measurements and files of the example stand on the pages as tools/page_parts.py writes them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tools import page_parts

PAGES = page_parts.pages()
TEXT = "".join(page.read_text(encoding="utf-8") for page in PAGES)
MARKS = re.findall(r"<!-- (\S+): written by tools/page_parts", TEXT)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_current(page: Path) -> None:
    """Run `python tools/page_parts.py` where it is not."""
    assert page.read_text(encoding="utf-8") == page_parts.current(page)


def test_every_mark_has_its_part_once() -> None:
    """A mark without its end would keep a part that nothing writes."""
    assert [name for _, name, _ in page_parts.PART.findall(TEXT)] == MARKS
    assert len(MARKS) == len(set(MARKS)) and set(page_parts.OTHERS) < set(MARKS)


def test_every_file_of_the_example_is_on_its_page() -> None:
    files = [p for p in (page_parts.ROOT / "examples/plugin").rglob("*") if p.suffix in page_parts.LANGUAGES]
    shown = {str(p.relative_to(page_parts.ROOT)) for p in files if p.name != "__init__.py" and "build" not in p.parts}
    assert {name for name in MARKS if name.startswith("examples/")} == shown
