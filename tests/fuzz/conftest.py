"""The table of `make trust`."""

from __future__ import annotations

import pytest

from tests.fuzz.inputs import CASES, tried


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not CASES:
        return
    for target, number in sorted(tried.items()):
        terminalreporter.write_line(f"{target:24}{number:8,}")
    terminalreporter.write_line(f"{'in all':24}{sum(tried.values()):8,}")
