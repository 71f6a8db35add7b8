"""An epoch of rollouts with their rewards and advantages: sampled in batches, scored while the next batch is sampled,
dealt evenly to the processes, and kept until it is trained on.

Legend: n samples of this process, N of all processes in rank order, S trained steps (0 if only clean images are trained
on).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Literal

import torch
from PIL.Image import Image
from torch import Tensor

from retouch.algorithms.base import AdvantageConfig, RlConfig
from retouch.core.advantages import RewardRows, comparable_rows, group_count
from retouch.data.sampler import (
    Slot,
    curriculum_examples,
    curriculum_pool,
    derive_seed,
    other_examples,
    rank_slots,
)
from retouch.engine import Engine
from retouch.observe.grids import grid
from retouch.rollout.sampler import broken_rows, objective_region, sample, to_uint8
from retouch.training.build import Run
from retouch.training.pixel_gradients import pulls
from retouch.training.scoring import (
    PendingBatch,
    RewardOutage,
    gather_rewards,
    items_of,
    judge_statistics,
    raise_together,
    refuse_failures,
    rewards_of,
    settle,
    tally_of,
    without_strip,
)
from retouch.training.session import Rows, Session
from retouch.types import Scores, Trajectory


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
    engine = session.run.engine
    rollouts, rewards = rewarded_groups(session, algorithm, policy)
    advantages, weight = advantages_of(rewards, algorithm)
    n = len(weight) // engine.world_size
    mine = slice(engine.rank * n, (engine.rank + 1) * n)
    experience = recorded(rollouts)
    experience.advantages, experience.weight = advantages[mine], weight[mine]
    items = [item for batch in rollouts.batches for item in batch.items]
    x0 = experience.latents[:, -1]
    experience.gradient = pulls(session, algorithm, items, experience.position, x0, experience.weight)
    return evenly_dealt(engine, experience, weight)


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


def advantages_of(rewards: RewardRows, algorithm: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """Advantages and weights of all processes' rows -> ([N], [N]) fp32."""
    weight = comparable_rows(rewards.position, rewards.usable, algorithm.baseline)
    if algorithm.skip_zero_std_groups and algorithm.baseline == "group":
        weight = weight & ~rewards.flat(algorithm.combine)
    how = (algorithm.combine, algorithm.baseline, algorithm.scale, algorithm.advantage_clip)
    return rewards.advantages(*how).float(), weight.float()


# --- sampling ---


@dataclass
class Rollouts:
    """This process's samples: slots, their seeds, their trajectories, and what scores them."""

    slots: list[Slot]
    seeds: list[int]
    trajectories: list[Trajectory]
    batches: list[PendingBatch]
    scores: list[Scores]

    def __add__(self, other: Rollouts) -> Rollouts:
        return Rollouts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


def rewarded_groups(session: Session, algorithm: RlConfig, policy: str | None) -> tuple[Rollouts, RewardRows]:
    """An epoch's samples with their rewards.

    Groups without a signal (zero reward variance, or fewer than two rewards that did not fail) are followed by new
    ones, for up to `resample_rounds` rounds (DAPO, arXiv 2503.14476); every process decides the same.

    Args:
        policy: snapshot that samples; None is the current policy.

    Raises:
        RewardOutage, FailureRateExceeded: on every process.
    """
    run, config, epoch = session.run, session.run.config, session.progress.epoch
    session.probe_rewards()
    chosen = epoch_examples(session)
    wanted = config.rollout.global_groups_per_batch * config.rollout.batches_per_epoch
    pool = curriculum_pool(run.data.difficulties, epoch, run.derived.epochs, run.data.stages)
    too_hard = set(range(len(run.data))) - set(pool)
    rollouts, more, again = Rollouts([], [], [], [], []), chosen, 0
    while True:
        rollouts += sample_and_score(session, algorithm, more, policy)
        padding = [slot.padding for slot in rollouts.slots]
        tally = tally_of(run.rewards, rollouts.scores, padding)
        refuse_failures(run.engine.gather_list([tally]), config.reward_client)
        own = rewards_of(run.rewards.trained, rollouts.scores)
        position, index = (torch.tensor(column) for column in zip(*((s.example, s.index) for s in rollouts.slots)))
        rewards = gather_rewards(run.engine, run.rewards, own, position, index, torch.tensor(padding))
        if again == algorithm.resample_rounds:
            break
        signal = comparable_rows(rewards.position, rewards.usable) & ~rewards.flat(algorithm.combine)
        missing = wanted - group_count(rewards.position[signal])
        taken = too_hard.union(chosen)
        more = other_examples(len(run.data), taken, missing, config.seed, epoch, again) if missing > 0 else []
        if not more:
            break
        chosen, again = chosen + more, again + 1
    run.rewards.count(tally.asked, tally.lost)
    statistics = {**rewards.statistics(algorithm.combine), **judge_statistics(run.engine, rewards.names, own.judged)}
    log_rollouts(session, rollouts, statistics)
    return rollouts, rewards


def epoch_examples(session: Session) -> list[int]:
    """Positions in the dataset of the examples that an epoch begins with."""
    run, config, epoch = session.run, session.run.config, session.progress.epoch
    wanted = config.rollout.global_groups_per_batch * config.rollout.batches_per_epoch
    return curriculum_examples(run.data.difficulties, wanted, config.seed, epoch, run.derived.epochs, run.data.stages)


def sample_and_score(session: Session, algorithm: RlConfig, examples: Sequence[int], policy: str | None) -> Rollouts:
    """`sample_groups`, with their rewards.

    Raises:
        RewardOutage: on every process.
        Stopped: asked to stop between batches.
    """
    run = session.run
    result = sample_groups(session, algorithm, examples, policy)
    result.scores = settle_together(run, result.batches)
    return result


