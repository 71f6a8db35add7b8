"""An epoch of rollouts with their advantages: rows dealt evenly to the processes and kept until they are trained on.

Legend: n samples of this process, N of all processes in rank order, S trained steps (0 if only clean images are trained
on).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from retouch.algorithms.base import AdvantageConfig
from retouch.core.advantages import RewardRows, comparable_rows
from retouch.engine import Engine
from retouch.training.pixel_gradients import pulls
from retouch.training.progress import Rows
from retouch.training.rollouts import Rollouts, rewarded_groups
from retouch.training.session import Session


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
        step_of: [n] optimizer step of the epoch, from 0, that trains on the row; [0] if rows are shuffled and dealt to
            the steps evenly.
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
    gradient: Tensor = field(default_factory=lambda: torch.zeros(0))
    step_of: Tensor = field(default_factory=lambda: torch.zeros(0))

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
        step = self.first_step[rows][:, None] + torch.arange(span.start, span.stop)
        return x, x_next, step.flatten()


def collect(session: Session, algorithm: AdvantageConfig, policy: str | None = None) -> Experience:
    """Sample an epoch, score it, turn rewards into advantages.

    Raises:
        RewardOutage, FailureRateExceeded: nothing of the epoch was trained on.
        Stopped: asked to stop between batches.
    """
    rollouts, rewards = rewarded_groups(session, algorithm, policy)
    experience = recorded(rollouts)
    weight = give_advantages(experience, rewards, algorithm, session.run.engine)
    items = [item for batch in rollouts.batches for item in batch.items]
    x0 = experience.latents[:, -1]
    experience.gradient = pulls(session, algorithm, items, experience.position, x0, experience.weight)
    return evenly_dealt(session.run.engine, experience, weight)


def recorded(rollouts: Rollouts) -> Experience:
    """This process's samples, all of weight 0."""
    paths = rollouts.trajectories
    means = [t.means for t in paths if t.means is not None]
    zeros = torch.zeros(len(rollouts.slots))
    return Experience(
        position=torch.tensor([slot.example for slot in rollouts.slots]),
        seed=torch.tensor(rollouts.seeds),
        first_step=torch.tensor([t.first_step for t in paths for _ in t.latents]),
        latents=torch.cat([t.latents for t in paths]).cpu(),
        log_probs=torch.cat([t.log_probs for t in paths]).cpu(),
        advantages=zeros,
        weight=zeros,
        means=torch.cat(means).cpu() if means else torch.zeros(0),
        reference_means=torch.zeros(0),
    )


def give_advantages(experience: Experience, rewards: RewardRows, algorithm: AdvantageConfig, engine: Engine) -> Tensor:
    """Set the advantages and weights of this process's rows -> the weights of all processes' rows [N].

    Args:
        rewards: of the rows of all processes, each with as many.
    """
    weight = comparable_rows(rewards.position, rewards.usable, algorithm.baseline)
    if algorithm.skip_zero_std_groups and algorithm.baseline == "group":
        weight = weight & ~rewards.flat(algorithm.combine)
    how = (algorithm.combine, algorithm.baseline, algorithm.scale, algorithm.advantage_clip)
    advantages, n = rewards.advantages(*how).float(), len(weight) // engine.world_size
    mine = slice(engine.rank * n, (engine.rank + 1) * n)
    experience.advantages, experience.weight = advantages[mine], weight[mine].float()
    return weight.float()


# --- dealing ---


def evenly_dealt(engine: Engine, experience: Rows, weight: Tensor) -> Rows:
    """The rows worth a forward, the same number on every process; what is missing is filled up with weight 0.

    Groups are left out and resampled on whatever process they were: without dealing, the process with the most rows
    left would set the number of forwards of all.

    Args:
        experience: n rows of this process.
        weight: [N] of all processes' rows.
    """
    n = len(experience.weight)
    hands = deal((weight > 0).tolist(), engine.world_size)
    mine, most = hands[engine.rank], max(map(len, hands))
    moved = [row for rank, hand in enumerate(hands) for row in hand if row // n != rank]
    local = [row - engine.rank * n for row in mine if row // n == engine.rank]
    guests = [place for place, row in enumerate(moved) if row in mine]

    def dealt(t: Tensor) -> Tensor:
        rows = t[local]
        if moved and len(t):
            rows = torch.cat([rows, rows_of_all(engine, t, moved)[guests]])
        return rows if len(rows) == most else torch.cat([rows, t[:1].expand(most - len(rows), *t.shape[1:])])

    result = type(experience)(**{name: dealt(t) if len(t) else t for name, t in vars(experience).items()})
    result.weight[len(mine) :] = 0
    return result


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
