"""Start a run of a set of old runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests import forked

ROOT = Path(__file__).parents[2]

CHILD = """
import os, signal, sys, torch
torch.set_num_threads(1)
signal_name, step = sys.argv.pop(1), int(sys.argv.pop(1))
from retouch.observe.run_dir import RunDir
log = RunDir.log
def fatal(self, kind, now, *rest):
    log(self, kind, now, *rest)
    if (kind, now, os.environ.get("RANK", "0")) == ("train", step, "0"):
        os.kill(os.getpid(), getattr(signal, signal_name))
RunDir.log = fatal
from retouch.cli import main
main()
"""
"""`retouch`, whose first process gets a signal once a step is in metrics.jsonl."""

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


def processes(name: str) -> int:
    """Processes of a run, in which its name ends."""
    return int(name.rpartition("-")[2])


def train(folder: Path, name: str, signal: str = "SIGKILL", step: int = -1) -> subprocess.CompletedProcess[str]:
    """Train the run of a set that lies in `folder`, in processes of its own."""
    child = folder / "child.py"
    child.write_text(CHILD, encoding="utf-8")
    launcher = TORCHRUN if processes(name) > 1 else ()
    return forked.run(
        [sys.executable, *launcher, str(child), signal, str(step), "train", f"run_files/{name}.yaml"],
        cwd=folder,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "ACCELERATE_USE_CPU": "true",
            "CUDA_VISIBLE_DEVICES": "",
            "XDG_CACHE_HOME": str(folder / "cache"),
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        },
        timeout=300,
    )
