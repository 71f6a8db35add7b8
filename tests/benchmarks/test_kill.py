"""benchmarks/kill.py and long_run.py: how they compare, and that they see what differs."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import kill
import long_run


class Sleeping:
    """A process that does nothing, in place of a run."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            for number in (signal.SIGTERM, signal.SIGHUP):  # another test of this process may have left a handler
                signal.signal(number, signal.SIG_DFL)
            time.sleep(60)
            os._exit(0)

    poll, wait, send = kill.Process.poll, kill.Process.wait, kill.Process.send
    _code: int | None = None


@pytest.mark.parametrize(
    ("way", "code"), [("SIGKILL", -9), ("SIGTERM", -15), ("SIGHUP", -1), ("SLURM", -15)], ids=lambda value: str(value)
)
def test_the_code_is_that_of_the_process(way: str, code: int, tmp_path: Path) -> None:
    """One that does not handle signals yet is starting."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        process: Any = Sleeping()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    found = kill.kill(process, way, tmp_path, 0.5, random.Random(0))
    assert (found["way"], found["code"], found["while"]) == (way, code, "starting")
    assert 0.5 <= found["at_s"] < 20


def test_a_server_that_is_not_there_is_no_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ended in between is none either."""
    process: Any = Sleeping()
    assert not kill._kill_server(process, random.Random(0))
    ended: Any = Sleeping()
    ended.send(signal.SIGKILL)
    ended.wait(60)
    monkeypatch.setattr(kill, "descendants", lambda pid: [ended.pid])
    monkeypatch.setattr(kill, "_command", lambda pid: b"retouch")
    assert not kill._kill_server(process, random.Random(0))
    assert process.poll() is None
    process.send(signal.SIGKILL)
    process.wait(60)
    trials = [
        {"trial": 0, "target": "grpo_server", "kills": [{"way": "server", "while": "training"}] * 2, "problems": []}
    ]
    found = kill.summary(trials, {"kills": {"front, SIGKILL": 3}})
    assert (found["kills_of_runs"], found["kills_of_servers"]) == (0, 5)


def checkpoint(run: Path, digest: str = "a", **more: Any) -> Path:
    folder = run / "checkpoints" / "step-000004"
    folder.mkdir(parents=True)
    (folder / "complete.json").write_text(json.dumps({"files": {"weights/w": {"bytes": 1, "sha256": digest}}}))
    (folder / "state.json").write_text(json.dumps({"progress": {"step": 4, **more}}))
    records = [{"step": 1, "kind": "train", "loss": 0.5, "time": {"step": random.random()}}]
    records += [{"step": 2, "kind": "event", "event": "stopped"}] * bool(more.pop("stopped", 0))
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return run


def test_runs_are_compared_without_clocks_and_stops(tmp_path: Path) -> None:
    whole = kill.ended_with(checkpoint(tmp_path / "whole"))
    assert kill.differences(whole, kill.ended_with(checkpoint(tmp_path / "again"))) == []
    other = kill.ended_with(checkpoint(tmp_path / "other", "b", updates=3))
    assert kill.differences(whole, other) == ["weights/w", "progress"]


def test_a_slope_is_found_where_there_is_one() -> None:
    noise = np.random.default_rng(0).normal(0, 1, 2000)
    flat = long_run.slope(range(2000), list(100 + noise))
    rising = long_run.slope(range(2000), list(100 + noise + np.arange(2000) / 1000))
    assert flat["interval_per_1000"][0] < 0 < flat["interval_per_1000"][1]
    assert rising["interval_per_1000"][0] > 0.5 and rising["growth"] == pytest.approx(1.8, abs=0.3)


def test_what_a_process_holds() -> None:
    before = long_run.held([os.getpid()])
    with Path(__file__).open("rb"):
        during = long_run.held([os.getpid()])
    assert during["handles"] == before["handles"] + 1 and during["rss_mb"] > 10 and during["threads"] >= 1
