"""What does the training loop cost beside the network? An epoch of GRPO and of NFT against the bare calls it makes.

One process, the same tensors: an epoch is run once with a recorder at the network, and what it was called with is then
replayed, forwards and backwards alone. Epochs and replays take turns; reported are the medians of their times and the
median and range of the ratios of neighbours. Decoding and rewards are left out (stubs that take no time), and so are
evaluation and checkpoints; encoding is done before. Everything else counts as overhead: noise, steps,
log-probabilities, advantages, losses, clipping, AdamW, metrics. The base has random weights and is just large enough
for a forward of the batch to take 100 ms.

Beside wall time stands the time of the process: on a machine that does other things it is what can be compared.

    python benchmarks/loop_overhead.py --out benchmarks/results/loop_overhead.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from epochs import epochs

from retouch.config import parse_run
from retouch.families.flux_fill.model import FluxFill
from retouch.rewards.table import Scores
from retouch.tiny.signs import (
    draw_words,
    write_signs,
)
from retouch.training.build import (
    Run,
    build,
)
from retouch.training.session import Session
from retouch.types import Score

ALGORITHMS = {
    "grpo": ({"name": "grpo"}, {"window": {"size": 2}, "noise_level": 0.7}),
    "nft": ({"name": "nft", "timesteps_per_image": 2}, {}),
}
TRAINED = {"lora": {"kind": "lora", "rank": 16, "alpha": 16}, "full": {"kind": "full"}}


@dataclass(frozen=True)
class Call:
    """One forward of the network as the loop made it."""

    arguments: dict[str, Any]
    trains: bool


class Recorder:
    """What the network is called with, while it is switched on."""

    def __init__(self, network: Any) -> None:
        self.calls: list[Call] = []
        self._hook = network.register_forward_pre_hook(self._record, with_kwargs=True)

    def _record(self, network: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.calls.append(Call(dict(kwargs), torch.is_grad_enabled()))

    def close(self) -> None:
        self._hook.remove()


class NoRewards:
    """In place of the reward table: scores that are there at once, and differ within a group."""

    counted = ()  # nothing is waited for

    def __init__(self, table: Any) -> None:
        self.__dict__.update(vars(table))
        self._table = table

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, name)

    def submit(self, items: Sequence[Any], *, broken: Collection[int] = (), **_: Any) -> Scores:
        return Scores(
            {"preservation": [Score(i / 10) for i in range(len(items))]}, {"preservation": 1.0}, items, broken
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=320, help="of the network, a multiple of 32")
    parser.add_argument("--batch", type=int, default=8, help="images of a forward")
    parser.add_argument("--side", type=int, default=64, help="of the images")
    parser.add_argument("--pairs", type=int, default=21, help="epochs, and replays")
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--train", nargs="+", choices=TRAINED, default=list(TRAINED))
    parser.add_argument("--out", type=Path, help="JSON to write")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as work:
        rows = [
            measure(algorithm, train, arguments, Path(work))
            for algorithm in arguments.algorithms
            for train in arguments.train
        ]
    result = {"machine": machine(), "width": arguments.width, "batch": arguments.batch, "rows": rows}
    print(json.dumps(result, indent=2))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def measure(algorithm: str, train: str, arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Epochs and replays in turns -> a row."""
    load_before = os.getloadavg()
    run = build(run_file(algorithm, train, arguments, work))
    try:
        run.rewards = NoRewards(run.rewards)  # type: ignore[assignment]
        shape = (3, arguments.side, arguments.side)
        run.model.decode = lambda latents: torch.zeros(len(latents), *shape)  # type: ignore[method-assign]
        with Session(run) as session:
            for name in ("old", "reference") if algorithm == "nft" else ():
                run.policy.snapshot(name)
            epoch = epochs(session)
            epoch()  # warm: encodings, allocations; NFT's old policy is still the trained one
            recorder = Recorder(run.model.network)
            epoch()  # its calls are replayed
            recorder.close()
            replay(run, recorder.calls)
            times = [(timed(epoch), timed(partial(replay, run, recorder.calls))) for _ in range(arguments.pairs)]
            forward = min(timed(partial(one_forward, run, recorder.calls))[1] for _ in range(3))
    finally:
        run.close()
    return {
        "algorithm": algorithm,
        "train": train,
        "forwards": sum(not c.trains for c in recorder.calls),
        "forwards_with_backward": sum(c.trains for c in recorder.calls),
        "forward_of_the_batch_s": round(forward, 4),  # of the process: on the wall it would grow with the load
        "load": [round(x, 2) for x in (*load_before[:1], *os.getloadavg()[:1])],
        **compared("wall", [(a[0], b[0]) for a, b in times]),
        **compared("process", [(a[1], b[1]) for a, b in times]),
    }


