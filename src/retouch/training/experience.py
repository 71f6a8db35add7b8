"""An epoch of rollouts with their advantages: rows dealt evenly to the processes and kept until they are trained on.

Legend: n samples of this process, N of all processes in rank order, S trained steps (0 if only clean images are trained
on).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from retouch.algorithms.base import AdvantageConfig
from retouch.engine import Engine
from retouch.training.pixel_gradients import pulls
from retouch.training.progress import Rows
from retouch.training.rollouts import Rollouts, advantaged_groups
from retouch.training.session import Session
from retouch.training.step import shared_batches


@dataclass
class Experience:
    """Rows to train on, on the CPU. GRPO, PPO and NFT train on these.

    Attributes:
        position: [n] of each row's example in the dataset.
        seed: [n] int64 of the row's image.
        first_step: [n] index of the first trained step.
        latents: [n, S + 1, C, H, W] fp32: the states around the trained steps; the clean latents if S is 0.
        log_probs: [n, S] as recorded while sampling.
        advantages: [n].
        weight: [n]: 1, or 0 for padding and rows without a usable reward.
        means: [n, S, C, H, W] as recorded while sampling; [0] if not requested.
        reference_means: [n, S, C, H, W] of the reference policy; [0] without a KL.
        gradient: [n, C, H, W] of `pulls`; [0] without a reward of `gradient_weight`.
        step_of: [n] optimizer step of the epoch, from 0, that trains on the row; [0] if each process shuffles its own
            rows and deals them to the steps evenly.
    """

    position: Tensor
    seed: Tensor
    first_step: Tensor
    latents: Tensor
    log_probs: Tensor
    advantages: Tensor
    weight: Tensor
    means: Tensor
    reference_means: Tensor
    gradient: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float32))
    step_of: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float32))

    @property
    def steps(self) -> int:
        """S."""
        return self.log_probs.shape[1]

    def spanned(self, name: Literal["log_probs", "means", "reference_means"], rows: Tensor, span: range) -> Tensor:
        """[B · W, ...] of a tensor [n, S, ...]: rows over a span of trained steps, row-major."""
        return getattr(self, name)[rows][:, span.start : span.stop].flatten(0, 1)

    def transitions(self, rows: Tensor, span: range) -> tuple[Tensor, Tensor, Tensor]:
        """(x, x_next [B · W, C, H, W], step [B · W]) of rows over a span of trained steps, row-major."""
        states = self.latents[rows]
        x = states[:, span.start : span.stop].flatten(0, 1)
        x_next = states[:, span.start + 1 : span.stop + 1].flatten(0, 1)
        step = self.first_step[rows][:, None] + torch.arange(span.start, span.stop, dtype=torch.int64)
        return x, x_next, step.flatten()


def experiences(session: Session, algorithm: AdvantageConfig, policy: str | None = None) -> Iterator[Experience]:
    """The rows of the epoch under way, once: those that a checkpoint inside it kept, or else sampled and scored now.

    Args:
        policy: snapshot that samples; None is the current policy.

    Raises:
        RewardOutage, FailureRateExceeded: nothing of the epoch was trained on.
        Stopped: asked to stop between batches, or while rewards are computed.
    """
    yield session.kept(Experience) or collect(session, algorithm, policy)


def collect(session: Session, algorithm: AdvantageConfig, policy: str | None = None) -> Experience:
    """Sample an epoch, score it, turn rewards into advantages.

    Raises:
        RewardOutage, FailureRateExceeded: nothing of the epoch was trained on.
        Stopped: asked to stop between batches, or while rewards are computed.
    """
    rollouts, advantages, weight = advantaged_groups(session, algorithm, policy)
    engine = session.run.engine
    own_weight = weight.tensor_split(engine.world_size)[engine.rank]
    rows = replace(recorded(rollouts), advantages=advantages, weight=own_weight)
    if any(entry.gradient_weight for entry in session.config.rewards.values()):
        sampled = sum(not slot.padding for slot in rollouts.slots)
        own = (rollouts.items, rows.position, rows.latents[:, -1], rows.weight)
        rows.gradient = pulls(session, algorithm, *own, sampled)
    return evenly_dealt(engine, rows, weight, session.shared_steps)


def recorded(rollouts: Rollouts) -> Experience:
    """This process's samples, all of weight 0."""
    paths = rollouts.trajectories
    means = [t.means for t in paths if t.means is not None]
    zeros = torch.zeros(len(rollouts.slots), dtype=torch.float32)
    return Experience(
        position=torch.tensor([slot.example for slot in rollouts.slots], dtype=torch.int64),
        seed=torch.tensor(rollouts.seeds, dtype=torch.int64),
        first_step=torch.tensor([t.first_step for t in paths for _ in t.latents], dtype=torch.int64),
        latents=torch.cat([t.latents for t in paths]),
        log_probs=torch.cat([t.log_probs for t in paths]),
        advantages=zeros,
        weight=zeros,
        means=torch.cat(means) if means else torch.zeros(0, dtype=torch.float32),
        reference_means=torch.zeros(0, dtype=torch.float32),
    )


