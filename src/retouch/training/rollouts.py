"""Samples of an epoch with their rewards: sampled in batches, scored while the next batch is sampled, followed by
new groups for those with zero reward variance, logged."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace

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
from retouch.observe.grids import grid
from retouch.rewards.protocol import RewardItem
from retouch.rollout.sampler import broken_rows, objective_region, sample, to_uint8
from retouch.training.build import Run
from retouch.training.scoring import (
    PendingBatch,
    RewardOutage,
    Tally,
    arrived,
    gather_rewards,
    items_of,
    judge_statistics,
    raise_together,
    refuse_failures,
    rewards_of,
    settle,
    submitted,
    tally_of,
    without_strip,
)
from retouch.training.session import Session
from retouch.types import Scores, Trajectory

LOOK_S = 1.0
"""Seconds between two looks at requests to stop, while rewards are computed."""


@dataclass
class Rollouts:
    """This process's samples: slots, their seeds, their trajectories, and the scoring of those that are no padding."""

    slots: list[Slot]
    seeds: list[int]
    trajectories: list[Trajectory]
    batches: list[PendingBatch]
    scores: list[Scores]

    @property
    def items(self) -> list[RewardItem | None]:
        """The scorers' input for each slot; None for padding."""
        return [item for batch in self.batches for item in (*batch.items, *[None] * batch.padding)]

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
    wanted = run.derived.global_groups_per_epoch
    pool = curriculum_pool(run.data.difficulties, epoch, run.derived.epochs, run.data.stages)
    too_hard = set(range(len(run.data))) - set(pool)
    rollouts, more, again = Rollouts([], [], [], [], []), chosen, 0
    while True:
        rollouts += sample_and_score(session, algorithm, more, policy)
        tally = accepted(run, rollouts.scores)
        rewards = gathered(run, rollouts.slots, rollouts.scores)
        if again == algorithm.resample_rounds:
            break
        signal = comparable_rows(rewards.position, rewards.usable) & ~rewards.flat(algorithm.combine)
        missing = wanted - group_count(rewards.position[signal])
        taken = too_hard.union(chosen)
        more = other_examples(len(run.data), taken, missing, config.seed, epoch, again) if missing > 0 else []
        if not more:
            break
        chosen, again = chosen + more, again + 1
    log_rollouts(session, algorithm, rollouts, rewards, tally)
    return rollouts, rewards


def advantaged_groups(
    session: Session, algorithm: AdvantageConfig, policy: str | None
) -> tuple[Rollouts, Tensor, Tensor]:
    """An epoch's samples -> (samples, their advantages [n], weights of the rows of all processes [N]), see
    `rewarded_groups`."""
    rollouts, rewards = rewarded_groups(session, algorithm, policy)
    return rollouts, *advantages_of(session.run, algorithm, rewards)


def advantages_of(run: Run, algorithm: AdvantageConfig, rewards: RewardRows) -> tuple[Tensor, Tensor]:
    """(Advantages [n] of this process's rows, weights [N] of the rows of all processes).

    Args:
        rewards: of the rows of all processes, each with as many.
    """
    weight = comparable_rows(rewards.position, rewards.usable, algorithm.baseline)
    if algorithm.skip_zero_std_groups and algorithm.baseline == "group":
        weight = weight & ~rewards.flat(algorithm.combine)
    how = (algorithm.combine, algorithm.baseline, algorithm.scale, algorithm.advantage_clip)
    advantages = rewards.advantages(*how).float().tensor_split(run.engine.world_size)
    return advantages[run.engine.rank], weight.float()


def accepted(run: Run, scores: Sequence[Scores]) -> Tally:
    """The tally of this process's samples of an epoch so far.

    Raises:
        FailureRateExceeded: too many of all processes failed; on every process.
    """
    tally = tally_of(run.rewards, scores)
    refuse_failures(run.engine.gather_list([tally]), run.config.reward_client)
    return tally


def gathered(run: Run, slots: Sequence[Slot], scores: Sequence[Scores]) -> RewardRows:
    """Rewards of some samples of all processes. Those with fewer samples than others add rows of padding.

    Args:
        scores: of the slots that are not padding.
    """
    own = rewards_of(run.rewards.trained, scores)
    missing = max(run.engine.gather_list([len(slots)])) - len(slots)
    filled = [*slots, *[Slot(0, 0, padding=True)] * missing]
    real = torch.tensor([row for row, slot in enumerate(filled) if not slot.padding], dtype=torch.int64)
    values, valid = (t.new_zeros(len(filled), t.shape[1]).index_copy(0, real, t) for t in (own.values, own.valid))
    position, index = (
        torch.tensor([getattr(s, name) for s in filled], dtype=torch.int64) for name in ("example", "index")
    )
    padding = torch.tensor([s.padding for s in filled], dtype=torch.bool)
    return gather_rewards(run.engine, run.rewards, replace(own, values=values, valid=valid), position, index, padding)


