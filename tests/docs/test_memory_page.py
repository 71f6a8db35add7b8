"""docs/memory.md is what tools/memory_table.py writes today."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools import memory_table

from retouch.doctor.networks import Networks
from retouch.families import FAMILIES

from .pages import REPOSITORY


@pytest.mark.slow
def test_the_page_is_current() -> None:
    """Run `python tools/memory_table.py` where it is not."""
    assert Path(memory_table.PAGE).read_text(encoding="utf-8") == memory_table.page()


def test_every_family_and_kind_has_a_row() -> None:
    text = (REPOSITORY / "docs/memory.md").read_text(encoding="utf-8")
    for family, section in FAMILIES.available().items():
        kinds = ["lora", "full", *(["ip_adapter"] if section.spec.adapter else [])]
        assert all(f"| `{family}` | `{kind}` |" in text for kind in kinds)


def test_a_family_without_released_sizes_is_not_guessed() -> None:
    spec = FAMILIES["flux_fill"].spec
    found = {row.kind: row for row in memory_table.rows(spec, Networks())}
    assert found["lora"].stored is None and set(found["lora"].cells) == {"?"}


def test_what_fits() -> None:
    assert memory_table.fits((19_200_000_000, 24_000_000_000), 24)
    assert not memory_table.fits((19_200_000_001, 0), 24)
    assert not memory_table.fits((0, 24_000_000_001), 24)