def settle_together(run: Run, batches: Sequence[PendingBatch]) -> list[Scores]:
    """The scores of batches of this process.

    Raises:
        RewardOutage: on every process.
    """
    scores, stopped = list[Scores](), None
    with run.clock.part("reward_wait"):
        try:
            scores = settle(run.rewards, batches, run.config.reward_client)
        except RewardOutage as error:
            stopped = error
    raise_together(stopped, run.engine.any)
    return scores


def sample_groups(
    session: Session, algorithm: RlConfig, examples: Sequence[int], policy: str | None, *, by_group: bool = False
) -> Rollouts:
    """K samples of each example, this process's share of them, submitted for scoring.

    Args:
        examples: positions in the dataset, a whole number of rollout batches or less.
        by_group: submit the samples of each example apart, whose scores may then come before those of others.

    Raises:
        Stopped: asked to stop between batches.
    """
    run, rollout = session.run, session.run.config.rollout
    groups = rollout.global_groups_per_batch
    batches = [
        rank_slots(list(examples[i : i + groups]), rollout.group_size, run.engine.rank, run.engine.world_size)
        for i in range(0, len(examples), groups)
    ]
    # all encoding before any scoring, which may run on the same CPU
    run.encoded.conditions(sorted({slot.example for batch in batches for slot in batch}), run.engine.device)
    result = Rollouts([], [], [], [], [])
    for number, batch in enumerate(batches, session.progress.epoch * rollout.batches_per_epoch):
        for start in range(0, len(batch), rollout.batch_size_per_device):
            session.check_stop()
            slots = batch[start : start + rollout.batch_size_per_device]
            with run.policy.use(policy) if policy else nullcontext():
                result += roll_out(session, algorithm, slots, number, by_group)
    return result


def roll_out(session: Session, algorithm: RlConfig, slots: Sequence[Slot], number: int, by_group: bool) -> Rollouts:
    """Sample slots of rollout batch `number` and submit their images for scoring; scores are not in yet."""
    run, config, device = session.run, session.run.config, session.run.engine.device
    epoch = session.progress.epoch
    examples = run.encoded.examples([s.example for s in slots])
    condition = run.encoded.conditions([s.example for s in slots], device)
    plan = run.plans.plan(run.model.schedule(config.rollout.num_steps, condition.size), number)
    seeds = [derive_seed(config.seed, "rollout", e.id, epoch, s.index) for e, s in zip(examples, slots, strict=True)]
    shared = [derive_seed(config.seed, "noise", e.id, epoch) for e in examples] if config.rollout.shared_noise else None
    region = objective_region(algorithm, condition, run.model.spec.downsampling)
    mode, means = run.plans.log_prob_mode, run.plans.records_means
    with run.clock.part("rollout"):
        trajectory = sample(run.model, run.network, plan, condition, seeds, shared, region, mode, keep_means=means)
    with run.clock.part("vae"):
        decoded = run.model.decode(trajectory.final)
        images = without_strip(to_uint8(decoded), examples)
        broken = broken_rows(decoded, trajectory.log_probs.to(decoded.device))
    run.costs.images += len(slots)
    items = items_of(examples, images, [e.id for e in examples])
    batches: list[PendingBatch] = []
    for rows in group_ranges(slots) if by_group else [range(len(slots))]:
        mine = items[rows.start : rows.stop]
        batches.append(
            PendingBatch(mine, run.rewards.submit(mine), [row - rows.start for row in broken if row in rows])
        )
    return Rollouts(list(slots), seeds, [zeroed(trajectory, broken)], batches, [])


def group_ranges(slots: Sequence[Slot]) -> list[range]:
    """The rows of each example, which follow each other."""
    starts = [i for i, slot in enumerate(slots) if not i or slot.example != slots[i - 1].example]
    return [range(a, b) for a, b in zip(starts, [*starts[1:], len(slots)], strict=True)]


def zeroed(trajectory: Trajectory, rows: Sequence[int]) -> Trajectory:
    """Zeros in place of NaN and Inf: such rows have weight 0, but NaN times 0 is NaN in a backward."""
    if not rows:
        return trajectory
    tensors = {name: t.clone() for name, t in vars(trajectory).items() if isinstance(t, Tensor) and name != "times"}
    for tensor in tensors.values():
        tensor[list(rows)] = 0.0
    return replace(trajectory, **tensors)


def log_rollouts(session: Session, rollouts: Rollouts, statistics: dict[str, float]) -> None:
    """Log statistics and, every `rollout_images_every` epochs, an image of the groups. Inside an epoch they belong to
    the step before, or a run that is resumed after it would lose them."""
    run, progress = session.run, session.progress
    epoch, step = progress.epoch, progress.step + (progress.position == 0)
    timings = run.rewards.statistics()  # differ from run to run
    run.dir.log("rollout", step, {"epoch": epoch, **statistics}, timings or None)
    every = run.config.logging.rollout_images_every
    if every and epoch % every == 0:
        run.dir.save_image(step, "rollouts", rollout_grid(rollouts, run.config.rollout.group_size))


def rollout_grid(rollouts: Rollouts, group_size: int, groups: int = 6) -> Image:
    """The first groups of an epoch, one a row, each image with its combined score."""
    cells = [
        (item.image, "failed" if score is None else f"{score:.2f}")
        for batch, s in zip(rollouts.batches, rollouts.scores, strict=True)
        for item, score in zip(batch.items, s.combined(), strict=True)
    ]
    rows = [cells[i : i + group_size] for i in range(0, len(cells), group_size)]
    return grid(rows[:groups])


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
