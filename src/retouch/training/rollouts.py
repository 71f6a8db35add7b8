"""Images of an epoch and their rewards: sampled in batches, scored while the next batch is sampled, gathered.

Legend: n rows of this rank, N rows of all ranks in rank order, R rewards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from PIL.Image import Image
from torch import Tensor

from retouch.algorithms.base import RlConfig
from retouch.algorithms.grpo.config import GrpoConfig
from retouch.core.advantages import comparable_rows, win_rates, zero_std_rows
from retouch.data.sampler import (
    Slot,
    derive_seed,
    rank_slots,
)
from retouch.observe.grids import grid
from retouch.rollout.encoded import EncodedData
from retouch.rollout.plan import make_plan
from retouch.rollout.sampler import (
    broken_rows,
    sample,
    to_uint8,
)
from retouch.rollout.scorer import (
    PendingBatch,
    RewardOutage,
    Tally,
    items_of,
    refuse_failures,
    settle,
    tally_of,
    without_strip,
)
from retouch.rollout.transition import objective_region
from retouch.training.build import Run
from retouch.training.session import Session
from retouch.types import Score, Scores, Trajectory


@dataclass
class Rollouts:
    """This rank's images: slots, the seeds they were drawn from, their paths and what they scored."""

    slots: list[Slot]
    seeds: list[int]
    trajectories: list[Trajectory]
    batches: list[PendingBatch]
    scores: list[Scores]

    def __add__(self, other: Rollouts) -> Rollouts:
        return Rollouts(
            self.slots + other.slots,
            self.seeds + other.seeds,
            self.trajectories + other.trajectories,
            self.batches + other.batches,
            self.scores + other.scores,
        )


@dataclass
class RewardRows:
    """Rewards of all ranks' rows.

    Attributes:
        names: R reward names, in the order of the run file.
        values: [N, R] float64, NaN where a reward failed.
        weights: [R]; one of weight 0 is only logged.
        position: [N] int64 of each row's example in the data set: the key of its group.
        index: [N] int64 within the group.
        valid: [N] bool; false for padding and rows on which a reward with a weight failed.
        padding: [N] bool.
        noise: [R] standard deviation of each reward on one picture; none where None.
        relative: [R] bool: rewards that train by their win rate in the group; none where None.
    """

    names: list[str]
    values: Tensor
    weights: Tensor
    position: Tensor
    index: Tensor
    valid: Tensor
    padding: Tensor
    noise: Tensor | None = None
    relative: Tensor | None = None

    @property
    def counted(self) -> Tensor:
        """[R] bool: rewards with a weight."""
        return self.weights != 0

    @property
    def combined(self) -> Tensor:
        """[N] weighted sums of the values; 0 where not valid."""
        return self._weighted(self.values)

    def signals(self, combine: str) -> list[tuple[Tensor, Tensor, float]]:
        """What becomes advantages: ([N] signal, its weight, its noise) of each counted reward, or of their weighted sum
        where that is what is normalised, or all there is.

        The signal is the value, or the win rate among the valid rows of the group, in which its noise is a tie. Noises
        of a sum are taken as independent.
        """
        count = len(self.names)
        noise = [0.0] * count if self.noise is None else self.noise.tolist()
        relative = [False] * count if self.relative is None else self.relative.tolist()
        columns = self.values.clone()
        for i in range(count):
            if relative[i]:
                columns[:, i] = win_rates(self.values[:, i], self.position, self.valid, noise[i])
                noise[i] = 0.0
        counted = self.counted.nonzero().flatten().tolist()
        if combine == "sum_then_normalize" or len(counted) == 1:
            total = math.hypot(*(float(self.weights[i]) * noise[i] for i in counted))
            return [(self._weighted(columns), torch.ones((), dtype=torch.float64), total)]
        return [(columns[:, i], self.weights[i], noise[i]) for i in counted]

    def flat(self, combine: str) -> Tensor:
        """[N] bool: valid rows of groups without a signal: each reward (or their sum, if that is what is normalised) is
        the same for all of the group, or differs by its noise."""
        columns = self.signals(combine)
        return torch.stack([zero_std_rows(c, self.position, self.valid, noise=n) for c, _, n in columns]).all(0)

    def _weighted(self, columns: Tensor) -> Tensor:
        return (torch.where(self.valid[:, None] & self.counted, columns, 0.0) * self.weights).sum(1)

    def of_rank(self, rank: int, world_size: int) -> slice:
        n = len(self.valid) // world_size
        return slice(rank * n, (rank + 1) * n)


