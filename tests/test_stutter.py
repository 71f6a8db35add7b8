"""The tool that holds up what it runs (`tools/stutter.py`)."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tools import stutter
from tools.stutter import Stutter, processes

from tests.rewards.fakes import freeze, until


@contextmanager
def two_processes() -> Iterator[tuple[int, int]]:
    """A process and its child."""
    with subprocess.Popen(["/bin/sh", "-c", "sleep 600 & wait"], start_new_session=True) as parent:
        try:
            until(lambda: bool(children(parent.pid)))
            yield parent.pid, *children(parent.pid)
        finally:
            os.killpg(parent.pid, signal.SIGKILL)


def children(pid: int) -> list[int]:
    return [one.pid for one in processes().values() if one.parent == pid and one.state != "Z"]


def stopped(pid: int) -> bool:
    return processes()[pid].state == "T"


def test_a_process_and_its_child_are_held_up_at_different_times_and_go_on() -> None:
    with two_processes() as both:
        holds_up = Stutter(both[0], held=(5.0, 5.0), every=(10.0, 20.0), seed=1)
        holds_up.tick(0.0)
        due = holds_up.due.copy()
        assert due.keys() == set(both) and due[both[0]] != due[both[1]]
        for pid in both:
            assert not stopped(pid)
            holds_up.due = {one: due[pid] if one == pid else 1e9 for one in both}
            holds_up.tick(due[pid])
            until(lambda pid=pid: stopped(pid))
            holds_up.tick(due[pid] + 4.9)
            assert stopped(pid)
            holds_up.tick(due[pid] + 5.0)
            until(lambda pid=pid: not stopped(pid))
        assert holds_up.times == 2


def test_what_a_test_stopped_itself_stays_stopped() -> None:
    with two_processes() as (_, child):
        freeze(child)
        holds_up = Stutter(child, held=(1.0, 1.0), every=(0.0, 0.0), seed=1)
        for now in range(4):
            holds_up.tick(float(now))
        holds_up.release()
        assert stopped(child) and holds_up.times == 0


def test_an_interrupted_command_is_not_left_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(seconds: float) -> None:
        until(lambda: any(stopped(pid) for pid in children(os.getpid())))
        raise KeyboardInterrupt

    before = set(children(os.getpid()))
    with monkeypatch.context() as patched:
        patched.setattr("tools.stutter.time", type("Time", (), {"sleep": interrupted, "monotonic": time.monotonic}))
        assert stutter.run(["sleep", "600"], (9.0, 9.0), (0.0, 0.0), 0.0, 1) == -signal.SIGTERM
    assert set(children(os.getpid())) <= before


def test_a_command_gets_the_plug_in_and_its_code_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_PLUGINS", raising=False)
    told = "test $STUTTER_LATE,$STUTTER_SEED,$PYTEST_PLUGINS = 0.25,7,tools.stutter && exit 3"
    assert stutter.main(["--late", "0.25", "--seed", "7", "--", "/bin/sh", "-c", told]) == 3


def test_a_thread_runs_after_its_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, ran, delays = threading.Event(), threading.Event(), list[float]()

    def wait(seconds: float) -> None:
        delays.append(seconds)
        gate.wait(60)

    monkeypatch.setattr(threading.Thread, "start", threading.Thread.start)  # put back at the end
    monkeypatch.setattr("tools.stutter.time", type("Time", (), {"sleep": wait}))
    stutter.delay_threads(0.3, 1)
    thread = threading.Thread(target=ran.set)
    thread.start()
    assert not ran.is_set()
    gate.set()
    thread.join(60)
    assert ran.is_set() and 0 < delays[0] <= 0.3 and "run" not in vars(thread)


def test_a_signal_reaches_another_process_after_its_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ended meanwhile gets none: its number may be that of another."""
    gate, delays = threading.Event(), list[float]()

    def wait(seconds: float) -> None:
        delays.append(seconds)
        gate.wait(60)

    for name in ("kill", "killpg"):
        monkeypatch.setattr(os, name, getattr(os, name))  # put back at the end
    kill = os.kill
    with two_processes() as (parent, child):
        monkeypatch.setattr("tools.stutter.time", type("Time", (), {"sleep": wait}))
        stutter.delay_signals(0.3, 1)
        os.kill(parent, signal.SIGTERM)
        os.kill(child, signal.SIGSTOP)
        os.kill(parent, 0)
        until(lambda: len(delays) == 2)
        assert not stopped(child) and all(0 < one <= 0.3 for one in delays)
        kill(parent, signal.SIGKILL)
        until(lambda: processes()[parent].state == "Z")
        gate.set()
        until(lambda: stopped(child))


def test_a_signal_to_itself_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "kill", os.kill)
    monkeypatch.setattr(os, "killpg", os.killpg)
    stutter.delay_signals(600.0, 1)
    got = list[int]()
    before = signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert got == [signal.SIGUSR1]
    with pytest.raises(ProcessLookupError):
        os.kill(2**22 + 1, signal.SIGTERM)


def test_processes_that_start_later_are_held_up_too() -> None:
    """Workers, servers and launchers start after the program that starts them."""
    with subprocess.Popen(["/bin/sh", "-c", "read line; sleep 600 & wait"], stdin=subprocess.PIPE) as parent:
        holds_up = Stutter(parent.pid, held=(9.0, 9.0), every=(0.0, 0.0), seed=1)
        try:
            holds_up.tick(0.0)
            assert set(holds_up.due) == {parent.pid}
            holds_up.release()
            assert parent.stdin is not None
            parent.stdin.write(b"go\n")
            parent.stdin.flush()
            until(lambda: bool(children(parent.pid)))
            [child] = children(parent.pid)
            holds_up.tick(1.0)
            assert child in holds_up.due
        finally:
            holds_up.release()
            for pid in [*children(parent.pid), parent.pid]:
                os.kill(pid, signal.SIGKILL)
