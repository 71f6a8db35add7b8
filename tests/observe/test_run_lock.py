"""One process writes to a run directory: the second is refused, and death lets go."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from retouch.config import ConfigError, parse_run
from retouch.observe import RunDir
from retouch.observe.run_lock import RunLock
from tests.command_line import retouch
from tests.conftest import small_run

HOLD = """
import sys
from pathlib import Path
from retouch.observe.run_lock import RunLock
lock = RunLock(Path(sys.argv[1]))
lock.take()
print("held", flush=True)
sys.stdin.read()
"""


def test_another_process_is_refused_until_the_first_dies(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        problem = rf"another process \(pid {holder.pid}\) is writing to {tmp_path}; wait for it, or set another name="
        for refused in (RunLock(tmp_path).take, RunLock(tmp_path).require_free):
            with pytest.raises(ConfigError, match=problem):
                refused()
    finally:
        holder.kill()
        holder.wait()
    RunLock(tmp_path).require_free()
    lock = RunLock(tmp_path)
    lock.take()
    lock.take()
    assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n{platform.node()}\n"
    lock.release()
    RunLock(tmp_path).require_free()


@pytest.mark.parametrize("use", [RunLock.take, RunLock.require_free])
def test_a_page_that_is_watched_refuses_no_start(
    use: Callable[[RunLock], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shares the lock for an instant, to see who holds it."""
    (tmp_path / ".lock").touch()
    lock, flock, asked = RunLock(tmp_path), fcntl.flock, list[int]()

    def held_once(file: int, operation: int) -> None:
        asked.append(operation)
        if len(asked) == 1:
            raise BlockingIOError(errno.EWOULDBLOCK, "held")
        flock(file, operation)

    monkeypatch.setattr("retouch.observe.run_lock._PROBES_S", 60)
    monkeypatch.setattr(fcntl, "flock", held_once)
    use(lock)
    lock.release()
    assert asked[:2] == [fcntl.LOCK_EX | fcntl.LOCK_NB] * 2


def test_a_file_system_without_locks_is_warned_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    lock = RunLock(tmp_path)
    lock.take()
    lock.release()
    lock.require_free()
    assert "cannot be locked ([Errno 37] No locks available); make sure that no other process" in caplog.text


def test_two_runs_of_one_name(finished: Callable[[str], Path], tmp_path: Path, signs: Path) -> None:
    """Training is refused before the model is loaded and after, and the doctor says so; reading is not."""
    run = tmp_path / "runs" / "t"
    shutil.copytree(finished("full"), run)
    content = small_run(signs, tmp_path / "runs")
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    first = RunDir(parse_run(content))
    first.lock()
    try:
        before = (run / "metrics.jsonl").read_bytes()
        outcome = retouch("train", file, "resume=auto")
        problem = f"another process (pid {os.getpid()}) is writing to {run}; wait for it, or set another name=..."
        assert (outcome.code, outcome.err.splitlines()[-1]) == (2, f"error: {problem}")
        assert (run / "metrics.jsonl").read_bytes() == before
        assert problem in retouch("doctor", file, "resume=auto").out
        with pytest.raises(ConfigError, match="is writing to"):
            RunDir(first.config).open(1)
        assert retouch("report", run).code == 0
    finally:
        first.close()
    RunDir(first.config).require_free()
