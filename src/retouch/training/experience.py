"""An epoch of rollouts with their advantages, kept until they are trained on. GRPO, PPO and NFT train on these.

Legend: n rows of this rank, N of all ranks, S trained steps (0 where only clean images are trained on).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from random import Random
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from retouch.algorithms.base import AdvantageConfig, RlConfig
from retouch.core.advantages import comparable_rows, group_advantages
from retouch.data.sampler import (
    curriculum_examples,
    curriculum_pool,
    derive_seed,
    other_examples,
)
from retouch.engine import CheckpointError, Engine
from retouch.rollout.encoded import EncodedData
from retouch.training.rollouts import (
    RewardRows,
    Rollouts,
    gather_rewards,
    log_rollouts,
    sample_and_score,
    tally,
)
from retouch.training.session import Session

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

logger = logging.getLogger(__name__)

Rows = TypeVar("Rows", bound="DataclassInstance")


@dataclass
class Experience:
    """Rows to train on, on the CPU.

    Attributes:
        position: [n] of each row's example in the data set.
        seed: [n] int64 that its image was drawn from.
        first_step: [n] index of the first trained step.
        latents: [n, S + 1, C, H, W] fp32: the states around the trained steps; the clean latents where S is 0.
        log_probs: [n, S] as recorded while sampling.
        advantages: [n].
        weight: [n]: 1, or 0 for padding and rows without a usable reward.
        means: [n, S, C, H, W] as recorded while sampling; [0] where nobody asked.
        reference_means: [n, S, C, H, W] of the reference policy; [0] where no KL is asked for.
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

    @property
    def steps(self) -> int:
        """S."""
        return self.log_probs.shape[1]

    def tensors(self) -> dict[str, Tensor]:
        """For a checkpoint inside the epoch."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def restore(cls, tensors: Mapping[str, Tensor]) -> Experience:
        """What a checkpoint kept.

        Raises:
            CheckpointError: it is not that of these algorithms.
        """
        return restored(cls, tensors)

    def transitions(self, rows: Tensor, span: range) -> tuple[Tensor, Tensor, Tensor]:
        """(x, x_next [B · W, C, H, W], step [B · W]) of rows over a span of trained steps, row-major."""
        states = self.latents[rows]
        x = states[:, span.start : span.stop].flatten(0, 1)
        x_next = states[:, span.start + 1 : span.stop + 1].flatten(0, 1)
        step = self.first_step[rows][:, None] + torch.arange(span.start, span.stop)
        return x, x_next, step.flatten()


def collect(session: Session, data: EncodedData, algorithm: AdvantageConfig, policy: str | None = None) -> Experience:
    """Sample an epoch, score it, turn rewards into advantages.

    Raises:
        RewardOutage, FailureRateExceeded: nothing of the epoch was trained on.
        Stopped: asked to stop between batches.
    """
    run = session.run
    rollouts, rewards = rewarded_groups(session, data, algorithm, policy)
    mine = rewards.of_rank(run.engine.rank, run.engine.world_size)
    advantages, weight = advantages_of(rewards, algorithm)
    paths = rollouts.trajectories
    recorded = [t.means for t in paths if t.means is not None]
    experience = Experience(
        position=rewards.position[mine],
        seed=torch.tensor(rollouts.seeds),
        first_step=torch.tensor([t.first_step for t in paths for _ in t.latents]),
        latents=torch.cat([t.latents for t in paths]).cpu(),
        log_probs=torch.cat([t.log_probs for t in paths]).cpu(),
        advantages=advantages[mine],
        weight=weight[mine],
        means=torch.cat(recorded).cpu() if recorded else torch.zeros(0),
        reference_means=torch.zeros(0),
    )
    return evenly_dealt(run.engine, experience, weight)


def rewarded_groups(
    session: Session, data: EncodedData, algorithm: RlConfig, policy: str | None
) -> tuple[Rollouts, RewardRows]:
    """An epoch's images with their rewards. Groups without a signal (rewards all alike, or fewer than two that did not
    fail) are followed by new ones, for up to `resample_rounds` rounds (DAPO, arXiv 2503.14476); the same decision on
    every rank."""
    run, config, epoch = session.run, session.run.config, session.progress.epoch
    session.probe_rewards()
    wanted = config.rollout.global_groups_per_batch * config.rollout.batches_per_epoch
    difficulties, stages, epochs = run.data.difficulties, run.data.stages, run.derived.epochs
    chosen = curriculum_examples(difficulties, wanted, config.seed, epoch, epochs, stages)
    too_hard = set(range(len(run.data))) - set(curriculum_pool(difficulties, epoch, epochs, stages))
    rollouts = sample_and_score(session, data, algorithm, chosen, policy)
    counted, rewards = tally(run, rollouts), gather_rewards(run, rollouts)
    for again in range(algorithm.resample_rounds):
        signal = comparable_rows(rewards.position, rewards.valid) & ~rewards.flat(algorithm.combine)
        missing = wanted - rewards.position[signal].unique().numel()
        taken = too_hard.union(chosen)
        more = other_examples(len(run.data), taken, missing, config.seed, epoch, again) if missing > 0 else []
        if not more:
            break
        rollouts += sample_and_score(session, data, algorithm, more, policy)
        counted, rewards = tally(run, rollouts), gather_rewards(run, rollouts)
        chosen += more
    run.rewards.count(counted.asked, counted.lost)
    log_rollouts(session, algorithm, rollouts, rewards)
    return rollouts, rewards


def advantages_of(rewards: RewardRows, algorithm: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """Advantages and weights of all ranks' rows -> ([N], [N]) fp32."""
    options = (algorithm.baseline, algorithm.scale)
    advantages = combined_advantages(rewards, algorithm.combine, *options, clip=algorithm.advantage_clip)
    usable = comparable_rows(rewards.position, rewards.valid, algorithm.baseline)
    if algorithm.skip_zero_std_groups and algorithm.baseline == "group":
        usable = usable & ~rewards.flat(algorithm.combine)
    return advantages.float(), usable.float()


