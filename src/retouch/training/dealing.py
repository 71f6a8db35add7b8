"""Which rows of an epoch each process and each optimizer step trains on."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import torch
from torch import Tensor

from retouch.data.sampler import derive_seed
from retouch.engine import Engine
from retouch.training.progress import Rows

# --- to the processes ---


def evenly_dealt(engine: Engine, experience: Rows, counts: Tensor, steps: int = 1) -> Rows:
    """The rows worth a forward, the same number on every process; rows that do not count fill up what is missing.

    Groups are left out and resampled on whatever process they were: without this, the process with the most rows left
    would set the number of forwards of all.

    Args:
        experience: n rows of this process.
        counts: [N] `counts_in_loss` of all processes' rows.
        steps: optimizer steps to which `shared_batches` deals the rows, each with the same number on every process; 1
            leaves them to the session.
    """
    n, live = len(experience.counts_in_loss), counts > 0
    members = [live]
    if steps > 1:
        members = _members(engine.gather(experience.seed).cpu(), live, steps)
    shares = [rows_by_rank(member.tolist(), engine.world_size) for member in members]
    sizes = [max(map(len, share)) for share in shares]
    mine: list[int | None] = []  # None for rows that are missing
    for share, size in zip(shares, sizes, strict=True):
        mine += [*share[engine.rank], *[None] * (size - len(share[engine.rank]))]
    moved = [row for share in shares for rank, rows in enumerate(share) for row in rows if row // n != rank]
    place = {row: row - engine.rank * n for row in mine if row is not None and row // n == engine.rank}
    place |= {row: n + number for number, row in enumerate(moved) if row // n != engine.rank}
    index = torch.tensor([0 if row is None else place[row] for row in mine], dtype=torch.int64)

    tensors = {name: t for name, t in vars(experience).items() if len(t)}
    if moved:
        tensors = {name: torch.cat([t, rows_of_all(engine, t, moved)]) for name, t in tensors.items()}
    result = type(experience)(**vars(experience) | {name: t[index] for name, t in tensors.items()})
    result.counts_in_loss[torch.tensor([row is None for row in mine], dtype=torch.bool)] = 0
    if steps > 1:
        counts = torch.tensor(sizes, dtype=torch.int64)
        result.optimizer_step = torch.arange(steps, dtype=torch.int64).repeat_interleave(counts)
    return result


def _members(seeds: Tensor, live: Tensor, steps: int) -> list[Tensor]:
    """Which of N rows each step trains on."""
    rows, members = live.nonzero().flatten(), [torch.zeros_like(live) for _ in range(steps)]
    for member, batch in zip(members, shared_batches(seeds[rows], steps), strict=True):
        member[rows[batch]] = True
    return members


def rows_by_rank(live: Sequence[bool], world_size: int) -> list[list[int]]:
    """Which of N rows in rank order are live -> the rows that each rank gets: its own up to an even share, rounded up;
    those beyond it move to ranks with fewer. No other row moves."""
    n, share = len(live) // world_size, -(-sum(live) // world_size)
    own = [[row for row in range(rank * n, (rank + 1) * n) if live[row]] for rank in range(world_size)]
    moving = [row for rows in own for row in rows[share:]]
    result: list[list[int]] = []
    for rows in own:
        free = max(0, share - len(rows))
        result.append(rows[:share] + moving[:free])
        moving = moving[free:]
    return result


def rows_of_all(engine: Engine, values: Tensor, rows: Sequence[int]) -> Tensor:
    """Some of all ranks' rows [M, ...] on the CPU, the same on every rank; only these are communicated.

    Args:
        values: [n, ...] of this rank; n is the same on every rank.
        rows: M indices in rank order.
    """
    start = engine.rank * len(values)
    found = torch.zeros(len(rows), *values.shape[1:], dtype=values.dtype)
    for place, row in enumerate(rows):
        if start <= row < start + len(values):
            found[place] = values[row - start]
    return engine.sum(found).cpu() if rows else found  # every other rank has zeros there


# --- to the optimizer steps ---


def step_batches(
    rows: int, seed: int, epoch: int, inner_epochs: int, steps: int, optimizer_step: Tensor | None = None
) -> list[Tensor]:
    """Row indices of each optimizer step of an epoch: every inner epoch is shuffled from (seed, epoch, inner) and dealt
    evenly into its steps.

    Args:
        rows: number of rows of this process.
        optimizer_step: [rows] of each row, the same in every inner epoch; None or [0] where they are dealt here.
    """
    if optimizer_step is not None and len(optimizer_step):
        return [(optimizer_step == number % (steps // inner_epochs)).nonzero().flatten() for number in range(steps)]
    batches: list[Tensor] = []
    for inner in range(inner_epochs):
        order = list(range(rows))
        Random(derive_seed(seed, "order", epoch, inner)).shuffle(order)
        batches += list(torch.tensor(order, dtype=torch.long).tensor_split(steps // inner_epochs))
    return batches


def shared_batches(seeds: Tensor, steps: int) -> list[Tensor]:
    """Row indices of each of the steps that all processes take together, from the seeds [N] of all rows: the same rows
    whichever process has them. Seeds are hashes, so their order is a random one."""
    return list(seeds.argsort(stable=True).tensor_split(steps))