def compared(name: str, pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Medians of both, and of the ratio of neighbours, with ranges."""
    ratios = sorted(a / b for a, b in pairs)
    return {
        f"{name}_step_s": round(median(a for a, _ in pairs), 4),
        f"{name}_calls_s": round(median(b for _, b in pairs), 4),
        f"{name}_ratio": round(median(ratios), 4),
        f"{name}_ratio_range": [round(ratios[0], 4), round(ratios[-1], 4)],
    }


def timed(block: Callable[[], object]) -> tuple[float, float]:
    """Seconds on the wall, and of the process."""
    wall, process = time.perf_counter(), time.process_time()
    block()
    return time.perf_counter() - wall, time.process_time() - process


def replay(run: Run, calls: Sequence[Call]) -> None:
    """The network calls of an epoch and nothing else."""
    for call in calls:
        with torch.set_grad_enabled(call.trains):
            output = run.network(**call.arguments)[0]
            if call.trains:
                output.backward(torch.ones_like(output))
    for parameter in run.policy.parameters.values():
        parameter.grad = None


@torch.no_grad()
def one_forward(run: Run, calls: Sequence[Call]) -> None:
    run.network(**next(c for c in calls if not c.trains).arguments)


def run_file(algorithm: str, train: str, arguments: argparse.Namespace, work: Path) -> Any:
    """A run on a random base; each epoch is one batch of rollouts and one optimizer step."""
    model, side = work / "model", arguments.side
    if not model.exists():
        pipe = FluxFill.tiny()
        heads = arguments.width // 32
        pipe.register_modules(
            transformer=FluxTransformer2DModel.from_config(pipe.transformer.config, num_attention_heads=heads)
        )
        pipe.save_pretrained(model)
        write_signs(work / "signs", draw_words(8, "train", 1), (side, side), 1)
    section, rollout = ALGORITHMS[algorithm]
    return parse_run(
        {
            "name": f"{algorithm}-{train}",
            "model": {
                "path": str(model),
                "dtype": "fp32",
                "max_sequence_length": 24,
                "train": TRAINED[train],
            },
            "data": {"format": "self_bench", "path": str(work / "signs"), "resolution": [side, side]},
            "rollout": {
                "group_size": arguments.batch // 2,
                "global_groups_per_batch": 2,
                "batch_size_per_device": arguments.batch,
                "num_steps": 4,
                **rollout,
            },
            "algorithm": section,
            "rewards": {"preservation": {}},
            "optimizer": {"batch_size_per_device": arguments.batch // 2, "gradient_accumulation": 2},
            "training": {
                "max_steps": 1000,
                "checkpoint_every": 0,
                "eval_every": 0,
                "mixed_precision": "no",
                "gradient_checkpointing": False,
            },
            "evaluation": {"num_examples": 1, "grid_examples": 0},
            "logging": {"dir": str(work / "runs"), "sinks": []},
        }
    )


def machine() -> dict[str, Any]:
    """What the numbers were taken on."""
    return {
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    main()
