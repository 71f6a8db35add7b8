"""The engine alone, on a small network, in every way that two processes share one:
`torchrun -m tests.distributed.small_network OUT WAY,WAY`; without torchrun, one process. Writes what came of it to
OUT."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from retouch.config.run import (
    OptimizerConfig,
    TrainingConfig,
)
from retouch.engine import Checkpoints, Diverged, Engine, Policy
from retouch.engine.sharding import piece

torch.set_num_threads(1)

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
WAYS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp2": {"sharding": "fsdp2"},
    "zero1": {"sharding": "zero2", "shard_gradients": False},
    "zero2": {"sharding": "zero2"},
    "zero3": {"sharding": "zero3"},
}


class Block(nn.Module):
    """Sizes that two processes cannot halve, and a weight that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 5)
        self.outer = nn.Linear(5, 7)
        self.scale = nn.Parameter(torch.full((7,), 0.9))
        self.inner.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.outer(torch.tanh(self.inner(x)))


class Network(nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.last = nn.Linear(7, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def rows(step: int) -> tuple[Tensor, Tensor]:
    """Eight rows of a step, of which each process takes its own."""
    draw = torch.Generator().manual_seed(step)
    return torch.randn(8, 7, generator=draw), torch.randn(8, generator=draw)


class Setup:
    def __init__(
        self, sharding: dict[str, Any], folder: Path, precision: str = "no", *, of_files: torch.dtype | None = None
    ) -> None:
        training = TrainingConfig(mixed_precision=precision, **sharding)  # type: ignore[arg-type]
        self.engine = Engine(training, OptimizerConfig(lr=0.05, eps=1e-3, max_grad_norm=0.5), seed=3)
        network = Network()
        if precision == "bf16":  # as a network is under an adapter
            for parameter in network.parameters():
                parameter.data = parameter.data.to(torch.float32 if parameter.requires_grad else torch.bfloat16)
        if of_files is not None:  # as a network that is trained whole comes from its files
            network.to(of_files)
        dtype = None if of_files is None else torch.float32
        self.engine.prepare(network, gradient_checkpointing=False, dtype=dtype)
        self.policy = Policy(network, exchange=self.engine.own_memory)
        self.engine.new_optimizer()
        self.checkpoints = Checkpoints(
            folder,
            lambda weights, to: (to.mkdir(), torch.save(dict(weights), to / "w.pt"))[0],
            lambda source: torch.load(source / "w.pt", weights_only=True),
        )

    def step(self, number: int, poison: float = 0.0) -> list[float]:
        """In two micro-batches -> loss over all processes, gradient norm."""
        x, y = rows(number)
        loss = torch.zeros(())
        mine = 8 // WORLD // 2
        for micro in range(2):
            begin = RANK * 2 * mine + micro * mine
            with self.engine.micro_step(last=micro == 1):
                bx, by = x[begin : begin + mine], y[begin : begin + mine]
                part = (self.engine.network(bx).flatten() - by).square().sum() / 8
                self.engine.backward(part + poison * part)
            loss += part.detach()
        return [float(self.engine.sum(loss)), self.engine.step(0.05)["grad_norm"]]

    def forward(self, name: str | None) -> list[float]:
        with self.policy.use(name):
            return self.engine.network(rows(0)[0]).flatten().tolist()

    def whole(self, name: str | None = None) -> dict[str, list[float]]:
        return {n: t.flatten().tolist() for n, t in self.policy.whole(name).items()}


def told(sharding: dict[str, Any], out: Path, way: str) -> dict[str, Any]:
    """Steps, averages, a snapshot, a phase with new moments, a gradient that is not finite, a checkpoint."""
    setup = Setup(sharding, out / way)
    engine, policy = setup.engine, setup.policy
    policy.snapshot("ema")
    policy.snapshot("old")
    found: dict[str, Any] = {"steps": [setup.step(1)]}
    for number in (2, 3):
        found["steps"].append(setup.step(number))
        policy.blend("ema", 0.5)
    found["forwards"] = {str(name): setup.forward(name) for name in (None, "ema", "old", None)}
    found["steps"].append(setup.step(4))  # after weights were swapped
    engine.new_optimizer()
    found["steps"].append(setup.step(5))
    before = setup.whole()
    try:
        setup.step(6, poison=float("inf"))
    except Diverged:
        found["diverged"] = setup.whole() == before
    found["steps"].append(setup.step(6))
    setup.checkpoints.save(1, engine, policy, {})
    moments = [piece(t) for entry in engine.optimizer.state.values() for t in (entry["exp_avg"], entry["exp_avg_sq"])]
    found["held"] = {
        "trained": policy.size,
        "weights": sum(t.numel() for t in policy.state().values()),
        "ema": sum(t.numel() for t in policy.state("ema").values()),
        "moments": sum(t.numel() for t in moments),
    }
    found["weights"], found["averages"] = setup.whole(), setup.whole("ema")
    return found


def resumed(sharding: dict[str, Any], out: Path, way: str, source: Path) -> dict[str, Any]:
    """Two steps on from a checkpoint of whoever wrote it."""
    setup = Setup(sharding, out / way)
    setup.step(20)  # what is loaded replaces all of it
    setup.checkpoints.load(source, setup.engine, setup.policy)
    return {"steps": [setup.step(7), setup.step(8)], "weights": setup.whole(), "averages": setup.whole("ema")}


def collectives(sharding: dict[str, Any], out: Path, way: str) -> list[dict[str, int]]:
    """What a process calls in each of two micro-steps: name of a collective -> how often."""
    setup = Setup(sharding, out / way)
    micro_step, found = setup.engine.micro_step, list[dict[str, int]]()

    @contextlib.contextmanager
    def watched(*, last: bool) -> Iterator[None]:
        with profile(activities=[ProfilerActivity.CPU]) as calls, micro_step(last=last):
            yield
        found.append({e.key: e.count for e in calls.key_averages() if e.key.startswith("c10d::")})

    setup.engine.micro_step = watched
    setup.step(1)
    return found


def main() -> None:
    out = Path(sys.argv[1])
    wanted = {name: WAYS[name] for name in sys.argv[2].split(",")} if WORLD > 1 else {"one": {}}
    found = {way: told(sharding, out, way) for way, sharding in wanted.items()}
    before = list(wanted)[-1]
    for way, sharding in wanted.items():
        found[way]["resumed"] = resumed(sharding, out, f"{way}-resumed", out / "one" / "step-000001")
        found[way]["taken_over"] = resumed(sharding, out, f"{way}-taken-over", out / before / "step-000001")
        before = way
        for whole in (False, True):
            kind = "whole_gradients" if whole else "gradients"
            found[way][kind] = collectives({**sharding, "shard_gradients": not whole}, out, f"{way}-{kind}")
        found[way]["bf16"] = Setup(sharding, out / f"{way}-bf16", "bf16").step(1)
        mapped = Setup(sharding, out / f"{way}-mapped", of_files=torch.bfloat16)
        found[way]["mapped"] = {"start": mapped.whole(), "steps": [mapped.step(1), mapped.step(2)]}
    (out / f"{'one' if WORLD == 1 else f'rank-{RANK}'}.json").write_text(json.dumps(found), encoding="utf-8")
    if WORLD > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
