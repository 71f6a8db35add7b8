"""The tiers of the tests, by processor seconds: `make test` runs those that cost little, `make test-ci` the others too.

`durations.json` names every test, or case of a test, that costs `LIMIT_S` or more; it gets the marker `ci`, and `make
test` leaves it out. Two kinds run there all the same: those with the marker `fast`, and the guards, which are the
cheapest tests of mutants that no other test of `make test` catches. `tools/durations.py` writes the file from what
`--record-durations FILE` measured.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from tests import forked

RECORD = Path(__file__).with_name("durations.json")

LIMIT_S = 0.06
"""Processor seconds from which a test belongs to the tier `ci`."""

ALARM_S = 0.5
"""Processor seconds from which `make test-ci` names a test that is in no list: the first test of a process that needs a
library pays for its import, and a busy machine shares its cores."""


def of_function(test: str) -> str:
    """The name of a test without the case of its parameters."""
    return test.partition("[")[0]


@dataclass(frozen=True)
class Record:
    """`durations.json`: tests or cases of tests, and their processor seconds."""

    expensive: Mapping[str, float]
    guards: Mapping[str, float]

    @cached_property
    def _guarded(self) -> frozenset[str]:
        """Functions of which a case is a guard."""
        return frozenset(map(of_function, self.guards))

    def has(self, test: str) -> bool:
        """Whether the seconds of a test are known to be many."""
        return test in self.expensive or of_function(test) in self.expensive

    def leaves_out(self, test: str) -> bool:
        """Whether `make test` leaves out a test, or if it is named without its case, all of its cases."""
        return self.has(test) and test not in self.guards and test not in self._guarded


def read(path: Path = RECORD) -> Record:
    return Record(**json.loads(path.read_text(encoding="utf-8")))


def mark(items: Iterable[pytest.Item]) -> None:
    """Put every test that `make test` leaves out into the tier `ci`, and those of a browser, which starts slowly."""
    record = read()
    for item in items:
        driven = "browser" in getattr(item, "fixturenames", ())
        if (driven or record.leaves_out(item.nodeid)) and item.get_closest_marker("fast") is None:
            item.add_marker(pytest.mark.ci)


def cpu_seconds() -> float:
    """Processor seconds of this process, of the children that it has waited for, and of forks of the server."""
    return sum(os.times()[:4]) + forked.cpu_seconds


@dataclass
class Measured:
    """Processor seconds of tests, and of the fixtures that several tests share."""

    own: dict[str, float] = field(default_factory=dict)
    uses: dict[str, list[str]] = field(default_factory=dict)
    fixtures: Counter[str] = field(default_factory=Counter)

    def add(self, test: str, about: Mapping[str, Any]) -> None:
        """What a worker reported of a test: its own seconds, the fixtures that it uses, and those that it was first to
        use, with their seconds."""
        self.own[test], self.uses[test] = about["own"], about["uses"]
        self.fixtures.update(about["made"])

    def seconds(self) -> dict[str, float]:
        """Test -> its own seconds, and an equal share of each fixture that it uses with others."""
        users = Counter(name for uses in self.uses.values() for name in uses)
        share = {name: seconds / users[name] for name, seconds in self.fixtures.items() if users[name]}
        return {test: own + sum(share.get(name, 0.0) for name in self.uses[test]) for test, own in self.own.items()}


class Recorder:
    """A plug-in of pytest that measures every test; workers report to the process that started them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._measured = Measured()
        self._made: Counter[str] = Counter()
        self._started = 0.0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Generator[None, Any, Any]:
        self._started = cpu_seconds()
        self._made.clear()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, Any, Any]:
        started, inner = cpu_seconds(), self._made.total()
        try:
            return (yield)
        finally:
            if fixturedef.scope != "function":  # less what the fixtures took that this one asked for
                self._made[name_of(fixturedef)] += cpu_seconds() - started - (self._made.total() - inner)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Generator[None, Any, Any]:
        report = yield
        if report.when == "teardown":
            definitions = item._fixtureinfo.name2fixturedefs.values()
            report.durations = {
                "own": cpu_seconds() - self._started - self._made.total(),
                "uses": [name_of(last) for *_, last in definitions if last.scope != "function"],
                "made": dict(self._made),
            }
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        if about := getattr(report, "durations", None):
            self._measured.add(report.nodeid, about)

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        if hasattr(config, "workerinput"):
            return
        seconds = self._measured.seconds()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(dict(sorted(seconds.items())), indent=0), encoding="utf-8")
        record = read()
        if late := {test: s for test, s in seconds.items() if s > ALARM_S and not record.has(test)}:
            terminalreporter.section(f"{len(late)} tests over {ALARM_S} CPU s are not in {RECORD.name}")
            for test, used in sorted(late.items(), key=lambda pair: -pair[1]):
                terminalreporter.write_line(f"{used:6.2f} s  {test}")
            terminalreporter.write_line(f"make them faster, or: python tools/durations.py {self._path}")


def name_of(fixture: Any) -> str:
    return f"{fixture.baseid}::{fixture.argname}"
