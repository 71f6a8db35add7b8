"""Break the package on purpose, one named fault at a time, and see that the tests notice: `make mutants`.

    python tools/mutants.py [NAME ...] [--jobs N] [--verbose]
    python tools/mutants.py --tier      # how many have a test in `make test`

The faults stand in mutants.toml. Each gets its own copy of the sources, and only its own tests run. A fault that
survives is a missing test; one whose piece of code is in no function, or in several places, is stale. Either ends with
exit code 1.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests import forked
from tests.tiers import Record, read
from tools.fragments import Place, Tree, locate, parsed

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tools" / "mutants.toml"
UNREAD = ("runs", "build", "dist", "site")
"""Folders of the repository that no test reads."""
COPIED = tuple(path.name for path in ROOT.iterdir() if not path.name.startswith(".") and path.name not in UNREAD)
TIMEOUT_S = 600

PASSED, FAILED, ELSEWHERE = 0, 1, 70

CHILD = f"""
import pathlib, sys
import pytest, retouch
if pathlib.Path.cwd() not in pathlib.Path(retouch.__file__).resolve().parents:
    print("the tests would import", retouch.__file__)
    sys.exit({ELSEWHERE})
sys.exit(pytest.main(sys.argv[1:]))
"""
"""Runs pytest on the copy in the working directory, and on nothing else: the package may be installed, too."""


@dataclass(frozen=True)
class Mutant:
    """A fault: a piece of code of one function, what stands there instead, and the tests that must see it."""

    name: str
    old: str
    new: str
    tests: tuple[str, ...]
    function: str = ""
    """Qualified name of the function or class; none for code outside of them."""

    def places(self, root: Path) -> list[tuple[Tree, Place]]:
        """Where the code stands in the package; see `tools.fragments`."""
        return locate(package(root), self.function, parsed(self.old, self.new)[0])

    def broken(self, root: Path) -> tuple[Path, str]:
        """The file below `root` that holds the code, and its text with the fault."""
        path = self.places(root)[0][0].path
        file = Tree(path)  # parsed again, since it is changed
        old, new = parsed(self.old, self.new)
        [(_, place)] = locate([file], self.function, old)
        place.replace(new)
        return path.relative_to(root), ast.unparse(ast.fix_missing_locations(file.module)) + "\n"


@cache
def package(root: Path) -> tuple[Tree, ...]:
    """The files of the package and its annexes below `root`."""
    return tuple(Tree(path) for path in sorted((root / "src").glob("retouch*/**/*.py")))


@dataclass(frozen=True)
class Verdict:
    """How the tests of a mutant ended: "killed", "SURVIVED", or "BROKEN" where they could not run; and why."""

    name: str
    result: str
    seconds: float
    why: str


def load(path: Path = LIST) -> list[Mutant]:
    """The list, in which every name stands once."""
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]
    twice = [name for name, count in Counter(entry["name"] for entry in entries).items() if count > 1]
    if twice:
        raise ValueError(f"{path.name} has two mutants of the name {twice[0]!r}")
    return [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def problems(mutant: Mutant, root: Path = ROOT) -> list[str]:
    """Why an entry cannot be used."""
    found: list[str] = []
    try:
        places = mutant.places(root)
        changes = ast.dump(ast.parse(mutant.old)) != ast.dump(ast.parse(mutant.new))
    except SyntaxError as error:
        return [f"is no Python: {error}"]
    if not any(mutant.function in tree.scopes for tree in package(root)):
        found.append(f"no function or class {mutant.function}")
    elif len(places) != 1:
        where = mutant.function or "the package"
        found.append(f"{where} holds the code {len(places)} times, not once: {mutant.old.strip().splitlines()[0]}")
    if not changes or not mutant.tests:
        found.append("changes nothing, or names no test")
    return found + [f"no test {test}" for test in mutant.tests if not exists(test, root)]


def exists(test: str, root: Path) -> bool:
    """Whether "tests/file.py::test_name", with or without the "[id]" of a case, is a function of that file."""
    file, _, name = test.partition("[")[0].partition("::")
    return name in functions(root / file)


@cache
def functions(file: Path) -> frozenset[str]:
    """Names of the functions of a file, by its lines: to parse every file of tests takes seconds."""
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    return frozenset(re.findall(r"^def (\w+)", text, re.MULTILINE))


def copy_tree(source: Path, target: Path, compiled: bool = True) -> None:
    """Files have the times of their originals, which those that are compiled name."""
    ignore = None if compiled else shutil.ignore_patterns("__pycache__")
    for name in COPIED:
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name, ignore=ignore)
        else:
            shutil.copy(source / name, target / name)


def run_tests(root: Path, tests: Iterable[str], stop_at: int = 1, timeout_s: float = TIMEOUT_S) -> tuple[int, str]:
    """pytest on a copy, until `stop_at` tests failed -> (exit code, output). Its process is a fork of one that imported
    all that is not of this repository."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(root / "src"), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
    }
    options = ["-q", "--no-header", "--show-capture=no", "-p", "no:cacheprovider", "-m", "not slow and not gpu"]
    command = [sys.executable, "-c", CHILD, *options, f"--maxfail={stop_at}", *tests]
    try:
        done = forked.run(command, cwd=root, env=environment, timeout=timeout_s, anew=True)
    except subprocess.TimeoutExpired:
        return -1, f"no end after {timeout_s} s"
    return done.returncode, done.stdout + done.stderr


