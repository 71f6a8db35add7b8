"""What a process asks of its machine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from retouch import machine


def test_freed_memory_is_returned_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Again and again; a system without glibc has no such call."""
    trimmed: list[int] = []
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            raise InterruptedError

    monkeypatch.setattr(machine.time, "sleep", sleep)
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: SimpleNamespace(malloc_trim=trimmed.append))
    with pytest.raises(InterruptedError):
        machine._return_again()
    assert trimmed == [0, 0] and slept == [machine.TRIM_S] * 3
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: SimpleNamespace())
    machine.return_memory()
