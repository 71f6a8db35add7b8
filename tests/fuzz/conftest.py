"""The table of `make trust`, printed and, for docs/trust.md, as JSON."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from tests.fuzz.inputs import CASES, LONGEST_S, MOST_BYTES, faults, tried

OUT = os.environ.get("RETOUCH_FUZZ_OUT")
"""JSON file to write at the end."""

_started = time.monotonic()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
    if not CASES:
        return
    for target, number in sorted(tried.items()):
        terminalreporter.write_line(f"{target:32}{number:8,}")
    terminalreporter.write_line(f"{'in all':32}{sum(tried.values()):8,}")
    if OUT:
        failed = len(terminalreporter.stats.get("failed", [])) + len(terminalreporter.stats.get("error", []))
        content = {
            "targets": dict(sorted(tried.items())),
            "cases": sum(tried.values()),
            "failed_tests": failed,
            **{fault: faults[fault] for fault in ("tracebacks", "hangs", "over_memory")},
            "longest_s": LONGEST_S,
            "most_bytes": MOST_BYTES,
            "seconds": round(time.monotonic() - _started),
        }
        Path(OUT).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
