"""Does an epoch wait for its slowest rewards? GRPO on a random base with rewards that take a time but no processor, as
those of a server elsewhere; 5 % of the images, drawn anew for each epoch, take ten times as long.

Every epoch samples 20 groups of 4 images and takes 4 optimizer steps. Three kinds take turns: `even`, in which every
image takes the short time; `wait`, with the slow images, as `algorithm.late_rewards: wait` trains; `next_step`, with
the slow images of the same draw. The long time is a share of what the training of the steps before the last takes: a
longer one cannot hide behind them. Reported are medians of the epochs, and the median and range of the ratios to the
`even` epoch of the same round.

    OMP_NUM_THREADS=1 python benchmarks/late_rewards.py --out benchmarks/results/late_rewards.json
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch
from epochs import Table
from loop_overhead import machine, run_file

from retouch.algorithms.grpo import recipe
from retouch.config import parse_run
from retouch.observe.run_dir import read_metrics
from retouch.rewards.table import PendingScores, RewardTable
from retouch.tiny.signs import draw_words, write_signs
from retouch.training.build import build
from retouch.training.session import Session

GROUPS, GROUP_SIZE, STEPS = 20, 4, 4
SLOW = 4  # of 80 images
SLOWER = 10.0
SHARE = 0.8
"""Of the training time of the steps before the last, what a slow reward takes."""

KINDS = ("even", "wait", "next_step")


class Elsewhere(Table):
    """A table of rewards whose batches are in when the slowest of their images is.

    Attributes:
        short_s: seconds of most images.
        slow: (example id, number within the group) of the others.
    """

    def __init__(self, table: RewardTable) -> None:
        super().__init__(table)
        self.short_s = 0.0
        self.slow: set[tuple[int, int]] = set()
        self._seen: dict[int, int] = {}

    def begin(self, slow: set[tuple[int, int]]) -> None:
        """Before an epoch."""
        self.slow, self._seen = slow, {}

    def submit(self, items: Sequence[Any], *, training: bool = True) -> PendingScores:
        pending = self.table.submit(items, training=training)
        longest = 0.0
        for item in items:
            number = self._seen[item.group] = self._seen.get(item.group, -1) + 1
            group = list(self._seen).index(item.group)
            longest = max(longest, self.short_s * (SLOWER if (group, number) in self.slow else 1.0))
        return replace(pending, parts={place: after(longest, future) for place, future in pending.parts.items()})


def after(seconds: float, future: Future[Any]) -> Future[Any]:
    """The same result, no sooner than in so many seconds."""
    late = Future[Any]()
    timer = threading.Timer(seconds, lambda: late.set_result(future.result()))
    timer.daemon = True
    timer.start()
    return late


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=128, help="of the network, a multiple of 32")
    parser.add_argument("--side", type=int, default=64, help="of the images")
    parser.add_argument("--rounds", type=int, default=7, help="epochs of each kind")
    parser.add_argument("--out", type=Path, help="JSON to write")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as work:
        row = measure(arguments, Path(work))
    shape = {"groups": GROUPS, "group_size": GROUP_SIZE, "steps": STEPS, "slow_images": SLOW, "slower": SLOWER}
    result = {"machine": machine(), **shape, "share": SHARE, **row}
    print(json.dumps(result, indent=2))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def measure(arguments: Namespace, work: Path) -> dict[str, Any]:
    """Epochs of the three kinds in turns."""
    load_before = os.getloadavg()[0]
    run = build(parse_run(late_run(arguments, work)))
    table = run.rewards = Elsewhere(run.rewards)  # type: ignore[assignment]
    try:
        with Session(run) as session:

            def one(kind: str, slow: set[tuple[int, int]]) -> dict[str, float]:
                table.begin(slow)
                how = "next_step" if kind == "next_step" else "wait"
                begun = time.monotonic()
                recipe.train_epoch(session, session.config.algorithm.model_copy(update={"late_rewards": how}))
                seconds = time.monotonic() - begun
                lines = read_metrics(run.dir.path / "metrics.jsonl")
                steps = [line["time"] for line in lines if line["kind"] == "train"][-STEPS:]
                training = sum(t["train_forward"] + t["train_backward"] + t["optimizer"] for t in steps)
                return {"epoch": seconds, "training": training}

            one("even", set())
            free = one("even", set())
            table.short_s = SHARE * free["training"] * (STEPS - 1) / STEPS / SLOWER
            rounds = [{kind: one(kind, drawn(number, kind)) for kind in KINDS} for number in range(arguments.rounds)]
    finally:
        run.close()
    load = [round(load_before, 2), round(os.getloadavg()[0], 2)]
    return {"load": load, "short_s": round(table.short_s, 3), "long_s": round(table.short_s * SLOWER, 3)} | compared(
        rounds
    )


def drawn(number: int, kind: str) -> set[tuple[int, int]]:
    """The slow images of a round: (group, number within it)."""
    images = [(group, index) for group in range(GROUPS) for index in range(GROUP_SIZE)]
    return set() if kind == "even" else set(Random(number).sample(images, SLOW))


def compared(rounds: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, Any]:
    """Medians over the rounds, and of the ratios within them, with their range."""
    found: dict[str, Any] = {f"{kind}_s": round(median(r[kind]["epoch"] for r in rounds), 3) for kind in KINDS}
    for kind in KINDS[1:]:
        ratios = sorted(r[kind]["epoch"] / r["even"]["epoch"] for r in rounds)
        found[f"{kind}_ratio"] = round(median(ratios), 3)
        found[f"{kind}_ratio_range"] = [round(ratios[0], 3), round(ratios[-1], 3)]
    return found


def late_run(arguments: Namespace, work: Path) -> dict[str, Any]:
    """The run of `loop_overhead` with an epoch of four steps, on as many signs as it has groups."""
    shape = Namespace(width=arguments.width, side=arguments.side, batch=2 * GROUP_SIZE)
    run: dict[str, Any] = run_file("grpo", "lora", shape, work).model_dump(mode="json")
    write_signs(work / "many", draw_words(GROUPS, "train", 1), (arguments.side, arguments.side), 1)
    run["data"]["path"] = str(work / "many")
    run["rollout"] |= {"global_groups_per_batch": GROUPS, "group_size": GROUP_SIZE, "batch_size_per_device": 20}
    run["optimizer"] |= {"batch_size_per_device": 10, "gradient_accumulation": GROUPS * GROUP_SIZE // STEPS // 10}
    return run


if __name__ == "__main__":
    main()