def epoch_examples(session: Session) -> list[int]:
    """Positions in the dataset of the examples that an epoch begins with."""
    run, epoch = session.run, session.progress.epoch
    wanted, stages = run.derived.global_groups_per_epoch, run.data.stages
    return curriculum_examples(run.data.difficulties, wanted, run.config.seed, epoch, run.derived.epochs, stages)


def sample_and_score(session: Session, algorithm: RlConfig, examples: Sequence[int], policy: str | None) -> Rollouts:
    """`sample_groups`, with their rewards.

    Raises:
        RewardOutage: on every process.
        Stopped: asked to stop between batches, or while rewards are computed.
    """
    result = sample_groups(session, algorithm, examples, policy)
    await_rewards(session, result.batches)
    result.scores = settle_together(session, result.batches)
    return result


def await_rewards(session: Session, batches: Sequence[PendingBatch]) -> None:
    """Until the rewards of all processes are in, looking for requests to stop: a judge may take minutes.

    Raises:
        Stopped: asked to stop.
    """
    while True:
        with session.run.clock.part("reward_wait"):
            late = session.run.engine.any(not arrived(batches, LOOK_S))
        if not late:
            return
        session.check_stop()


def settle_together(session: Session, batches: Sequence[PendingBatch]) -> list[Scores]:
    """The scores of batches of this process.

    Raises:
        RewardOutage: on every process.
    """
    run, scores, stopped = session.run, list[Scores](), None
    with run.clock.part("reward_wait"):
        try:
            scores = settle(run.rewards, batches, run.config.reward_client, stop_heard=session.stop_heard)
        except RewardOutage as error:
            stopped = error
    raise_together(stopped, run.engine.any)
    return scores


def sample_groups(session: Session, algorithm: RlConfig, examples: Sequence[int], policy: str | None) -> Rollouts:
    """K samples of each example, this process's share of them, submitted for scoring.

    Args:
        examples: positions in the dataset, a whole number of rollout batches or less.

    Raises:
        Stopped: asked to stop between batches.
    """
    run, rollout = session.run, session.run.config.rollout
    groups, engine = rollout.global_groups_per_batch, run.engine
    share = rollout.group_size, engine.rank, engine.world_size, run.rewards.compares_groups
    batches = [rank_slots(list(examples[i : i + groups]), *share) for i in range(0, len(examples), groups)]
    # all encoding before any scoring, which may run on the same CPU
    run.encoded.conditions(sorted({slot.example for batch in batches for slot in batch}), run.engine.device)
    result = Rollouts([], [], [], [], [])
    for number, batch in enumerate(batches, session.progress.epoch * rollout.batches_per_epoch):
        for start in range(0, len(batch), rollout.batch_size_per_device):
            session.check_stop()
            slots = batch[start : start + rollout.batch_size_per_device]
            with run.policy.use(policy) if policy else nullcontext():
                result += roll_out(session, algorithm, slots, number)
    return result


def roll_out(session: Session, algorithm: RlConfig, slots: Sequence[Slot], number: int) -> Rollouts:
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
    batch = submitted(run.rewards, items, broken, sum(slot.padding for slot in slots))
    return Rollouts(list(slots), seeds, [kept(trajectory, broken)], [batch], [])


def kept(trajectory: Trajectory, broken: Sequence[int]) -> Trajectory:
    """A trajectory until its epoch is trained on: on the CPU, where everything reads it, and zeros in place of rows
    with NaN and Inf: they have weight 0, but NaN times 0 is NaN in a backward."""
    tensors = {name: t.cpu() for name, t in vars(trajectory).items() if isinstance(t, Tensor) and name != "times"}
    if broken:
        tensors = {name: t.clone() for name, t in tensors.items()}
        for tensor in tensors.values():
            tensor[list(broken)] = 0.0
    return replace(trajectory, **tensors)


def log_rollouts(session: Session, algorithm: RlConfig, rollouts: Rollouts, rewards: RewardRows, tally: Tally) -> None:
    """Count and log an epoch, all of whose rewards are in, and every `rollout_images_every` epochs an image of the
    groups. Inside an epoch they belong to the step before, or a run that is resumed after it would lose them."""
    run, progress = session.run, session.progress
    run.rewards.count(tally.asked, tally.lost)
    judged = rewards_of(run.rewards.trained, rollouts.scores).judged
    statistics = rewards.statistics(algorithm.combine) | judge_statistics(run.engine, rewards.names, judged)
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