def combined_advantages(rewards: RewardRows, combine: str, baseline: str, scale: str, clip: float) -> Tensor:
    """Of each reward, weighted, or of the weighted sum of the rewards -> [N]."""
    signals = rewards.signals(combine)
    parts = [
        group_advantages(column, rewards.position, rewards.valid, baseline, scale, clip=clip, noise=noise)  # type: ignore[arg-type]
        for column, _, noise in signals
    ]
    weights = torch.stack([weight for _, weight, _ in signals])
    return (torch.stack(parts, 1) * weights).sum(1) / weights.abs().sum()


def evenly_dealt(engine: Engine, experience: Experience, weight: Tensor) -> Experience:
    """The rows worth a forward, the same number on every rank; what is missing is filled up with weight 0.

    Groups are left out and drawn anew wherever they lay: without dealing, the rank with the most rows left would set
    the number of forwards of all.

    Args:
        experience: n rows of this rank.
        weight: [N] of all ranks' rows.
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

    result = Experience(**{name: dealt(t) if len(t) else t for name, t in experience.tensors().items()})
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


def restored(kind: type[Rows], tensors: Mapping[str, Tensor]) -> Rows:
    """Rows of an epoch from a checkpoint inside it.

    Raises:
        CheckpointError: tensors of another algorithm or version.
    """
    names = {f.name for f in fields(kind)}
    if names != tensors.keys():
        raise CheckpointError(
            f"rollouts.safetensors holds {', '.join(sorted(tensors))}, but this algorithm goes on with "
            f"{', '.join(sorted(names))}; resume from a checkpoint without rollouts.safetensors"
        )
    return kind(**tensors)


def rows_of_all(engine: Engine, values: Tensor, rows: Sequence[int]) -> Tensor:
    """Some of all ranks' rows [M, ...] on the CPU, the same on every rank; only they travel.

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


TrainStep = Callable[[Tensor], tuple[dict[str, float], bool]]
"""Rows of an epoch -> metrics of one optimizer step on them, and whether the weights changed."""


def train_epoch(
    session: Session,
    rows: int,
    tensors: Callable[[], Mapping[str, Tensor]],
    train_step: TrainStep,
    after: Callable[[], None] = lambda: None,
) -> None:
    """Every optimizer step on an epoch of `rows` rows that has not been taken yet.

    Args:
        tensors: the epoch's rows, for a checkpoint inside it.
        after: called once the last step of the epoch is taken, before anything is evaluated or saved.
    """
    config, progress = session.run.config, session.progress
    steps, inner = session.run.derived.optimizer_steps_per_epoch, config.algorithm.inner_epochs  # type: ignore[union-attr]
    batches = step_batches(rows, config.seed, progress.epoch, inner, steps)
    for batch in batches[progress.position :]:
        if progress.step >= config.training.max_steps:
            return
        values, updated = train_step(batch)
        epoch = progress.epoch
        progress.position += 1
        progress.updates_in_epoch += updated
        finished = progress.position == len(batches)
        if finished:
            after()
            progress.epoch, progress.position, progress.updates_in_epoch = progress.epoch + 1, 0, 0
        session.end_step(values, updated=updated, rollouts=None if finished else tensors(), epoch=epoch)


def step_batches(rows: int, seed: int, epoch: int, inner_epochs: int, steps: int) -> list[Tensor]:
    """Row indices of each optimizer step of an epoch: every inner epoch is shuffled from (seed, epoch, inner) and dealt
    evenly into its steps."""
    batches: list[Tensor] = []
    for inner in range(inner_epochs):
        order = list(range(rows))
        Random(derive_seed(seed, "order", epoch, inner)).shuffle(order)
        batches += list(torch.tensor(order, dtype=torch.long).tensor_split(steps // inner_epochs))
    return batches


def row_generators(seeds: Sequence[int] | Tensor, *parts: int | str) -> list[torch.Generator]:
    """A generator for each row's draws of a step, from its own seed and what names the step."""
    return [torch.Generator().manual_seed(derive_seed(int(seed), *parts)) for seed in seeds]
