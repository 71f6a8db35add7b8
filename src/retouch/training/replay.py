"""Repeat the optimizer step of a dump and compare every number with the recorded one.

The run file, the state before the step and the rows of the epoch come from the dump; the run file names the data and
the model. No reward is computed, and nothing is written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retouch.config import RunConfig
from retouch.config.load import parse_run
from retouch.config.trust import consented
from retouch.engine import CheckpointError
from retouch.engine.saved import saved_run_file
from retouch.errors import ConfigError
from retouch.registry import load_attribute
from retouch.training.build import build
from retouch.training.dump import Dump, Share, StepTaken, describe, read_dump


@dataclass(frozen=True)
class Replay:
    """A dump, and the same step as it is today.

    Attributes:
        step: number of the step, from 1.
        now: what the repetition computed.
    """

    step: int
    phase: str
    epoch: int
    then: Dump
    now: Dump

    @property
    def different_results(self) -> list[str]:
        """Losses and norms that differ; empty if the step was reproduced bitwise."""
        return results(self.then, self.now)

    @property
    def different_inputs(self) -> list[str]:
        """Weights, examples, seeds and versions that differ: the possible reasons."""
        return inputs(self.then, self.now)

    @property
    def lines(self) -> list[str]:
        """The step for a reader: its first broken micro-batch with its examples, and the gradient norm."""
        losses = [loss for share in self.now.shares for loss in share.losses]
        first = first_broken(self.now.shares, self.now.rows_per_forward)
        return [
            f"step {self.step} ({self.phase}, epoch {self.epoch}): {self.then.problem}",
            f"  {len(losses)} micro-batches, {sum(map(broken, losses))} with a loss of NaN or Inf",
            *([] if first is None else [f"  first: {first}"]),
            f"  gradient norm: {_shown(self.now.grad_norm)}",
        ]


def replay(folder: Path, overrides: Sequence[str] = (), *, trust: bool = False) -> Replay:
    """Repeat the step of a dump on as many processes as the run had.

    Args:
        overrides: "dotted.key=value" for the run file, such as the paths of data and model on this machine.
        trust: use the code and the hosts that the run file in it names.

    Raises:
        CheckpointError: no dump, a damaged one, or one of other model files or data.
        ConfigError: the run file in it is none, names code or hosts without consent, or the overrides are wrong.
    """
    state, then = read_dump(folder)
    config = run_file(state, folder, overrides, trust=trust)
    run = build(config, replaying=True)
    try:
        if run.engine.world_size != len(then.shares):
            raise ConfigError(
                f"{folder}: a step of {len(then.shares)} processes, and this is {run.engine.world_size}; start "
                f"`retouch replay` with accelerate launch --num_processes {len(then.shares)}"
            )
        now = None
        try:
            load_attribute(config.algorithm.recipe)(run)
        except StepTaken as taken:
            now = describe(run, taken.numbers, then.rows_per_forward, then.problem)
        if now is None:
            raise CheckpointError(f"{folder}: no step follows its state; give a dump that a run left")
    finally:
        run.close()
    progress = state["progress"]
    return Replay(progress["step"] + 1, progress["phase"], progress.get("epoch", 0), then, now)


def run_file(state: Mapping[str, Any], folder: Path, overrides: Sequence[str], *, trust: bool = False) -> RunConfig:
    """The run file of a dump, to be resumed from it; `trust` as in `replay`.

    Raises:
        CheckpointError, ConfigError: not a run file, or code or hosts without consent.
    """
    data = saved_run_file(state, folder)
    trust = trust or consented(folder.resolve().parent.parent, state["config"].encode())
    config = parse_run(data, overrides, source=f"{folder}: state.json", trust=trust)
    return config.model_copy(update={"resume": str(folder)})


def results(then: Dump, now: Dump) -> list[str]:
    """The losses, the gradient norm and the learning rate that differ."""
    found: list[str] = []
    for rank, (a, b) in enumerate(zip(then.shares, now.shares, strict=True)):
        where = f" of process {rank}" if len(then.shares) > 1 else ""
        if len(a.losses) != len(b.losses):
            found.append(f"{len(a.losses)} micro-batches{where} then, {len(b.losses)} now")
        pairs = enumerate(zip(a.losses, b.losses, strict=False), 1)
        found += [f"loss {i}{where}: {_shown(x)} then, {_shown(y)} now" for i, (x, y) in pairs if x != y]
    for name in ("grad_norm", "lr", "loss_scale"):
        x, y = getattr(then, name), getattr(now, name)
        if x != y:
            found.append(f"{name}: {_shown(x)} then, {_shown(y)} now")
    return found


def inputs(then: Dump, now: Dump) -> list[str]:
    """The weights, examples, seeds and versions that differ."""
    found: list[str] = []
    for a, b in zip(then.shares, now.shares, strict=True):
        if a.examples != b.examples:
            found.append(f"examples: {_few(a.examples)} then, {_few(b.examples)} now")
        changed = [
            i for i, x, y in zip(a.examples, a.keys, b.keys, strict=False) if x != y and a.examples == b.examples
        ]
        if changed:
            found.append(f"data: example {_few(sorted(set(changed)))} has another prompt or image now")
        if a.seeds != b.seeds:
            found.append("seeds differ")
    found += _changes("SHA-256 of ", then.weights, now.weights)
    return found + _changes("", then.environment, now.environment)


def _changes(what: str, then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    names = sorted({*then, *now})
    return [
        f"{what}{name}: {then.get(name, 'none')[:60]} then, {now.get(name, 'none')[:60]} now"
        for name in names
        if then.get(name) != now.get(name)
    ]


def first_broken(shares: Sequence[Share], rows_per_forward: int) -> str | None:
    """The first micro-batch with a loss of NaN or Inf, with its examples; None if every loss is finite. Micro-batches
    of the same rows, such as spans of trained steps, follow each other."""
    for rank, share in enumerate(shares):
        for number, loss in enumerate(share.losses):
            if broken(loss):
                forwards = max(1, -(-len(share.examples) // rows_per_forward))
                start = number * forwards // len(share.losses) * rows_per_forward
                examples = share.examples[start : start + rows_per_forward]
                where = f" of process {rank}" if len(shares) > 1 else ""
                return f"micro-batch {number + 1}{where}, loss {_shown(loss)}, examples {_few(examples)}"
    return None


def broken(number: str) -> bool:
    """Whether a recorded number is NaN or Inf."""
    return not math.isfinite(float.fromhex(number))


def _shown(number: str | None) -> str:
    return "none" if number is None else f"{float.fromhex(number):.9g}"


def _few(values: Sequence[int]) -> str:
    return ", ".join(map(str, values[:8])) + (f" and {len(values) - 8} more" if len(values) > 8 else "")
