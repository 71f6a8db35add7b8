"""Write tests/durations.json, the list of tests that `make test` leaves out, from measured processor seconds.

    make test-ci && python tools/durations.py .venv/durations-test-ci.json [FILE ...]

Of several files the smallest number of a test counts: the first test of a process that needs a library pays for its
import. A test is listed by its name if all of its cases cost `tests.tiers.LIMIT_S` or more, else by its cases. Of the
tests of mutants that `make test` would miss, the cheapest are kept as guards, until `SHARE` of the mutants has
one.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.tiers import LIMIT_S, RECORD, of_function  # noqa: E402
from tools.mutants import Mutant, load  # noqa: E402

SHARE = 0.905
"""Of the mutants; 90 % are required (`tests/test_tiers.py`), and some are added before the list is written again."""


def smallest(measured: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Test -> its smallest number of seconds."""
    seconds: dict[str, float] = {}
    for one in measured:
        for test, value in one.items():
            seconds[test] = min(value, seconds.get(test, value))
    return seconds


def listed(seconds: Mapping[str, float]) -> dict[str, float]:
    """The entries of the list: tests, or cases of tests, with the largest number of their seconds."""
    cases: dict[str, dict[str, float]] = defaultdict(dict)
    for test, value in seconds.items():
        cases[of_function(test)][test] = value
    entries: dict[str, float] = {}
    for function, values in cases.items():
        if min(values.values()) >= LIMIT_S:
            entries[function] = max(values.values())
        else:
            entries.update({test: value for test, value in values.items() if value >= LIMIT_S})
    return {test: round(value, 2) for test, value in sorted(entries.items())}


def guards(seconds: Mapping[str, float], mutants: Sequence[Mutant]) -> dict[str, float]:
    """The expensive tests that `make test` runs for the sake of mutants, with their seconds."""
    cases: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for test, value in seconds.items():
        cases[of_function(test)].append((value, test))
    cheapest = sorted(
        min(
            (min(cases[of_function(test)]) for test in mutant.tests if cases[of_function(test)]), default=(math.inf, "")
        )
        for mutant in mutants
    )
    wanted = cheapest[: math.ceil(SHARE * len(mutants))]
    return {test: round(value, 2) for value, test in wanted if test and value >= LIMIT_S}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the list of tests that cost much.")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="what --record-durations wrote")
    measured = [json.loads(file.read_text(encoding="utf-8")) for file in parser.parse_args().files]
    seconds = smallest(measured)
    record = {"expensive": listed(seconds), "guards": guards(seconds, load())}
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for name, entries in record.items():
        print(f"{name}: {len(entries)} tests, {sum(entries.values()):.0f} s")


if __name__ == "__main__":
    main()
