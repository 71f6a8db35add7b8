"""What does a run cost on a machine that other programs keep busy, and what does it cost a quiet one to be prepared?

The demo's run file with 16 images a step, a few steps, and OCR on a server of the run (`url: auto`). By default the
threads of torch spin while they wait; `retouch` lets them sleep (OMP_WAIT_POLICY=PASSIVE). GOMP_SPINCOUNT and
KMP_BLOCKTIME, at the defaults of the runtimes, bring the spinning back: "spinning" below.

- busy: CPU seconds of the whole run, reward server included, beside processes that compute without end, over the
  seconds of the same run without them.
- quiet: runs that sleep and runs that spin take turns, with nothing beside them; the ratios of neighbours, in CPU
  seconds and in seconds of an optimizer step, as median with an interval that needs no assumption about their
  distribution (order statistics, of at least 95 %).

    python benchmarks/busy_machine.py --out benchmarks/results/busy_machine.json
    python benchmarks/busy_machine.py --parts busy --steps 2      # a look, in minutes
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from loop_overhead import machine

from retouch.observe.run_dir import read_metrics
from retouch.process.machine import WAIT_POLICY

REPOSITORY = Path(__file__).resolve().parents[1]
CONFIG = REPOSITORY / "configs/tiny/flux_fill_grpo.yaml"
POLICIES = {"sleeping": {}, "spinning": {"GOMP_SPINCOUNT": "300000", "KMP_BLOCKTIME": "200"}}
SPIN = "while True: pass"

_OF_THREADS = (WAIT_POLICY, "OMP_NUM_THREADS", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables of the caller that would decide instead of the policy."""


@dataclass(frozen=True)
class Cost:
    """Of one run: CPU and wall seconds of all its processes, and mean seconds of a step."""

    cpu_s: float
    wall_s: float
    step_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("busy", "quiet"), default=["busy", "quiet"])
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps of a run")
    parser.add_argument("--spinners", type=int, default=8, help="processes beside a run")
    parser.add_argument("--runs", type=int, default=3, help="runs of each kind on the busy machine")
    parser.add_argument("--pairs", type=int, default=11, help="runs of each kind on the quiet machine")
    parser.add_argument("--work", type=Path, default=Path("runs/busy-machine"), help="folder for data and runs")
    parser.add_argument("--out", type=Path, help="JSON to write, or to add to")
    arguments = parser.parse_args()
    make_data(arguments.work)
    result: dict[str, Any] = {}
    if arguments.out and arguments.out.exists():
        result = json.loads(arguments.out.read_text(encoding="utf-8"))
    result |= {"machine": machine(), "steps": arguments.steps}
    if "busy" in arguments.parts:
        result["busy"] = busy(arguments.work, arguments.steps, arguments.spinners, arguments.runs)
    if "quiet" in arguments.parts:
        result["quiet"] = quiet(arguments.work, arguments.steps, arguments.pairs)
    print(json.dumps(result, indent=2))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def busy(work: Path, steps: int, spinners: int, runs: int) -> dict[str, Any]:
    """Runs with and without processes beside them, in turn."""
    alone, beside = [], []
    for _ in range(runs):
        alone.append(run(work, steps, "sleeping"))
        with spinning(spinners):
            beside.append(run(work, steps, "sleeping"))
    ratios = [b.cpu_s / a.cpu_s for a, b in zip(alone, beside, strict=True)]
    rows = {"alone": [asdict(one) for one in alone], "beside": [asdict(one) for one in beside]}
    return {"spinners": spinners, **rows, "cpu_ratio": {"median": median(ratios), "largest": max(ratios)}}


def quiet(work: Path, steps: int, pairs: int) -> dict[str, Any]:
    """Runs of both policies in turn; which one is first alternates, because a machine may drift."""
    costs: dict[str, list[Cost]] = {name: [] for name in POLICIES}
    for number in range(pairs):
        for name in list(POLICIES)[:: 1 if number % 2 else -1]:
            costs[name].append(run(work, steps, name))
    both = list(zip(costs["sleeping"], costs["spinning"], strict=True))
    return {
        "pairs": pairs,
        **{name: [asdict(one) for one in of_policy] for name, of_policy in costs.items()},
        "cpu_ratio": interval([a.cpu_s / b.cpu_s for a, b in both]),
        "step_ratio": interval([a.step_s / b.step_s for a, b in both]),
    }


def interval(values: Sequence[float], confidence: float = 0.95) -> dict[str, float]:
    """Median, and the narrowest pair of order statistics that covers the true median with at least this confidence."""
    ordered, n = sorted(values), len(values)
    left_out = 0  # values on either side that the interval may leave out
    while 1 - 2 * sum(math.comb(n, k) for k in range(left_out + 2)) / 2**n >= confidence:
        left_out += 1
    covered = 1 - 2 * sum(math.comb(n, k) for k in range(left_out + 1)) / 2**n
    low, high = ordered[left_out], ordered[n - 1 - left_out]
    return {"median": median(ordered), "low": low, "high": high, "confidence": covered}


def run(work: Path, steps: int, policy: str) -> Cost:
    """Train in new processes, in a new run directory."""
    name = f"{policy}-{time.time_ns()}"
    kept = {key: value for key, value in os.environ.items() if key not in _OF_THREADS}
    environment = {**kept, "DATA_PATH": str(work), **POLICIES[policy]}
    command = [sys.executable, "-m", "retouch", "train", str(CONFIG), f"name={name}", f"logging.dir={work / 'runs'}"]
    command += [f"training.max_steps={steps}", "training.eval_every=0", "evaluation.num_examples=2"]
    command += ["algorithm.sft_steps=0", "rollout.global_groups_per_batch=2", "optimizer.batch_size_per_device=8"]
    started = time.monotonic()
    with (work / "log.txt").open("ab") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"the run ended with exit code {process.returncode}; see {work / 'log.txt'}")
    records = read_metrics(work / "runs" / name / "metrics.jsonl")
    seconds = [record["time"]["step"] for record in records if record["kind"] == "train"]
    return Cost(used.ru_utime + used.ru_stime, time.monotonic() - started, fmean(seconds))


@contextmanager
def spinning(count: int) -> Iterator[None]:
    """Within it, so many processes compute without end."""
    processes = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def make_data(out: Path) -> None:
    """Signs as the demo's."""
    for name, options in {
        "prompts": ("--count", "64", "--seed", "1", "--no-targets"),
        "warmup": ("--count", "16", "--seed", "2"),
        "held_out": ("--count", "16", "--seed", "3", "--half", "held_out"),
    }.items():
        if not (out / name / "self_bench.txt").exists():
            command = [sys.executable, "-m", "retouch", "data", "synth", "--out", str(out / name), *options]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
