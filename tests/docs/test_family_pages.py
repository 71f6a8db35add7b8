"""What the pages say of each model family is what tools/family_pages.py writes today."""

from __future__ import annotations

import pytest
from tools import family_pages

from retouch.families import FAMILIES
from tests.families.test_contract import examples_of, tiny

from .pages import REPOSITORY


@pytest.mark.parametrize(("path", "text"), family_pages.pages().items())
def test_the_pages_are_current(path: str, text: str) -> None:
    """Run `python tools/family_pages.py` where one is not."""
    assert (REPOSITORY / path).read_text(encoding="utf-8") == text


def test_every_family_has_a_page_and_a_comparison() -> None:
    assert [page.family for page in family_pages.families()] == list(FAMILIES)
    assert all((REPOSITORY / f"tests/families/test_{family}.py").is_file() for family in FAMILIES)


@pytest.mark.parametrize("page", family_pages.families(), ids=lambda page: page.family)
def test_the_tasks_are_those_of_the_family(page: family_pages.Page) -> None:
    spec = FAMILIES[page.family].spec
    assert ("generation" in page.tasks) == (not spec.needs)
    assert ("editing" in page.tasks) == spec.edits
    given = tiny(page.family).encode(examples_of(masked=True, count=1), 1.0).tensors
    assert ("inpainting" in page.tasks) == ("mask" in spec.needs or "mask_cells" in given)
