"""docs/architecture.md and the pages for contributors: files, names and seeds that they name are those of the code."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

import pytest

from .pages import DOCS, REPOSITORY

SOURCE = REPOSITORY / "src" / "retouch"
PAGES = [DOCS / "architecture.md", DOCS / "extending.md", REPOSITORY / "CONTRIBUTING.md"]
APART = {"site/", "weights/", "my_rules.py"}
"""What commands or readers of a page write."""
OTHERS = {"data/split.py", "data/formats/votes.py"}
"""Files with seeds of commands on lists, not of a run or its images."""

SEED = re.compile(r"(?:derive_seed|row_generators)\(((?:[^()]|\([^()]*\))*)\)")
PARTS = re.compile(r"<!-- \S+: written by .*?<!-- /\S+ -->|^```.*?^```$", re.MULTILINE | re.DOTALL)


def text_of(page: Path) -> str:
    """A page without code blocks and parts that a tool writes."""
    return PARTS.sub("", page.read_text(encoding="utf-8"))


@cache
def repository() -> str:
    """Every file and folder of the repository with code, a line each."""
    found: list[str] = []
    for root in ("benchmarks", "examples", "src", "tests", "tools"):
        for folder, folders, files in os.walk(REPOSITORY / root):
            folders[:] = [name for name in folders if name != "__pycache__"]
            place = Path(folder).relative_to(REPOSITORY).as_posix()
            found += [f"{place}/", *(f"{place}/{file}" for file in files)]
    return "\n".join(found)


def files_of(path: str) -> list[Path]:
    """What a path of a page names, from any folder on; `NAME` stands for any name."""
    pattern = "[^/\n]+".join(re.escape(part) for part in path.split("NAME"))
    return [REPOSITORY / found for found in re.findall(rf"^(?:[^\n]*/)?{pattern}$", repository(), re.MULTILINE)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_and_folder_that_is_named_exists(page: Path) -> None:
    named = re.findall(r"`((?:\w+/)*(?:\w+/|\w+\.py))`", text_of(page))
    assert len(named) > 5
    assert [path for path in named if path not in APART and not files_of(path)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_is_named_of_a_file_is_in_it(page: Path) -> None:
    """As in `settle` of `training/scoring.py`."""
    for name, path in re.findall(r"`(\w+)`\s+of\s+`([\w/]+\.py)`", text_of(page)):
        defined = re.compile(rf"^(?:(?:def|class) )?{name}\b", re.MULTILINE)
        assert any(defined.search(file.read_text(encoding="utf-8")) for file in files_of(path)), (name, path)


def purposes() -> set[tuple[str, str]]:
    """(file, text) of the texts from which the seeds of a run are derived."""
    found = set[tuple[str, str]]()
    for folder in ("training", "rollout", "data", "algorithms", "use"):
        for file in (SOURCE / folder).rglob("*.py"):
            path = file.relative_to(SOURCE).as_posix()
            for call in SEED.findall(file.read_text(encoding="utf-8")):
                found |= {(path, text) for text in re.findall(r'"(\w+)"', call) if path not in OTHERS}
    return found


def test_every_seed_of_a_run_is_in_the_table_with_its_file() -> None:
    table = text_of(DOCS / "architecture.md").partition("## Seeds")[2].partition("\n## ")[0]
    rows = [row.rpartition(" | ") for row in table.splitlines() if row.startswith("| ")][1:]
    found = purposes()
    assert len(found) > 10
    for path, text in found:
        files = [file for parts, _, last in rows if f'`"{text}"`' in parts for file in re.findall(r"`([^`]+)`", last)]
        assert any(SOURCE / path in files_of(file) for file in files), (path, text, files)


def test_every_file_with_rules_is_in_the_list_of_sections() -> None:
    """Those with a method `check` of a section; `config/base.py` has its base, which rejects nothing."""
    rules = text_of(DOCS / "architecture.md").partition("\nSections are in ")[2].partition("\n\n")[0]
    listed = {file for path in re.findall(r"`([\w/]+\.py)`", rules) for file in files_of(path)}
    with_rules = [file for file in SOURCE.rglob("*.py") if "def check(self, run: RunConfig" in file.read_text("utf-8")]
    assert len(with_rules) > 10
    assert {*with_rules} - listed == {SOURCE / "config/base.py"}
