"""The tiers: what `make test` takes, and that the list of expensive tests is about tests that exist."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tools.durations import guards, listed, smallest
from tools.mutants import Mutant, exists, in_fast_tier, load

from retouch.algorithms import ALGORITHMS
from retouch.families import FAMILIES
from tests import tiers
from tests.algorithms import test_cells
from tests.selection import cells, covering

ROOT = Path(__file__).parents[1]


def test_the_list_names_tests_that_exist() -> None:
    """A test that was renamed would be in `make test` again, whatever it costs."""
    record = tiers.read()
    missing = [test for test in {**record.expensive, **record.guards} if not exists(test, ROOT)]
    assert not missing, "run: make test-ci && python tools/durations.py .venv/durations-test-ci.json"


def test_the_pages_name_the_limits() -> None:
    limit, alarm = (f"{seconds:g}".removeprefix("0") for seconds in (tiers.LIMIT_S, tiers.ALARM_S))
    guide = " ".join((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split())
    assert f"every test that costs less than {limit} processor seconds" in guide
    assert f"names the tests over {alarm} s that are not in the list" in guide
    assert f'"ci: costs {limit} processor seconds or more' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_nine_of_ten_mutants_have_a_test_in_make_test() -> None:
    mutants, record = load(), tiers.read()
    slow = [mutant.name for mutant in mutants if not in_fast_tier(mutant, record)]
    assert len(slow) <= len(mutants) / 10, slow


def test_make_test_trains_each_algorithm_and_each_family() -> None:
    """`vlm_grpo` has a run of its own."""
    vlm_grpo = (ROOT / "tests/algorithms/test_vlm_grpo.py").read_text(encoding="utf-8")
    assert re.search(r"^@pytest\.mark\.fast\ndef test_a_run_leaves_what_every_run_leaves\(", vlm_grpo, re.MULTILINE)
    trained = covering(test_cells.CHOSEN, 1)
    assert {algorithm for _, algorithm, _ in trained} == set(ALGORITHMS) - {"vlm_grpo"}
    assert {family for family, _, _ in trained} == {family for family, *_ in test_cells.CELLS}
    assert {family for family, *_ in test_cells.CELLS} <= set(FAMILIES)


def test_a_marker_stands_at_a_test() -> None:
    """A class that was written between the two once took it away."""
    texts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
    assert not [
        path
        for path, text in texts.items()
        if re.search(r"^@pytest\.mark\.\w+\n(class|@pytest\.fix)", text, re.MULTILINE)
    ]


def test_cells_of_make_test_are_marked() -> None:
    rows = [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
    marks = {param.values: [mark.name for mark in param.marks] for param in cells(rows, 1, fast=[("a", 2)])}
    assert marks == {("a", 1): [], ("a", 2): ["fast"], ("b", 1): ["full"], ("b", 2): []}


def test_an_expensive_test_is_listed_by_its_name_or_its_cases() -> None:
    first = {"t.py::a[1]": 0.9, "t.py::a[2]": 0.05, "t.py::b[1]": 0.5, "t.py::b[2]": 2.0, "t.py::c": 0.05}
    second = {"t.py::a[1]": 0.4, "t.py::b[1]": 3.0}
    entries = listed(smallest([first, second]))
    assert entries == {"t.py::a[1]": 0.4, "t.py::b": 2.0}
    record = tiers.Record(entries, {})
    assert record.leaves_out("t.py::b[3]") and record.leaves_out("t.py::a[1]")
    assert not record.leaves_out("t.py::a[2]") and not record.leaves_out("t.py::a")


def test_the_cheapest_tests_of_mutants_stay(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("".join(f"def test_{name}(): pass\n" for name in "abcd"))
    seconds = {"t.py::test_a": 0.05, "t.py::test_b[1]": 0.9, "t.py::test_b[2]": 0.5, "t.py::test_c": 0.8}
    a, b, c, d = (f"t.py::test_{name}" for name in "abcd")
    seconds[d] = 9.0
    named = [(a, c), (b, c), *[(a,)] * 7, (d,)]
    mutants = [Mutant(str(number), "x", "y", tests) for number, tests in enumerate(named)]
    found = guards(seconds, mutants[:-1])
    assert found == {"t.py::test_b[2]": 0.5}
    record = tiers.Record(listed(seconds), found)
    assert [record.leaves_out(test) for test in (f"{b}[1]", f"{b}[2]", b, c)] == [1, 0, 0, 1]
    assert [in_fast_tier(mutant, record, tmp_path) for mutant in mutants] == [True] * 9 + [False]


MARKED = """
slow = pytest.mark.slow

def test_plain(): pass

@pytest.mark.full
def test_full(): pass

@slow
@pytest.mark.parametrize(
    "case", [1, 2]
)
def test_slow(case): pass

@pytest.mark.parametrize("case", [1, pytest.param(2, marks=pytest.mark.full)])
def test_some_cases(case): pass
"""


def test_a_marked_test_is_not_in_make_test(tmp_path: Path) -> None:
    """Whatever it costs: the list of expensive tests does not name tests that `make test-ci` does not run."""
    (tmp_path / "some.py").write_text(MARKED)
    (tmp_path / "all.py").write_text(f"pytestmark = pytest.mark.full\n{MARKED}")
    record = tiers.Record({}, {})
    names = ("test_plain", "test_full", "test_slow", "test_some_cases[1]", "test_missing")
    fast = {
        (file, name): in_fast_tier(Mutant("m", "x", "y", (f"{file}.py::{name}",)), record, tmp_path)
        for file in ("some", "all")
        for name in names
    }
    assert [test for test, runs in fast.items() if runs] == [("some", "test_plain"), ("some", "test_some_cases[1]")]
    both = Mutant("m", "x", "y", ("some.py::test_full", "some.py::test_plain"))
    assert in_fast_tier(both, record, tmp_path)


SLEEPER = """
import subprocess, sys, time
import pytest

