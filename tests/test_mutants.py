"""The list of faults and the tool that applies them. `make mutants` itself reports an entry that no longer fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tools.mutants import Mutant, exists, load, problems

GOOD = Mutant("n", "a.py", "x = 1", "x = 3", ("t.py::test_a",))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A package of one file, and one file of tests."""
    file = GOOD.path(tmp_path)
    file.parent.mkdir(parents=True)
    file.write_text("x = 1\ny = 2\ny = 2\n")
    (tmp_path / "t.py").write_text("def helper(): ...\ndef test_a(): ...\n")
    return tmp_path


def test_names_differ_and_there_are_enough() -> None:
    assert len({mutant.name for mutant in load()}) == len(load()) >= 24


def test_a_name_that_stands_twice_is_refused(tmp_path: Path) -> None:
    entry = '[[mutant]]\nname = "a"\nfile = "b.py"\nold = "x"\nnew = "y"\ntests = ["t.py::test_a"]\n'
    (tmp_path / "list.toml").write_text(2 * entry)
    with pytest.raises(ValueError, match="two mutants of the name 'a'"):
        load(tmp_path / "list.toml")


def test_a_stale_entry_is_seen(tree: Path) -> None:
    assert problems(GOOD, tree) == []
    assert problems(replace(GOOD, old="nowhere to be found"), tree) != []
    assert problems(replace(GOOD, old="y = 2"), tree) != []  # more than once
    assert problems(replace(GOOD, new=GOOD.old), tree) != []
    assert problems(replace(GOOD, file="nowhere.py"), tree) != []
    assert problems(replace(GOOD, tests=("t.py::test_that_is_not",)), tree) != []
    assert problems(replace(GOOD, tests=("nowhere.py::test_x",)), tree) != []
    assert problems(replace(GOOD, tests=()), tree) != []


def test_a_fault_is_one_replacement(tree: Path) -> None:
    GOOD.apply(tree)
    assert GOOD.path(tree).read_text() == "x = 3\ny = 2\ny = 2\n"
    assert exists("t.py::test_a", tree) and exists("t.py::test_a[case]", tree) and not exists("t.py::test_b", tree)
