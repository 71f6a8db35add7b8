"""One process against two (gloo, on CPUs): the same optimizer step shared out (strong), and twice the step (weak).

Every run is started as training is, by torch's launcher, and takes epochs of GRPO on a random base; every process says
how long an epoch took on the wall and of the processor's time, and how many rows went through its network.
With two free cores a strong step takes half as long and a weak one as long as with one process. On a machine that does
other things the wall says nothing, and the time of the process is what can be compared: what it takes beyond its share
of the rows is the price of the second process. Runs of the three kinds take turns.

    python benchmarks/scaling.py --out benchmarks/results/scaling.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from epochs import epochs
from loop_overhead import NoRewards, machine, run_file, timed

from retouch.config import RunConfig, parse_run
from retouch.training.build import build
from retouch.training.session import Session

KINDS = {"one": (1, 1), "strong": (2, 1), "weak": (2, 2)}
"""Kind of run -> processes, and how many times the images of a step."""

IMAGES = 8
"""Of a step of one process."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=128, help="of the network, a multiple of 32")
    parser.add_argument("--side", type=int, default=64, help="of the images")
    parser.add_argument("--epochs", type=int, default=3, help="measured ones of a run")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each kind")
    parser.add_argument("--child", nargs=2, metavar=("KIND", "FOLDER"), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="JSON to write")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.child:
        child(arguments.child[0], Path(arguments.child[1]), arguments)
        return
    load_before = os.getloadavg()[0]
    runs: list[dict[str, Any]] = []
    for _ in range(arguments.rounds):
        for kind in KINDS:
            with tempfile.TemporaryDirectory() as work:
                runs.append({"kind": kind, "ranks": launched(kind, Path(work), arguments)})
    result = {
        "machine": machine(),
        "images": IMAGES,
        "load": [round(load_before, 2), round(os.getloadavg()[0], 2)],
        **compared(runs),
    }
    print(json.dumps(result, indent=2))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def launched(kind: str, work: Path, arguments: Namespace) -> list[dict[str, Any]]:
    """A run of its own -> what each process measured."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(KINDS[kind][0])]
    options = ["--width", str(arguments.width), "--side", str(arguments.side), "--epochs", str(arguments.epochs)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, *launcher, __file__, "--child", kind, str(work), *options]
    subprocess.run(command, env=environment, check=True)
    return [json.loads(file.read_text(encoding="utf-8")) for file in sorted(work.glob("rank-*.json"))]


def child(kind: str, work: Path, arguments: Namespace) -> None:
    """One process of a run."""
    rank = int(os.environ["RANK"])
    run = build(shared_out(kind, arguments, work / f"rank-{rank}"))
    try:
        run.rewards = NoRewards(run.rewards)  # type: ignore[assignment]
        shape = (3, arguments.side, arguments.side)
        run.model.decode = lambda latents: torch.zeros(len(latents), *shape)  # type: ignore[method-assign]
        with Session(run) as session:
            epoch = epochs(session)
            rows = 0

            def count(network: Any, args: Any, kwargs: dict[str, Any]) -> None:
                nonlocal rows
                rows += len(kwargs["hidden_states"])

            epoch()
            hook = run.model.network.register_forward_pre_hook(count, with_kwargs=True)
            times = [timed(epoch) for _ in range(arguments.epochs)]
            hook.remove()
    finally:
        run.close()
    measured = {
        "wall_s": median(wall for wall, _ in times),
        "process_s": median(process for _, process in times),
        "rows": rows / arguments.epochs,
    }
    (work / f"rank-{rank}.json").write_text(json.dumps(measured), encoding="utf-8")


def shared_out(kind: str, arguments: Namespace, work: Path) -> RunConfig:
    """The run of `loop_overhead`; each process samples and trains its share in one batch and two forwards."""
    work.mkdir()
    torch.manual_seed(0)  # each process makes the model and the data, which are the same
    processes, times = KINDS[kind]
    shape = Namespace(width=arguments.width, side=arguments.side, batch=IMAGES)
    run = run_file("grpo", "lora", shape, work).model_dump(mode="json")
    per_process = times * IMAGES // processes
    run["rollout"] |= {"global_groups_per_batch": 2 * times, "batch_size_per_device": per_process}
    run["rollout"]["window"] |= {"position": "fixed"}
    run["optimizer"] |= {"batch_size_per_device": per_process // 2, "gradient_accumulation": 2}
    return parse_run(run)


def compared(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """By kind medians over runs of the slowest process; then each kind's share of the rows and of the time of one."""
    found: dict[str, Any] = {}
    for kind in KINDS:
        of_kind = [run["ranks"] for run in runs if run["kind"] == kind]
        found[kind] = {
            "processes": KINDS[kind][0],
            "images": IMAGES * KINDS[kind][1],
            "rows_of_a_process": max(rank["rows"] for ranks in of_kind for rank in ranks),
            "wall_step_s": round(median(max(r["wall_s"] for r in ranks) for ranks in of_kind), 4),
            "process_step_s": round(median(max(r["process_s"] for r in ranks) for ranks in of_kind), 4),
        }
    for kind in ("strong", "weak"):
        of, one = found[kind], found["one"]
        share = of["rows_of_a_process"] / one["rows_of_a_process"]
        of["share_of_rows"] = round(share, 4)
        of["process_overhead"] = round(of["process_step_s"] / one["process_step_s"] / share, 4)
        of["wall_efficiency"] = round(one["wall_step_s"] * share / of["wall_step_s"], 4)
    return found


if __name__ == "__main__":
    main()
