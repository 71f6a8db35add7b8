"""The reader of the output goes away: a pipe, a full disk, a terminal that is closed. Programs go on."""

from __future__ import annotations

import errno
import io
import os
import pty
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from retouch.observe.run_dir import read_metrics
from retouch.process import console
from retouch.process.console import outlast_readers, outlasting_readers, output_problem
from tests import forked
from tests.command_line import retouch
from tests.conftest import small_run
from tests.selection import default
from tests.tiny_models import shallow_flux

GONE = ("pipe", "full", "terminal", "closed")


@contextmanager
def gone(how: str) -> Iterator[dict[str, Any]]:
    """Options of a process whose output nobody will read."""
    if how == "closed":
        yield {"preexec_fn": lambda: (os.close(1), os.close(2))}
        return
    if how == "full":
        reader, writer = os.open(os.devnull, os.O_RDONLY), os.open("/dev/full", os.O_WRONLY)
    else:
        reader, writer = os.pipe() if how == "pipe" else pty.openpty()
    os.close(reader)
    try:
        yield {"stdout": writer, "stderr": writer}
    finally:
        os.close(writer)


def without_reader(how: str, *arguments: str, **environment: str) -> int:
    with gone(how) as options:
        env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        return subprocess.run([sys.executable, *arguments], env=env, timeout=300, check=False, **options).returncode


LIBRARIES = """
import logging, os, subprocess, sys, threading, warnings
from retouch.process.console import outlast_readers, output_problem
outlast_readers()
import click, rich.console, tqdm
from retouch.cli.options import start_logging
start_logging()
for number in range(3):
    print("x" * 10_000)
    print("x", file=sys.stderr, flush=True)
    click.echo("x"); click.echo("x", err=True)
    rich.console.Console().print("x"); rich.console.Console(stderr=True).print("x")
    logging.getLogger("retouch").warning("x")
    logging.StreamHandler().handle(logging.makeLogRecord({"msg": "x"}))
    warnings.warn(f"x {number}")
    bar = tqdm.tqdm(range(3), mininterval=0)
    for _ in bar: pass
    sys.stdout.buffer.write(b"x"); sys.stdout.buffer.flush()
    thread = threading.Thread(target=print, args=("x",), kwargs={"flush": True}); thread.start(); thread.join()
    subprocess.run([sys.executable, "-c", "print(1)"])
with open(sys.argv[1], "x") as opened:
    opened.write(str(opened.fileno()))
print("x", end="")
"""
"""Whatever writes to a console, and what the interpreter flushes at its end."""


@pytest.mark.parametrize("how", default(GONE, {"pipe", "full"}.__contains__))
def test_no_library_ends_a_program_whose_output_nobody_reads(how: str, tmp_path: Path) -> None:
    assert without_reader(how, "-c", LIBRARIES, str(tmp_path / "end")) == 0
    assert int((tmp_path / "end").read_text()) > 2  # a file in the place of standard error would receive its text


LOST = """
import os, sys
reader, writer = os.pipe()
os.close(reader)
if sys.argv.pop(1) == "full":
    writer = os.open("/dev/full", os.O_WRONLY)
os.dup2(writer, 1)
os.dup2(writer, 2)
from retouch.cli import main
main()
"""


@pytest.mark.parametrize("how", ["pipe", "full"])
def test_a_run_trains_on_when_its_output_is_lost(how: str, signs: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        yaml.safe_dump(small_run(signs, tmp_path / "runs", model__path=shallow_flux(), training__max_steps=2)),
        encoding="utf-8",
    )
    command = [sys.executable, "-c", LOST, how, "train", str(file)]
    assert forked.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300).returncode == 0
    run = next((tmp_path / "runs").iterdir())
    assert read_metrics(run / "metrics.jsonl")[-1]["event"] == "finished"
    lost = {"pipe": "broken pipe", "full": "no space left on device"}[how]
    lines = (run / "log.txt").read_text(encoding="utf-8").splitlines()
    said = f"standard error cannot be written ({lost}): the run goes on, and logs to log.txt alone"
    assert sum(line.endswith(said) for line in lines) == 1


@pytest.mark.parametrize(
    ("how", "code", "message"),
    [
        ("pipe", 0, ""),
        ("full", 1, "error: standard output: no space left on device; write it to another file or disk\n"),
    ],
)
def test_a_command_whose_job_is_its_output(how: str, code: int, message: str) -> None:
    """`retouch ... | head` has what it wanted; results that a full disk lost are an error."""
    with gone(how) as options:
        options["stderr"] = subprocess.PIPE
        done = subprocess.run([sys.executable, "-m", "retouch", "--help"], text=True, check=False, **options)
    assert (done.returncode, done.stderr) == (code, message)


def test_a_slow_reader_of_a_non_blocking_pipe_gets_everything() -> None:
    """Other programs of a terminal may make it non-blocking; writes would raise BlockingIOError."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    file = console.LastingFile(writer, "w")
    received = bytearray()

    def read() -> None:
        while part := os.read(reader, 1 << 16):
            received.extend(part)
            time.sleep(0.001)

    thread = threading.Thread(target=read)
    thread.start()
    with io.BufferedWriter(file) as stream:
        stream.write(bytes(1 << 20))
    thread.join()
    os.close(reader)
    assert len(received) == 1 << 20 and file.problem is None


def test_other_streams_stay_and_streams_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = io.StringIO()
    monkeypatch.setattr(sys, "stdout", memory)
    outlast_readers()
    assert sys.stdout is memory and output_problem("stdout") is None
    before = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", before)
    with outlasting_readers():
        assert sys.stdout is not before
        inner = sys.stdout
        assert (inner.encoding, inner.errors, inner.fileno()) == (before.encoding, before.errors, 1)
        outlast_readers()
        assert sys.stdout is inner
    assert sys.stdout is before


@pytest.mark.parametrize(
    ("encoding", "errors", "written"),
    [
        ("cp1252", "strict", b"\xe9 \\u2192 \\udce9"),
        ("ascii", "surrogateescape", b"\\xe9 \\u2192 \\udce9"),
        ("utf-8", "strict", "é → \\udce9".encode()),
        ("utf-8", "surrogateescape", "é → ".encode() + b"\xe9"),  # the name as it stands on the disk
    ],
)
def test_a_character_that_the_terminal_lacks_is_escaped(
    encoding: str, errors: str, written: bytes, tmp_path: Path
) -> None:
    """A prompt in another script ended `data validate` in a traceback, on Windows and under LANG=C."""
    with (tmp_path / "out").open("w", encoding=encoding, errors=errors) as before:
        stream = console._lasting(before, before.fileno())
        assert stream is not None
        stream.write("é → \udce9")
        stream.flush()
    assert (tmp_path / "out").read_bytes() == written


def test_the_first_problem_is_kept() -> None:
    file = console.LastingFile(os.open("/dev/full", os.O_WRONLY), "w")
    assert file.write(b"abc") == 3 and file.problem is not None and file.problem.errno == errno.ENOSPC
    file.close()


def test_in_a_notebook_the_command_line_keeps_its_stream() -> None:
    assert retouch("--version").out.startswith("retouch ")
