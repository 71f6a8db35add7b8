"""Do rewards hide behind sampling? GRPO with a scorer that sleeps 80 % of the time that sampling takes.

Every step samples 8 groups, one after another, and submits each while the next is sampled. Three kinds of epoch take
turns: `free`, whose scorer answers at once; `overlapped`, as training does it; `waiting`, where every group is waited
for before the next is sampled. The scorer takes nothing of the processor, so that only waiting is measured. Reported
are medians, and the median and range of the step over what it cannot be shorter than, max(rollout + training, reward),
by its neighbour without a delay.

    python benchmarks/overlap.py --out benchmarks/results/overlap.json
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import sleeping
import torch
from epochs import Table, epochs
from loop_overhead import machine, run_file

from retouch.config import RunConfig, parse_run
from retouch.observe.run_dir import read_metrics
from retouch.training.build import build
from retouch.training.session import Session

GROUPS = 8
SHARE = 0.8
"""Of the time that sampling takes, what all rewards of a step take."""

KINDS = ("free", "overlapped", "waiting")


class Waiting(Table):
    """A table of rewards whose answers are there when `submit` returns."""

    def submit(self, *arguments: Any, **options: Any) -> Any:
        pending = self.table.submit(*arguments, **options)
        pending.result()
        return pending


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=128, help="of the network, a multiple of 32")
    parser.add_argument("--group-size", type=int, default=4, help="images of a group, which is a forward")
    parser.add_argument("--side", type=int, default=64, help="of the images")
    parser.add_argument("--rounds", type=int, default=7, help="epochs of each kind")
    parser.add_argument("--out", type=Path, help="JSON to write")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as work:
        row = measure(arguments, Path(work))
    result = {"machine": machine(), "groups": GROUPS, "reward_share_of_rollout": SHARE, **row}
    print(json.dumps(result, indent=2))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def measure(arguments: Namespace, work: Path) -> dict[str, Any]:
    """Epochs of the three kinds in turns."""
    load_before = os.getloadavg()[0]
    run = build(with_sleeping_scorer(arguments, work))
    table = run.rewards
    try:
        with Session(run) as session:
            epoch = epochs(session)

            def one(kind: str, delay_s: float) -> dict[str, float]:
                sleeping.delay_s = delay_s
                run.rewards = Waiting(table) if kind == "waiting" else table  # type: ignore[assignment]
                epoch()
                lines = read_metrics(run.dir.path / "metrics.jsonl")
                return next(line["time"] for line in reversed(lines) if line["kind"] == "train")

            one("free", 0.0)
            rounds = [taken(one) for _ in range(arguments.rounds)]
    finally:
        run.close()
    return {"load": [round(load_before, 2), round(os.getloadavg()[0], 2)], **compared(rounds)}


def taken(one: Callable[[str, float], dict[str, float]]) -> dict[str, Any]:
    """A round: without delay, then both ways with the delay that this round's sampling asks for."""
    free = one("free", 0.0)
    reward_s = SHARE * (free["rollout"] + free["vae"])
    return {"reward_s": reward_s, "free": free, **{kind: one(kind, reward_s / GROUPS) for kind in KINDS[1:]}}


def compared(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds, and of the ratios within them, with their range."""
    found: dict[str, Any] = {f"{kind}_step_s": round(median(r[kind]["step"] for r in rounds), 3) for kind in KINDS}
    found["reward_s"] = round(median(r["reward_s"] for r in rounds), 3)
    found["reward_wait_s"] = round(median(r["overlapped"]["reward_wait"] for r in rounds), 3)
    for kind in KINDS[1:]:
        ratios = sorted(r[kind]["step"] / max(r["free"]["step"], r["reward_s"]) for r in rounds)
        found[f"{kind}_ratio"] = round(median(ratios), 3)
        found[f"{kind}_ratio_range"] = [round(ratios[0], 3), round(ratios[-1], 3)]
    return found


def with_sleeping_scorer(arguments: Namespace, work: Path) -> RunConfig:
    """The run of `loop_overhead`, a group a forward, 8 groups a step."""
    shape = Namespace(width=arguments.width, side=arguments.side, batch=2 * arguments.group_size)
    run = run_file("grpo", "lora", shape, work).model_dump(mode="json")
    run["rollout"] |= {"global_groups_per_batch": GROUPS, "batch_size_per_device": arguments.group_size}
    run["optimizer"] |= {"batch_size_per_device": arguments.group_size, "gradient_accumulation": GROUPS}
    run["rewards"] = {"asleep": {"scorer": "fn", "fn": "sleeping:score"}}
    return parse_run(run)


if __name__ == "__main__":
    main()
