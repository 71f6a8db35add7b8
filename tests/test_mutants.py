"""The list of faults fits the code: `make mutants` runs them; this is the part that takes no time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tools.mutants import Mutant, exists, load, problems

MUTANTS = load()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_every_fault_stands_once_in_its_file_and_names_tests_that_exist(mutant: Mutant) -> None:
    assert problems(mutant) == []


def test_names_differ_and_there_are_enough() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 24


def test_a_stale_entry_is_seen() -> None:
    good = MUTANTS[0]
    assert problems(replace(good, old="nowhere to be found")) != []
    assert problems(replace(good, old="import")) != []  # more than once
    assert problems(replace(good, new=good.old)) != []
    assert problems(replace(good, file="core/nowhere.py")) != []
    assert problems(replace(good, tests=("tests/core/test_advantages.py::test_that_is_not",))) != []
    assert problems(replace(good, tests=("tests/nowhere.py::test_x",))) != []
    assert problems(replace(good, tests=())) != []


def test_a_fault_is_one_replacement(tmp_path: Path) -> None:
    file = tmp_path / "src" / "retouch" / "a.py"
    file.parent.mkdir(parents=True)
    file.write_text("x = 1\ny = 2\n")
    Mutant("n", "a.py", "x = 1", "x = 3", ()).apply(tmp_path)
    assert file.read_text() == "x = 3\ny = 2\n"
    (tmp_path / "t.py").write_text("def helper(): ...\ndef test_a(): ...\n")
    assert exists("t.py::test_a", tmp_path) and not exists("t.py::test_b", tmp_path)
