"""The first run on a GPU: does everything start there, and what does it cost? At most 9 minutes on one GPU of 80 GB.

Every cell runs in a process that is killed at the cell's limit. What a cell found, or the traceback of what stopped it,
is in the file before the next one starts, and nothing is started that the budget has no time for.

1. Every family x {SFT, GRPO, NFT, PPO, DPO, reward gradients} at toy sizes, one step, in its default precision (bf16
   weights under autocast), the first three in bf16 throughout, too, and `tests/cuda`. Several side by side: they are
   not timed.
2. GRPO with LoRA at the released sizes, random weights, 512 x 512 pixels (`benchmarks/gpu.py`): FLUX.1-Fill and
   Qwen-Image as they are and compiled; Qwen-Image without its text mask, and with more images a forward; masked images
   with FLUX.2-klein-4B, against the 24 GB of a smaller card; the kernels that take the longest in a step of
   FLUX.1-Fill, plain and compiled.

A cell that would not fit the GPU is skipped by its count, or by the peak that one H200 measured. Another call with the
same file runs the cells that it has no result of.

    python benchmarks/gpu_first_run.py --out benchmarks/results/gpu_first_run.json
    python benchmarks/gpu_first_run.py --dry-run      # every cell at toy sizes on the CPU

On a machine that cannot download anything, and has Python 3.12 with torch, transformers, accelerate, peft and what
these need, sentencepiece, tensorboard, httpx, rich and typer: fetch the other wheels elsewhere, copy the tree with the
folder of wheels there, and install them beside it. The tree itself is not installed.

    # elsewhere, in the tree
    export PIP_ONLY_BINARY=:all: PIP_CONSTRAINT=constraints.txt
    FOR="--python-version 3.12 --implementation cp --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64"
    python -m pip download $FOR -d wheels pydantic
    python -m pip download $FOR -d wheels --no-deps diffusers filelock \
      font-caladea font-fredoka-one font-hanken-grotesk font-manrope
    # there, in the tree
    python -m pip install --no-index --no-deps --no-compile --target site wheels/*.whl
    PYTHONPATH=src:site python benchmarks/gpu_first_run.py --out gpu_first_run.json
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from first_run_cells import RELEASED, TESTS, TINY, Task

MINUTES = 9.0
"""For everything, processes started and ended included."""

TINY_SECONDS = 160.0
"""For all cells at toy sizes together, and the tests."""

START_SECONDS = 100.0
"""For the imports of a process, from a disk that has not been read before."""

LANES = 7
"""Cells at toy sizes side by side, and the tests."""

LOG_LINES = 40
"""Of the end of a killed process's output."""

COMMAND = [sys.executable, str(Path(__file__).parent / "first_run_cells.py")]
"""A process that reads tasks and writes what they found, a line of JSON each."""

SEES_A_GPU = "import sys, torch; sys.exit(not torch.cuda.is_available())"
"""In a process of its own, because one that asked would hold some of the GPU's memory."""

Result = dict[str, Any]


class Worker:
    """A process that runs cells, one after another, until one of them fails.

    Args:
        options: of the command.
        start_seconds: limit of its imports.
    """

    def __init__(self, options: Sequence[str], start_seconds: float) -> None:
        self._start_seconds = start_seconds
        with tempfile.NamedTemporaryFile(delete=False, suffix=".log") as output:  # what it prints
            self._log = Path(output.name)
            self._process = subprocess.Popen(
                [*COMMAND, *options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                start_new_session=True,  # its compilers are ended with it
            )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.usable, self._started = True, False

    def run(self, task: Task, until: float) -> Result:
        """What a cell found. The limit counts from when the process has imported what it needs.

        Args:
            until: time of `time.monotonic` at which it is killed, whatever its limit.
        """
        if not self._started:
            self._started = True
            begun = self._answer(min(self._start_seconds, until - time.monotonic()), "its start")
            if "failed" in begun:
                return begun
        start = time.monotonic()
        limit = min(task.seconds, until - start)
        assert self._process.stdin is not None
        with suppress(OSError):  # it has ended, which its answer tells
            self._process.stdin.write(json.dumps(asdict(task)) + "\n")
            self._process.stdin.flush()
        found = self._answer(limit, f"its limit of {limit:.3g} s")
        return {"seconds": round(time.monotonic() - start, 2), **found}

    def close(self) -> None:
        """End it, and what it started."""
        self.usable = False
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.unlink(missing_ok=True)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _answer(self, seconds: float, of_what: str) -> Result:
        try:
            line = self._lines.get(timeout=max(seconds, 0.0))
        except queue.Empty:
            return self._ended(f"killed at {of_what}")
        if line is None:
            return self._ended(f"the process ended with code {self._process.wait()}")
        found: Result = json.loads(line)
        if "failed" in found:
            self.close()  # a fault of the device stays with its process
        return found

    def _ended(self, why: str) -> Result:
        log = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
        self.close()
        return {"failed": why, "log": "\n".join(log)}


Start = Callable[[], Worker]
"""Starts a process."""


@dataclass
class Report:
    """The file of results, whole after every cell."""

    file: Path | None
    about: Result
    cells: dict[str, Result] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.Lock)

    def read(self) -> None:
        """The results of an earlier call.

        Raises:
            ValueError: toy sizes on the CPU in place of measurements, or the reverse.
        """
        if self.file is not None and self.file.is_file():
            earlier = json.loads(self.file.read_text(encoding="utf-8"))
            if earlier["dry_run"] != self.about["dry_run"]:
                kind = "a dry run" if earlier["dry_run"] else "a GPU"
                raise ValueError(f"--out: {self.file} holds the results of {kind}; give another file")
            self.cells = {row.pop("cell"): row for row in earlier["cells"]}
            self.about["machine"] = earlier.get("machine")

    def lacks(self, task: Task, beginnings: Sequence[str]) -> bool:
        """Whether a cell whose name begins so has no result yet."""
        found = self.cells.get(task.name, {"skipped": ""})
        return task.name.startswith(tuple(beginnings)) and ("failed" in found or "skipped" in found)

    def add(self, task: Task, found: Result) -> None:
        with self.lock:
            machine = found.pop("machine", None)
            self.about["machine"] = self.about.get("machine") or machine
            if machine is not None and machine != self.about["machine"]:
                found["machine"] = machine  # not that of the earlier cells
            self.cells[task.name] = found
            self.write()
            print(json.dumps({"cell": task.name, **{k: v for k, v in found.items() if k not in SILENT}}), flush=True)

    def write(self) -> None:
        self.about["used_s"] = round(time.monotonic() - self.about["started"], 1)
        if self.file is not None:
            part = self.file.with_name(f"{self.file.name}.part")
            part.write_text(json.dumps(self.result(), indent=2) + "\n", encoding="utf-8")
            part.replace(self.file)

    def result(self) -> Result:
        about = {name: value for name, value in self.about.items() if name != "started"}
        return {**about, "cells": [{"cell": name, **found} for name, found in self.cells.items()]}