def sample_and_score(
    session: Session, data: EncodedData, algorithm: RlConfig, examples: Sequence[int], policy: str | None
) -> Rollouts:
    """K images of each example, this rank's share of them, with their rewards.

    Args:
        examples: positions in the data set, a whole number of rollout batches or less.
        policy: snapshot that samples; None is the current policy.

    Raises:
        RewardOutage: nothing of the epoch was trained on.
        Stopped: asked to stop between batches.
    """
    run, rollout = session.run, session.run.config.rollout
    groups = rollout.global_groups_per_batch
    batches = [
        rank_slots(list(examples[i : i + groups]), rollout.group_size, run.engine.rank, run.engine.world_size)
        for i in range(0, len(examples), groups)
    ]
    # all encoding before any scoring, which may run on the same CPU
    data.conditions(sorted({slot.example for batch in batches for slot in batch}), run.engine.device)
    result = Rollouts([], [], [], [], [])
    for number, batch in enumerate(batches, session.progress.epoch * rollout.batches_per_epoch):
        for start in range(0, len(batch), rollout.batch_size_per_device):
            session.check_stop()
            part = batch[start : start + rollout.batch_size_per_device]
            with run.policy.use(policy):
                result += roll_out(session, data, algorithm, part, number)
    stopped: RewardOutage | None = None
    with run.clock.part("reward_wait"):
        try:
            result.scores = settle(run.rewards, result.batches, run.config.reward_client)
        except RewardOutage as error:
            stopped = error
    if run.engine.any(stopped is not None):  # all ranks stop together, or the others would wait for this one for ever
        raise stopped or RewardOutage("rewards failed on another process; see its log")
    return result


def roll_out(session: Session, data: EncodedData, algorithm: RlConfig, slots: Sequence[Slot], number: int) -> Rollouts:
    """Sample slots of rollout batch `number` and submit their images for scoring; scores are not in yet."""
    run, config, device = session.run, session.run.config, session.run.engine.device
    epoch = session.progress.epoch
    examples = data.examples([s.example for s in slots])
    condition = data.conditions([s.example for s in slots], device)
    plan = make_plan(config, run.model.schedule(config.rollout.num_steps, condition.size), number)
    seeds = [derive_seed(config.seed, "rollout", e.id, epoch, s.index) for e, s in zip(examples, slots, strict=True)]
    shared = [derive_seed(config.seed, "noise", e.id, epoch) for e in examples] if config.rollout.shared_noise else None
    region = objective_region(algorithm, condition, run.model.spec.downsampling)
    mode, guard = (algorithm.log_prob_mode, algorithm.guard) if isinstance(algorithm, GrpoConfig) else ("exact", False)
    with run.clock.part("rollout"):
        trajectory = sample(run.model, run.network, plan, condition, seeds, shared, region, mode, keep_means=guard)
    with run.clock.part("vae"):
        decoded = run.model.decode(trajectory.final)
        images = without_strip(to_uint8(decoded), examples)
        broken = broken_rows(decoded, trajectory.log_probs.to(decoded.device))
    run.costs.images += len(slots)
    items = items_of(examples, images, [e.id for e in examples])
    batch = PendingBatch(items, run.rewards.submit(items), broken)
    return Rollouts(list(slots), seeds, [zeroed(trajectory, broken)], [batch], [])


def zeroed(trajectory: Trajectory, rows: Sequence[int]) -> Trajectory:
    """Zeros in place of what is not finite: such rows have weight 0, but NaN times 0 is NaN in a backward."""
    if not rows:
        return trajectory
    tensors = {name: t.clone() for name, t in vars(trajectory).items() if isinstance(t, Tensor) and name != "times"}
    for tensor in tensors.values():
        tensor[list(rows)] = 0.0
    return replace(trajectory, **tensors)