def judge(mutant: Mutant, original: Path) -> Verdict:
    """Apply the fault to a copy of `original` and run its tests."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        root = Path(folder).resolve()
        copy_tree(original, root)
        path, text = mutant.broken(original)
        (root / path).write_text(text, encoding="utf-8")
        code, output = run_tests(root, mutant.tests)
    result = {FAILED: "killed", PASSED: "SURVIVED"}.get(code, "BROKEN")
    return Verdict(mutant.name, result, time.monotonic() - started, reason(output))


def reason(output: str) -> str:
    """The first line that says what failed."""
    lines = output.strip().splitlines()
    return next((line for line in lines if line.startswith(("FAILED", "ERROR", "E  "))), lines[-1] if lines else "")


def chosen(names: Sequence[str], mutants: Sequence[Mutant]) -> list[Mutant]:
    unknown = set(names) - {mutant.name for mutant in mutants}
    if unknown:
        sys.exit(f"no mutant {', '.join(sorted(unknown))}; there are: " + ", ".join(m.name for m in mutants))
    return [mutant for mutant in mutants if not names or mutant.name in names]


@cache
def unmarked(file: Path) -> frozenset[str]:
    """Those of `functions` that no marker of their own, or of their file, leaves out of `make test`."""
    found, marked = set[str](), False
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        if re.match(r"pytestmark = pytest\.mark\.(full|slow|gpu)\b", line):
            return frozenset()
        marked = marked or re.match(r"@(pytest\.mark\.)?(full|slow|gpu)\b", line) is not None
        if definition := re.match(r"def (\w+)", line):
            found |= set() if marked else {definition[1]}
            marked = False
    return frozenset(found)


def in_fast_tier(mutant: Mutant, record: Record, root: Path = ROOT) -> bool:
    """Whether `make test` runs a test of the mutant, or some of its cases."""
    files = {test: test.partition("[")[0].partition("::") for test in mutant.tests}
    return any(not record.leaves_out(test) and name in unmarked(root / file) for test, (file, _, name) in files.items())


def main() -> None:
    parser = argparse.ArgumentParser(description="Break the package on purpose; the tests must notice.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants to run; all without any")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (2)")
    parser.add_argument("--verbose", action="store_true", help="say what each test saw")
    parser.add_argument("--tier", action="store_true", help="count the mutants that have a test in `make test`")
    arguments = parser.parse_args()
    mutants = chosen(arguments.names, load())
    if arguments.tier:
        record = read()
        slow = [mutant.name for mutant in mutants if not in_fast_tier(mutant, record)]
        print(*slow, f"{len(mutants) - len(slow)} of {len(mutants)} mutants have a test in `make test`", sep="\n")
        return
    stale = [f"{mutant.name}: {problem}" for mutant in mutants for problem in problems(mutant)]
    if stale:
        sys.exit("stale entries in tools/mutants.toml:\n  " + "\n  ".join(stale))
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        original = Path(folder).resolve()
        copy_tree(ROOT, original, compiled=False)  # the sources may change while this runs
        started = time.monotonic()
        tests = dict.fromkeys(test for mutant in mutants for test in mutant.tests)
        code, output = run_tests(original, tests, stop_at=20, timeout_s=10 * TIMEOUT_S)
        if code != PASSED:
            sys.exit(f"the tests fail without any fault (exit code {code}):\n{output[-3000:]}")
        print(f"the tests pass without any fault ({time.monotonic() - started:.0f} s)", flush=True)
        with ThreadPoolExecutor(arguments.jobs) as pool:
            verdicts: list[Verdict] = []
            for verdict in pool.map(lambda mutant: judge(mutant, original), mutants):
                print(f"{verdict.name:56} · {verdict.result:8} · {verdict.seconds:5.1f} s", flush=True)
                if arguments.verbose or verdict.result != "killed":
                    print(f"    {verdict.why}", flush=True)
                verdicts.append(verdict)
    alive = [verdict.name for verdict in verdicts if verdict.result != "killed"]
    print(f"{len(verdicts) - len(alive)} of {len(verdicts)} killed" + (f"; not: {', '.join(alive)}" if alive else ""))
    sys.exit(1 if alive else 0)


if __name__ == "__main__":
    main()