# --- dealing ---


def evenly_dealt(engine: Engine, experience: Rows, weight: Tensor, steps: int = 1) -> Rows:
    """The rows worth a forward, the same number on every process; what is missing is filled up with weight 0.

    Groups are left out and resampled on whatever process they were: without dealing, the process with the most rows
    left would set the number of forwards of all.

    Args:
        experience: n rows of this process.
        weight: [N] of all processes' rows.
        steps: optimizer steps to which `shared_batches` deals the rows, each with the same number on every process; 1
            leaves them to the session.
    """
    n, live = len(experience.weight), weight > 0
    members = [live]
    if steps > 1:
        members = _members(engine.gather(experience.seed).cpu(), live, steps)
    hands = [deal(member.tolist(), engine.world_size) for member in members]
    most = [max(map(len, each)) for each in hands]
    mine = [row for each, size in zip(hands, most, strict=True) for row in _filled(each[engine.rank], size)]
    moved = [row for each in hands for rank, hand in enumerate(each) for row in hand if row // n != rank]
    place = {row: row - engine.rank * n for row in mine if row is not None and row // n == engine.rank}
    place |= {row: n + number for number, row in enumerate(moved) if row // n != engine.rank}
    index = torch.tensor([0 if row is None else place[row] for row in mine], dtype=torch.int64)

    def dealt(t: Tensor) -> Tensor:
        return (torch.cat([t, rows_of_all(engine, t, moved)]) if moved else t)[index]

    result = type(experience)(**{name: dealt(t) if len(t) else t for name, t in vars(experience).items()})
    result.weight[torch.tensor([row is None for row in mine], dtype=torch.bool)] = 0
    if steps > 1:
        sizes = torch.tensor(most, dtype=torch.int64)
        result.step_of = torch.arange(steps, dtype=torch.int64).repeat_interleave(sizes)
    return result


def _members(seeds: Tensor, live: Tensor, steps: int) -> list[Tensor]:
    """Which of N rows each step trains on."""
    rows, members = live.nonzero().flatten(), [torch.zeros_like(live) for _ in range(steps)]
    for member, batch in zip(members, shared_batches(seeds[rows], steps), strict=True):
        member[rows[batch]] = True
    return members


def _filled(rows: Sequence[int], size: int) -> list[int | None]:
    """`size` rows, None for those that are missing."""
    return [*rows, *[None] * (size - len(rows))]


def deal(live: Sequence[bool], world_size: int) -> list[list[int]]:
    """Which of N rows in rank order are live -> the rows that each rank gets: its own up to an even share, rounded up;
    those beyond it go to ranks with fewer. No other row moves."""
    n, share = len(live) // world_size, -(-sum(live) // world_size)
    own = [[row for row in range(rank * n, (rank + 1) * n) if live[row]] for rank in range(world_size)]
    spare = [row for rows in own for row in rows[share:]]
    hands: list[list[int]] = []
    for rows in own:
        room = max(0, share - len(rows))
        hands.append(rows[:share] + spare[:room])
        spare = spare[room:]
    return hands


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