def tally(run: Run, rollouts: Rollouts) -> Tally:
    """This rank's images of an epoch, all of its rounds together.

    Raises:
        FailureRateExceeded: on every rank, where too many of all of them lack a reward.
    """
    own = tally_of(run.rewards, rollouts.scores, [slot.padding for slot in rollouts.slots])
    refuse_failures(run.engine.gather_list([own]), run.config.reward_client)
    return own


def gather_rewards(run: Run, rollouts: Rollouts) -> RewardRows:
    """Rewards of every rank's rows, the same on every rank."""
    names = run.rewards.trained
    local = [[v for s in rollouts.scores for v in s.values(name)] for name in names]
    counted = [column for name, column in zip(names, local, strict=True) if run.rewards.weights[name]]
    failed = torch.tensor([any(column[i] is None for column in counted) for i in range(len(rollouts.slots))])
    padding = torch.tensor([s.padding for s in rollouts.slots])
    values = torch.tensor([[math.nan if v is None else v for v in column] for column in local], dtype=torch.float64).T
    position = torch.tensor([s.example for s in rollouts.slots])
    index = torch.tensor([s.index for s in rollouts.slots])
    gathered = [run.engine.gather(t).cpu() for t in (values, position, index, ~(failed | padding), padding)]
    weights = torch.tensor([run.rewards.weights[name] for name in names], dtype=torch.float64)
    entries = [run.rewards.entries[name] for name in names]
    noise = torch.tensor([entry.min_group_std for entry in entries], dtype=torch.float64)
    relative = torch.tensor([entry.transform == "win_rate" for entry in entries])
    return RewardRows(names, gathered[0], weights, *gathered[1:], noise=noise, relative=relative)


def reward_statistics(rewards: RewardRows, combine: str) -> dict[str, float]:
    """What is logged of the rewards of an epoch, over all ranks."""
    asked, valid = ~rewards.padding, rewards.valid
    statistics = {"images": float(asked.sum()), "failed": float((asked & ~valid).sum())}
    for i in (~rewards.counted).nonzero().flatten().tolist():  # their failures make no row invalid
        failed = float((asked & rewards.values[:, i].isnan()).sum())
        statistics |= {f"failed/{rewards.names[i]}": failed} if failed else {}
    if bool(valid.any()):
        combined = rewards.combined[valid]
        for i, name in enumerate(rewards.names):
            scored = valid & ~rewards.values[:, i].isnan()
            if bool(scored.any()):
                statistics[f"reward/{name}"] = float(rewards.values[scored, i].mean())
        statistics["combined_score"] = float(combined.mean())
        statistics["combined_std"] = float(combined.std(unbiased=False))
        compared = comparable_rows(rewards.position, valid)
        if bool(compared.any()):  # a group of one image has no std
            flat = rewards.position[compared & rewards.flat(combine)].unique().numel()
            statistics["zero_std_groups"] = flat / rewards.position[compared].unique().numel()
    return statistics


def judge_masses(run: Run, rollouts: Rollouts) -> dict[str, float]:
    """Mean probability that judges gave their score tokens, over all ranks, of the rewards that say it."""
    names = run.rewards.trained
    found = torch.zeros(len(names), 2, dtype=torch.float64)
    for scores in rollouts.scores:
        for i, name in enumerate(names):
            for outcome in scores.outcomes[name]:
                if isinstance(outcome, Score) and isinstance(outcome.detail.get("mass"), float):
                    found[i] += torch.tensor([outcome.detail["mass"], 1.0], dtype=torch.float64)
    totals = run.engine.sum(found).cpu().tolist()
    return {f"judge_mass/{n}": mass / count for n, (mass, count) in zip(names, totals, strict=True) if count}


def log_rollouts(session: Session, algorithm: RlConfig, rollouts: Rollouts, rewards: RewardRows) -> None:
    """Statistics, and now and then a picture of the groups."""
    run, epoch, step = session.run, session.progress.epoch, session.progress.step + 1
    told = run.rewards.statistics()  # differs from run to run, as times do
    statistics = {**reward_statistics(rewards, algorithm.combine), **judge_masses(run, rollouts)}
    run.dir.log("rollout", step, {"epoch": epoch, **statistics}, told or None)
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
