"""The demo: reinforcement learning makes an inpainting model write what it is asked to, on a CPU, in minutes.

Pictures in the wild have wrong captions. The tiny base learned from captions with three letters in ten wrong, and so
has the little that there is to warm up on: 64 pictures. Supervision imitates them, mistakes included. The reward, OCR
against the text asked for, needs no picture, only words; it is what GRPO raises.

The script only runs commands that a user would type, and prints each. What it leaves:

    runs/demo/                     the run: metrics, checkpoints, pictures, report.html
    runs/demo/before-after.png     held-out words: base, after the warm-up, after RL, with what OCR read in each
    runs/demo-data/                the 64 pictures, 2000 words without any, 192 held-out words

Run it again to go on with an interrupted demo; delete runs/demo to start anew.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retouch.observe.report import milestones
from retouch.observe.run_dir import read_metrics
from retouch.process.console import outlast_readers
from retouch.process.machine import let_threads_sleep
from retouch.process.signals import ENDING
from retouch.use.comparison import gains

if TYPE_CHECKING:
    from retouch.training.evaluation import Evaluation

DATA, RUN = Path("runs/demo-data"), Path("runs/demo")
CONFIG = "example:tiny/flux_fill_grpo"
MEASURES = {"NED": "ocr.ned", "exact words": "ocr.exact", "glyph correlation": "glyph_correlation"}


SIGNALS: list[int] = []
"""Signals to this process, which the command that runs receives as well."""


def main() -> None:
    started = time.monotonic()
    outlast_readers()
    let_threads_sleep()
    for number in (signal.SIGINT, *ENDING):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda received, _: SIGNALS.append(received))
    make_data(DATA)
    retouch("train", CONFIG, "name=demo", "resume=auto", DATA_PATH=str(DATA))
    retouch("report", str(RUN))
    newest = max((RUN / "images").glob("step-*/evaluation.png"))
    shutil.copy(newest, RUN / "before-after.png")
    print_result(RUN)
    print(f"report {RUN}/report.html · before and after {RUN}/before-after.png · {time.monotonic() - started:.0f} s")


def make_data(out: Path) -> None:
    """Three folders of signs, no word in two of them: words to write (no pictures), pictures whose captions get three
    letters in ten wrong, and held-out words."""
    for name, options in {
        "prompts": ("--count", "2000", "--seed", "1", "--no-targets"),
        "warmup": ("--count", "64", "--seed", "2", "--caption-noise", "0.3", "--exclude", f"{out}/prompts"),
        "held_out": ("--count", "192", "--seed", "3", "--half", "held_out"),
    }.items():
        if not (out / name / "self_bench.txt").exists():
            retouch("data", "synth", "--out", f"{out}/{name}", *options)


def retouch(*arguments: str, **environment: str) -> None:
    """Run a command of the package, after printing it; end with its exit code if it fails. A signal stops it as one to
    the command itself would: training writes a checkpoint, and ends its reward server."""
    print("$", *(f"{k}={v}" for k, v in environment.items()), "retouch", *arguments, flush=True)
    command = subprocess.Popen([sys.executable, "-m", "retouch", *arguments], env={**os.environ, **environment})
    while command.poll() is None:
        while SIGNALS:
            command.send_signal(SIGNALS.pop())
        time.sleep(0.1)
    if command.returncode or SIGNALS:
        sys.exit(command.returncode or 3)


def evaluations(run: Path) -> dict[str, Evaluation]:
    """The milestones of a run by name: base, warmed up, last."""
    from retouch.training.evaluation import load_evaluation  # imports torch

    records: list[dict[str, Any]] = [r for r in read_metrics(run / "metrics.jsonl") if r["kind"] == "eval"]
    folder = run / "evaluations"
    return {name: load_evaluation(folder / f"step-{r['step']:06d}") for name, r in milestones(records).items()}


def print_result(run: Path) -> None:
    """Means of the held-out words at the milestones, and the gain of RL alone, paired, with its 95 % interval."""
    points = evaluations(run)
    base, warmed, last = (points[name] for name in ("base", "warmed up", "last"))
    gain = gains(last, warmed)
    print(f"\n{len(last.rows)} held-out images of words that nothing was trained on, plain ODE, fixed seeds:")
    for title, measure in MEASURES.items():
        before, between, after = (e.means()[measure] for e in (base, warmed, last))
        mean, low, high = gain[measure]
        print(
            f"held-out {title} base {before:.3f} warmed up {between:.3f} after RL {after:.3f}"
            f" · gain of RL {mean:+.3f} [{low:+.3f}, {high:+.3f}]"
        )


if __name__ == "__main__":
    main()