SILENT = ("traceback", "log", "kernels", "settings")
"""Not printed."""


def main(arguments: Sequence[str] | None = None) -> Result:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="toy sizes on the CPU")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for everything")
    parser.add_argument("--patience", type=float, default=1, help="factor of every limit, for a slow machine")
    parser.add_argument("--lanes", type=int, default=LANES, help="toy cells side by side")
    parser.add_argument("--only", nargs="+", default=[""], help="cells that begin so, like tiny-flux_fill")
    parser.add_argument("--out", type=Path, help="JSON to write")
    given = parser.parse_args(arguments)
    started = time.monotonic()
    if not given.dry_run and subprocess.run([sys.executable, "-c", SEES_A_GPU]).returncode:
        parser.error("there is no GPU here; --dry-run takes toy sizes and the CPU")
    until = started + 60 * given.minutes
    report = Report(given.out, {"dry_run": given.dry_run, "budget_s": 60 * given.minutes, "started": started})
    try:
        report.read()
    except ValueError as error:
        parser.error(str(error))
    wanted = [[t for t in tasks if report.lacks(t, given.only)] for tasks in ((TESTS, *TINY), RELEASED)]
    toys, others = ([replace(t, seconds=t.seconds * given.patience) for t in tasks] for tasks in wanted)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work:
        options = ["--work", work, *(["--dry-run"] if given.dry_run else [])]
        start = partial(Worker, options, START_SECONDS * given.patience)
        toys_until = min(until, time.monotonic() + TINY_SECONDS * given.patience)
        run_toys(toys, report, start, toys_until, given.lanes)
        run_in_turn(others, report, start, until)
    report.write()
    return report.result()


def run_toys(tasks: Sequence[Task], report: Report, start: Start, until: float, lanes: int) -> None:
    """Cells that are not timed: those of a family one after another, families side by side."""
    families: dict[str, list[Task]] = {}
    for task in tasks:
        families.setdefault(task.options.get("family", task.name), []).append(task)
    with ThreadPoolExecutor(lanes) as pool:
        for done in [pool.submit(run_family, f, report, start, until) for f in families.values()]:
            done.result()


def run_family(tasks: Sequence[Task], report: Report, start: Start, until: float) -> None:
    with ExitStack() as left:
        worker: Worker | None = None
        for task in tasks:
            if time.monotonic() >= until:
                report.add(task, {"skipped": "no time left for toy sizes"})
                continue
            if worker is None or not worker.usable:
                worker = left.enter_context(closing(start()))
            report.add(task, worker.run(task, until))


def run_in_turn(tasks: Sequence[Task], report: Report, start: Start, until: float) -> None:
    """Cells that have the GPU to themselves, each in a new process; the next one imports meanwhile."""
    with ExitStack() as left:
        started = (left.enter_context(closing(start())) for _ in tasks)
        waiting = next(started, None)
        for task in tasks:
            if waiting is None or until - time.monotonic() < task.least:
                report.add(task, {"skipped": f"less than {task.least:.0f} s left"})
                continue
            worker, waiting = waiting, next(started, None)
            report.add(task, worker.run(task, until))
            worker.close()


def table(result: Result) -> str:
    """Markdown of the cells at the released sizes that were measured."""
    lines = ["| cell | images/s | first step, s | step, s | rollout, s | forward and backward, s | GiB at most |"]
    lines.append("|---" * 7 + "|")
    for row in result["cells"]:
        if "step_s" in row:
            parts = row["parts_s"]
            trained = parts["train_forward"] + parts["train_backward"]
            values = (row["images_per_s"], row["first_step_s"], row["step_s"], parts["rollout"], trained)
            lines.append(f"| {row['cell']} | {' | '.join(f'{v:.2f}' for v in values)} | {row['peak_memory_gib']:.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
