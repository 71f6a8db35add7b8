"""What does a run cost on a machine that other programs keep busy, and what does it cost a quiet one to be prepared?

The demo's run file with 16 images a step, a few steps, and OCR on a server of the run (`url: auto`). By default the
threads of torch spin while they wait; `retouch` lets them sleep after part of a millisecond (`SLEEPING`).
GOMP_SPINCOUNT and KMP_BLOCKTIME, at the defaults of the runtimes, bring the spinning back: "spinning" below.

- busy: CPU seconds of the whole run, reward server included, beside processes that compute without end, over the
  seconds of the same run without them.
- quiet: runs that sleep and runs that spin take turns, with nothing beside them; the ratios of neighbours, in CPU
  seconds and in seconds of an optimizer step, as median with an interval that needs no assumption about their
  distribution (order statistics, of at least 95 %).
- turns: two processes, one of each policy, take turns at two forwards and backwards of the demo's network:
  neighbours are parts of a second apart, so the machine is the same for both.

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
from retouch.process.machine import SLEEPING, WAIT_POLICY

REPOSITORY = Path(__file__).resolve().parents[1]
CONFIG = REPOSITORY / "configs/tiny/flux_fill_grpo.yaml"
POLICIES = {"sleeping": {}, "spinning": {"GOMP_SPINCOUNT": "300000", "KMP_BLOCKTIME": "200"}}
SPIN = "while True: pass"
PARTS = ("busy", "quiet", "turns")

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
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps of a run")
    parser.add_argument("--spinners", type=int, default=8, help="processes beside a run")
    parser.add_argument("--runs", type=int, default=3, help="runs of each kind on the busy machine")
    parser.add_argument("--pairs", type=int, default=11, help="runs of each kind on the quiet machine")
    parser.add_argument("--turns", type=int, default=200, help="turns of each kind on the quiet machine")
    parser.add_argument("--take-turns", action="store_true", help=argparse.SUPPRESS)  # what one of two processes does
    parser.add_argument("--work", type=Path, default=Path("runs/busy-machine"), help="folder for data and runs")
    parser.add_argument("--out", type=Path, help="JSON to write, or to add to")
    arguments = parser.parse_args()
    if arguments.take_turns:
        take_turns()
        return
    make_data(arguments.work)
    result: dict[str, Any] = {}
    if arguments.out and arguments.out.exists():
        result = json.loads(arguments.out.read_text(encoding="utf-8"))
    result |= {"machine": machine(), "steps": arguments.steps}
    if "busy" in arguments.parts:
        result["busy"] = busy(arguments.work, arguments.steps, arguments.spinners, arguments.runs)
    if "quiet" in arguments.parts:
        result["quiet"] = quiet(arguments.work, arguments.steps, arguments.pairs)
    if "turns" in arguments.parts:
        result["turns"] = turns(arguments.turns)
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


def turns(count: int) -> dict[str, Any]:
    """CPU and wall seconds of the turns of both policies; which one is first alternates."""
    command = [sys.executable, __file__, "--take-turns"]
    kept = {key: value for key, value in os.environ.items() if key not in _OF_THREADS}
    processes = {
        name: subprocess.Popen(
            command, env={**kept, **SLEEPING, **policy}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for name, policy in POLICIES.items()
    }
    found: dict[str, list[list[float]]] = {name: [] for name in POLICIES}
    for number in range(count):
        for name in list(POLICIES)[:: 1 if number % 2 else -1]:
            asked, told = processes[name].stdin, processes[name].stdout
            assert asked is not None and told is not None
            asked.write(b"\n")
            asked.flush()
            found[name].append(json.loads(told.readline()))
    for process in processes.values():
        process.communicate()
    both = list(zip(*found.values(), strict=True))
    ratios = {what: interval([a[n] / b[n] for a, b in both]) for n, what in enumerate(("cpu_ratio", "wall_ratio"))}
    medians = {name: dict(zip(("cpu_s", "wall_s"), map(median, zip(*rows, strict=True)), strict=True))
               for name, rows in found.items()}  # fmt: skip
    return {"turns": count, **medians, **ratios}


def take_turns() -> None:
    """For every line that comes, two forwards and backwards of the demo's network -> their CPU and wall seconds."""
    import torch
    from diffusers import FluxTransformer2DModel

    from retouch.files.model_files import tiny_path

    network: Any = FluxTransformer2DModel.from_pretrained(tiny_path("flux_fill") / "transformer")
    config, draw = network.config, torch.Generator().manual_seed(0)
    sizes = {"hidden_states": (8, 32, config.in_channels), "encoder_hidden_states": (8, 24, config.joint_attention_dim)}
    given: dict[str, Any] = {name: torch.randn(size, generator=draw) for name, size in sizes.items()}
    given |= {"pooled_projections": torch.randn((8, config.pooled_projection_dim), generator=draw)}
    given |= {"timestep": torch.rand(8, generator=draw), "guidance": torch.ones(8)}
    given |= {"txt_ids": torch.zeros(24, 3), "img_ids": torch.zeros(32, 3)}
    for line in sys.stdin.buffer:
        del line
        cpu, wall = time.process_time(), time.monotonic()
        for _ in range(2):
            network(**given).sample.square().mean().backward()
            network.zero_grad()
        print(json.dumps([time.process_time() - cpu, time.monotonic() - wall]), flush=True)


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