BUSY = "import time; end = time.process_time() + {}\\nwhile time.process_time() < end: pass"

@pytest.fixture(scope="module")
def shared():
    exec(BUSY.format(0.2))

def test_in_this_process(): exec(BUSY.format(0.3))
def test_in_a_child(): subprocess.run([sys.executable, "-I", "-S", "-c", BUSY.format(0.3)], check=True)
def test_that_waits(): time.sleep(0.3)
@pytest.mark.parametrize("case", range(4))
def test_that_shares(case, shared): pass
"""


CONFTEST = """
from pathlib import Path
from tests import tiers

tiers.ALARM_S = 0.25

def pytest_configure(config):
    config.pluginmanager.register(tiers.Recorder(Path("seconds.json")))
"""


@pytest.mark.parametrize("workers", [pytest.param([], marks=pytest.mark.full), ["-n", "2"]])
def test_processor_seconds_are_recorded_and_late_tests_named(workers: list[str], tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(SLEEPER)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "xdist", *workers]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    seconds = {test.split("::")[1]: s for test, s in json.loads((tmp_path / "seconds.json").read_text()).items()}
    assert 0.28 < seconds["test_in_this_process"] < 1 and 0.28 < seconds["test_in_a_child"] < 1
    assert seconds["test_that_waits"] < 0.2
    shares = [seconds[f"test_that_shares[{case}]"] for case in range(4)]
    assert max(shares) - min(shares) < 0.1 and min(shares) > 0.04  # .2 s of the fixture, for each worker that has it
    named = [line.split("::")[1] for line in done.stdout.splitlines() if line.lstrip()[:1].isdigit() and "::" in line]
    assert {"test_in_this_process", "test_in_a_child"} <= set(named) and "test_that_waits" not in named


@pytest.mark.parametrize(("tests", "lint", "code"), [(1, 0, 0), (1, 1, 2), (2, 0, 2), (0, 0, 2)])
def test_tests_are_repeated_after_the_lint_that_ran_beside_them(
    tests: int, lint: int, code: int, tmp_path: Path
) -> None:
    """A tenth of the time of all tests goes into it: what it ended with is kept."""
    _clone(tmp_path)
    if lint:
        (tmp_path / "pyright.code").touch()
    environment = {**os.environ, "MAKEFLAGS": ""}  # of a make whose test this is
    first = subprocess.run(["make", "test-ci"], cwd=tmp_path, env=environment, capture_output=True)
    assert (first.returncode == 0) == (lint == 0)
    (tmp_path / "ran").unlink()
    (tmp_path / ".venv" / "tests.code").write_text(str(tests))
    again = subprocess.run(["make", "repeat"], cwd=tmp_path, env=environment, capture_output=True)
    assert again.returncode == code
    if code == 0:
        [command] = (tmp_path / "ran").read_text().splitlines()
        assert command.startswith("python -m pytest") and "--last-failed" in command


def _clone(folder: Path) -> None:
    """A folder with the Makefile and programs that note their arguments, and fail if there is a NAME.code."""
    (folder / ".venv" / "bin").mkdir(parents=True)
    for name in ("pyproject.toml", "constraints.txt", ".venv/.installed"):
        (folder / name).touch()
    for name in ("python", "pyright", "ruff", "lint-imports"):
        (folder / ".venv" / "bin" / name).write_text(
            f'#!/bin/sh\necho {name} "$@" >> ran\n[ ! -e {name}.code ] || exit 1'
        )
        (folder / ".venv" / "bin" / name).chmod(0o755)
    shutil.copy(ROOT / "Makefile", folder)


@pytest.mark.parametrize("target", ["test-ci", "test-rest"])
def test_a_run_that_is_killed_leaves_nothing_to_repeat(target: str, tmp_path: Path) -> None:
    """Not even what an earlier one ended with: other code has passed then."""
    _clone(tmp_path)
    for name, code in (("tests", 1), ("lint", 0)):
        (tmp_path / ".venv" / f"{name}.code").write_text(str(code))
    (tmp_path / ".venv" / "bin" / "python").write_text('#!/bin/sh\n[ "$2" != pytest ] || kill -9 $PPID')
    environment = {**os.environ, "MAKEFLAGS": ""}
    assert subprocess.run(["make", target], cwd=tmp_path, env=environment, capture_output=True).returncode
    assert subprocess.run(["make", "repeat"], cwd=tmp_path, env=environment, capture_output=True).returncode
    assert not list((tmp_path / ".venv").glob("*.code"))


def test_a_repeat_after_the_rest_asks_no_lint_of_it(tmp_path: Path) -> None:
    _clone(tmp_path)
    (tmp_path / ".venv" / "lint.code").write_text("1")
    environment = {**os.environ, "MAKEFLAGS": ""}
    assert subprocess.run(["make", "test-rest"], cwd=tmp_path, env=environment, capture_output=True).returncode == 0
    (tmp_path / ".venv" / "tests.code").write_text("1")
    assert subprocess.run(["make", "repeat"], cwd=tmp_path, env=environment, capture_output=True).returncode == 0
