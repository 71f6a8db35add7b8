"""The list of faults and the tool that applies them. `make mutants` itself reports an entry that no longer fits."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest
from tools.mutants import Mutant, exists, load, package, problems

CODE = '''
LIMIT = 1

class Table:
    """Of rows."""

    def weights(self, rows, noise):
        total = sum(row.weight for row in rows)
        if total > noise:
            total = max(total, 0.5)
        y = 2
        y = 2
        return total / (total + noise)  # the share
'''

TOTAL = Mutant("n", "total > noise", "total < noise", ("t.py::test_a",), "Table.weights")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A package of one file, and one file of tests."""
    write(tmp_path, CODE)
    (tmp_path / "t.py").write_text("def helper(): ...\ndef test_a(): ...\n")
    return tmp_path


def write(root: Path, code: str, name: str = "a.py") -> None:
    folder = root / "src/retouch"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(code)
    package.cache_clear()


def changed(mutant: Mutant, root: Path) -> str:
    """The one line that the fault makes, which the code does not have."""
    path, text = mutant.broken(root)
    before = ast.unparse(ast.parse((root / path).read_text())).splitlines()
    [line] = [line.strip() for line in text.splitlines() if line not in before]
    return line


def test_names_differ_and_there_are_enough() -> None:
    assert len({mutant.name for mutant in load()}) == len(load()) >= 24


def test_a_name_that_stands_twice_is_refused(tmp_path: Path) -> None:
    entry = '[[mutant]]\nname = "a"\nold = "x"\nnew = "y"\ntests = ["t.py::test_a"]\n'
    (tmp_path / "list.toml").write_text(2 * entry)
    with pytest.raises(ValueError, match="two mutants of the name 'a'"):
        load(tmp_path / "list.toml")


def test_no_entry_is_stale() -> None:
    """An entry whose code was rewritten breaks nothing, and nobody would miss it before the next `make mutants`."""
    assert [problem for mutant in load() for problem in problems(mutant)] == []


def test_a_stale_entry_is_seen(tree: Path) -> None:
    assert problems(TOTAL, tree) == []
    assert problems(replace(TOTAL, old="total >= noise"), tree) != []
    assert problems(replace(TOTAL, old="y = 2"), tree) != []  # more than once
    assert problems(replace(TOTAL, old="total >"), tree) != []  # no Python
    assert problems(replace(TOTAL, new="total >  noise"), tree) != []
    assert problems(replace(TOTAL, tests=("t.py::test_that_is_not",)), tree) != []
    assert problems(replace(TOTAL, tests=("nowhere.py::test_x",)), tree) != []
    assert problems(replace(TOTAL, tests=()), tree) != []


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("total > noise", "total < noise", "if total < noise:"),
        ("0.5", "0.25", "total = max(total, 0.25)"),
        ("if total > noise:\n    total = max(total, .5)", "total = 3", "total = 3"),
        ("total = max(total, 0.5)", "", "pass"),
        ("return total / (total + noise)", "return total/noise", "return total / noise"),
        # the names may differ, one for one
        ("return a / (a + b)", "return a / b", "return total / noise"),
        ("s = sum(r.size for r in table)", "s = 1", "total = 1"),
    ],
)
def test_a_fault_is_one_replacement(old: str, new: str, line: str, tree: Path) -> None:
    mutant = replace(TOTAL, old=old, new=new)
    assert problems(mutant, tree) == []
    assert changed(mutant, tree) == line


@pytest.mark.parametrize(
    "old",
    [
        "return a / (b + a)",  # another order
        "return a / (a + a)",  # one name for two
        "return a / (a - b)",
        "s = max(r.size for r in table)",  # names of Python itself stay
        "s = min(s, 0.5)",
        "s = max(s, 0.7)",
    ],
)
def test_other_code_with_other_names_is_not_taken_for_it(old: str, tree: Path) -> None:
    assert problems(replace(TOTAL, old=old), tree) != []


def test_renaming_and_moving_cost_nothing(tree: Path) -> None:
    other = CODE.replace("total", "whole").replace("noise", "spread")
    (tree / "src/retouch/a.py").unlink()
    write(tree, other, "elsewhere.py")
    assert problems(TOTAL, tree) == []
    assert changed(TOTAL, tree) == "if whole < spread:"


def test_code_is_not_looked_for_in_another_function(tree: Path) -> None:
    """The name of one that is gone, or whose code had moved, was ignored: an entry named the wrong place."""
    assert problems(replace(TOTAL, function="Table.shares"), tree) == ["no function or class Table.shares"]
    write(tree, f"{CODE}\n    def shares(self):\n        ...\n")
    [problem] = problems(replace(TOTAL, function="Table.shares"), tree)
    assert problem.startswith("Table.shares holds the code 0 times")


def test_code_of_a_file_has_no_function(tree: Path) -> None:
    assert changed(Mutant("n", "LIMIT = 1", "LIMIT = 2", ("t.py::test_a",)), tree) == "LIMIT = 2"


def test_tests_are_named_without_or_with_their_case(tree: Path) -> None:
    assert exists("t.py::test_a", tree) and exists("t.py::test_a[case]", tree) and not exists("t.py::test_b", tree)
