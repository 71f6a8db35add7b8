"""What glyph_structure finds and OCR does not, which rewards a pattern fools, and which gradient writes letters, as
committed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
FOUND: dict[str, Any] = json.loads((REPOSITORY / "benchmarks/results/structure.json").read_text(encoding="utf-8"))

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import inputs  # noqa: E402
import structure  # noqa: E402

from retouch_glyphs.glyph_structure import FOLDERS, WEIGHTS  # noqa: E402

ATTACKS = {row["attack"]: row for row in FOUND["attacks"]["rows"]}
AREAS = {name: areas["all"] for name, areas in FOUND["letters"]["auc"].items()}


def test_it_is_of_the_networks_that_lie_here() -> None:
    assert FOUND["inputs"] == {name: inputs.digest((folder / WEIGHTS).read_bytes()) for name, folder in FOLDERS.items()}
    assert FOUND["letters"]["count"] >= 1000


@pytest.mark.parametrize(("network", "least"), [("glyph_structure", 0.93), ("glyph_structure, robust", 0.92)])
def test_broken_letters_of_unseen_fonts_are_told_from_whole_ones_better_than_ocr_does(
    network: str, least: float
) -> None:
    """On the letters of the benchmark, and on those of the end of the training."""
    card = json.loads((FOLDERS[structure.NETWORKS[network]] / "card.json").read_text(encoding="utf-8"))
    assert min(AREAS[network], card["auc"]["letters of test fonts"]["all"]) >= least
    for name in ("1 - OCR confidence", "1 - NED"):
        assert AREAS[name] <= AREAS[network] - 0.1


def test_noise_fools_each_reward_alone_and_no_letters_appear() -> None:
    """As the page says of the attacks."""
    assert FOUND["attacks"]["steps"] >= 200 and len(FOUND["attacks"]["seeds"]) >= 3
    assert ATTACKS["glyph_structure, gradient"]["glyph_structure"] > 0.95
    assert ATTACKS["OCR confidence, evolution"]["OCR confidence"] > 0.9 and ATTACKS["NED, evolution"]["NED"] > 0.8
    assert ATTACKS["glyph_structure, gradient"]["NED"] < 0.1 and ATTACKS["NED, evolution"]["glyph_structure"] < 0.1
    assert ATTACKS["NED x glyph_structure, evolution"]["NED x glyph_structure"] < 0.2
    others = [row for name, row in ATTACKS.items() if name != "glyph_structure, robust, gradient"]
    assert max(row["glyph correlation"] for row in others) < 0.1


def test_the_gradient_of_the_robust_network_writes_letters_that_ocr_reads() -> None:
    found = ATTACKS["glyph_structure, robust, gradient"]
    assert round(found["NED"], 2) == 0.68 and found["OCR confidence"] > 0.7 and found["glyph correlation"] > 0.2
    assert ATTACKS["glyph_structure, gradient"]["NED"] < 0.01


def test_the_page_says_what_was_found() -> None:
    page = (REPOSITORY / "docs/measured.md").read_text(encoding="utf-8")
    for table in structure.tables(FOUND):
        assert table in page
