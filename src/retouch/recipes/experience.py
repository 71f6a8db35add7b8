"""An epoch of rollouts with their advantages: sampled, scored, compared, and kept until they are trained on.

Rewards of one batch are computed while the next is sampled. Legend: n rows of this rank, S trained steps, K a group.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from random import Random

import torch
from PIL.Image import Image
from torch import Tensor

from retouch.build import Run
from retouch.config.schema import GrpoConfig, RunConfig
from retouch.core.advantages import comparable_rows, group_advantages, zero_std_rows
from retouch.data import Slot, derive_seed, epoch_examples, rank_slots
from retouch.observe.grids import grid
from retouch.recipes.session import Session
from retouch.rollout import (
    EncodedData,
    PendingBatch,
    items_of,
    latent_region,
    make_plan,
    sample,
    settle,
    to_uint8,
    transition,
)
from retouch.types import Scores, Trajectory

logger = logging.getLogger(__name__)


@dataclass
class Experience:
    """Rows to train on, on the CPU.

    Attributes:
        position: [n] of each row's example in the data set.
        first_step: [n] index of the first trained step.
        latents: [n, S + 1, C, H, W] fp32.
        log_probs: [n, S] as recorded while sampling.
        advantages: [n].
        weight: [n]: 1, or 0 for padding and rows without a usable reward.
        means: [n, S, C, H, W] of the reference policy; [0] where no KL is asked for.
    """

    position: Tensor
    first_step: Tensor
    latents: Tensor
    log_probs: Tensor
    advantages: Tensor
    weight: Tensor
    means: Tensor

    @property
    def steps(self) -> int:
        """S."""
        return self.log_probs.shape[1]

    def tensors(self) -> dict[str, Tensor]:
        """For a checkpoint inside the epoch."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def restore(cls, tensors: Mapping[str, Tensor]) -> Experience:
        return cls(**tensors)

    def select(self, rows: Tensor) -> Experience:
        means = self.means[rows] if len(self.means) else self.means
        kept = {f.name: getattr(self, f.name)[rows] for f in fields(self) if f.name != "means"}
        return Experience(**kept, means=means)

    def transitions(self, rows: Tensor, span: range) -> tuple[Tensor, Tensor, Tensor]:
        """(x, x_next [B · W, C, H, W], step [B · W]) of rows over a span of trained steps, row-major."""
        states = self.latents[rows]
        x = states[:, span.start : span.stop].flatten(0, 1)
        x_next = states[:, span.start + 1 : span.stop + 1].flatten(0, 1)
        step = self.first_step[rows][:, None] + torch.arange(span.start, span.stop)
        return x, x_next, step.flatten()

    def reference_means(self, rows: Tensor, span: range) -> Tensor:
        """[B · W, C, H, W]."""
        return self.means[rows][:, span.start : span.stop].flatten(0, 1)

    def step_batches(self, seed: int, epoch: int, inner_epochs: int, steps: int) -> list[Tensor]:
        """Row indices of each optimizer step of the epoch: every inner epoch is shuffled from (seed, epoch, inner) and
        dealt evenly into its steps."""
        batches: list[Tensor] = []
        for inner in range(inner_epochs):
            order = list(range(len(self.weight)))
            Random(derive_seed(seed, "order", epoch, inner)).shuffle(order)
            batches += list(torch.tensor(order, dtype=torch.long).tensor_split(steps // inner_epochs))
        return batches


def collect(session: Session, data: EncodedData, algorithm: GrpoConfig) -> Experience:
    """Sample an epoch, score it, turn rewards into advantages.

    Raises:
        RewardOutage, FailureRateExceeded: nothing of the epoch was trained on.
        Stopped: asked to stop between batches.
    """
    run, config, epoch = session.run, session.run.config, session.progress.epoch
    rollout = config.rollout
    groups = rollout.global_groups_per_batch
    chosen = epoch_examples(len(run.data), groups * rollout.batches_per_epoch, config.seed, epoch)
    batches = [
        rank_slots(chosen[i : i + groups], rollout.group_size, run.engine.rank, run.engine.world_size)
        for i in range(0, len(chosen), groups)
    ]
    # all encoding before any scoring, which may run on the same CPU
    data.conditions(sorted({slot.example for batch in batches for slot in batch}), run.engine.device)
    slots: list[Slot] = []
    first_steps: list[int] = []
    trajectories: list[Trajectory] = []
    pending: list[PendingBatch] = []
    for number, batch in enumerate(batches, epoch * rollout.batches_per_epoch):
        for start in range(0, len(batch), rollout.batch_size_per_device):
            session.check_stop()
            part = batch[start : start + rollout.batch_size_per_device]
            trajectory, scores = roll_out(run, data, algorithm, part, number)
            slots += part
            first_steps += [trajectory.first_step] * len(part)
            trajectories.append(trajectory)
            pending.append(scores)
    with run.clock.part("reward_wait"):
        scores = settle(run.rewards, pending, config.reward_client)
    advantages, weight, statistics = advantages_of(run, algorithm, data, slots, scores)
    step = session.progress.step + 1
    run.dir.log("rollout", step, {"epoch": epoch, **statistics})
    if rollout_grid_due(config, epoch):
        run.dir.save_image(step, "rollouts", rollout_grid(pending, scores, rollout.group_size))
    experience = Experience(
        position=torch.tensor([s.example for s in slots]),
        first_step=torch.tensor(first_steps),
        latents=torch.cat([t.latents for t in trajectories]).cpu(),
        log_probs=torch.cat([t.log_probs for t in trajectories]).cpu(),
        advantages=advantages,
        weight=weight,
        means=torch.zeros(0),
    )
    experience = experience.select(live_rows(run, weight))
    if algorithm.kl_weight:
        experience.means = reference_means(run, data, experience)
    return experience


def roll_out(
    run: Run, data: EncodedData, algorithm: GrpoConfig, slots: Sequence[Slot], number: int
) -> tuple[Trajectory, PendingBatch]:
    """Sample one batch of slots and submit its images for scoring."""
    config, device = run.config, run.engine.device
    epoch = number // config.rollout.batches_per_epoch
    examples = data.examples([s.example for s in slots])
    condition = data.conditions([s.example for s in slots], device)
    schedule = run.model.schedule(config.rollout.num_steps, condition.size)
    plan = make_plan(config, schedule, number)
    seeds = [derive_seed(config.seed, "rollout", e.id, epoch, s.index) for e, s in zip(examples, slots, strict=True)]
    shared = [derive_seed(config.seed, "noise", e.id, epoch) for e in examples] if config.rollout.shared_noise else None
    region = None
    if algorithm.region == "mask" and condition.mask is not None:
        region = latent_region(condition.mask, run.model.spec.downsampling)
    with run.clock.part("rollout"):
        trajectory = sample(run.model, run.network, plan, condition, seeds, shared, region)
    with run.clock.part("vae"):
        images = to_uint8(run.model.decode(trajectory.final))
    items = items_of(examples, images, [e.id for e in examples])
    return trajectory, PendingBatch(items, run.rewards.submit(items))


def advantages_of(
    run: Run, algorithm: GrpoConfig, data: EncodedData, slots: Sequence[Slot], scores: Sequence[Scores]
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Advantages and weights of this rank's rows, from the rewards of all ranks -> (advantages, weight, statistics)."""
    names = list(run.rewards.entries)
    local = [[v for s in scores for v in s.values(name)] for name in names]
    failed = torch.tensor([any(column[i] is None for column in local) for i in range(len(slots))])
    padding = torch.tensor([s.padding for s in slots])
    values = torch.tensor([[math.nan if v is None else v for v in column] for column in local], dtype=torch.float64).T
    ids = torch.tensor([e.id for e in data.examples([s.example for s in slots])])
    gathered = [run.engine.gather(t).cpu() for t in (values, ids, ~(failed | padding), padding)]
    all_values, all_ids, valid, all_padding = gathered
    weights = torch.tensor([run.rewards.weights[name] for name in names], dtype=torch.float64)
    combined = (torch.where(valid[:, None], all_values, 0.0) * weights).sum(1)
    options = (algorithm.baseline, algorithm.scale)
    if algorithm.combine == "sum_then_normalize" or len(names) == 1:
        advantages = group_advantages(combined, all_ids, valid, *options, clip=algorithm.advantage_clip)
    else:
        parts = [
            group_advantages(all_values[:, i], all_ids, valid, *options, clip=algorithm.advantage_clip)
            for i in range(len(names))
        ]
        advantages = (torch.stack(parts, 1) * weights).sum(1) / weights.abs().sum()
    usable = comparable_rows(all_ids, valid, algorithm.baseline)
    flat = zero_std_rows(combined, all_ids, valid)
    if algorithm.skip_zero_std_groups and algorithm.baseline == "group":
        usable = usable & ~flat
    statistics = reward_statistics(names, all_values, combined, valid, flat, all_ids, all_padding)
    n, rank = len(slots), run.engine.rank
    mine = slice(rank * n, (rank + 1) * n)
    return advantages[mine].float(), usable[mine].float(), statistics


def reward_statistics(
    names: Sequence[str], values: Tensor, combined: Tensor, valid: Tensor, flat: Tensor, ids: Tensor, padding: Tensor
) -> dict[str, float]:
    """What is logged of the rewards of an epoch, over all ranks."""
    asked = ~padding
    statistics = {"images": float(asked.sum()), "failed": float((asked & ~valid).sum())}
    if bool(valid.any()):
        for i, name in enumerate(names):
            statistics[f"reward/{name}"] = float(values[valid, i].mean())
        statistics["combined_score"] = float(combined[valid].mean())
        statistics["combined_std"] = float(combined[valid].std(unbiased=False))
        groups = ids[valid].unique()
        statistics["zero_std_groups"] = float(ids[flat].unique().numel() / groups.numel())
    return statistics


def live_rows(run: Run, weight: Tensor) -> Tensor:
    """Rows worth a forward, the same number on every rank: those of weight > 0, filled up with rows of weight 0."""
    live, dead = (weight > 0).nonzero().flatten(), (weight == 0).nonzero().flatten()
    most = int(run.engine.gather(torch.tensor([len(live)])).max())
    return torch.cat([live, dead[: most - len(live)]])


@torch.no_grad()
def reference_means(run: Run, data: EncodedData, experience: Experience) -> Tensor:
    """Means of the reference policy at every recorded transition [n, S, C, H, W]."""
    device, means = run.engine.device, torch.zeros_like(experience.latents[:, 1:])
    with run.policy.use("reference"), run.clock.part("train_forward"):
        for rows in torch.arange(len(experience.weight)).split(run.config.optimizer.batch_size_per_device):
            condition = data.conditions(experience.position[rows].tolist(), device)
            plan = make_plan(run.config, run.model.schedule(run.config.rollout.num_steps, condition.size), batch=0)
            for s in range(experience.steps):
                x, _, step = experience.transitions(rows, range(s, s + 1))
                mean, _ = transition(run.model, run.network, plan, x.to(device), step.to(device), condition)
                means[rows, s] = mean.cpu()
    return means


def rollout_grid_due(config: RunConfig, epoch: int) -> bool:
    every = config.logging.rollout_images_every
    return bool(every) and epoch % every == 0


def rollout_grid(pending: Sequence[PendingBatch], scores: Sequence[Scores], group_size: int, groups: int = 6) -> Image:
    """The first groups of an epoch, one a row, each image with its combined score."""
    cells = [
        (item.image, "failed" if score is None else f"{score:.2f}")
        for batch, s in zip(pending, scores, strict=True)
        for item, score in zip(batch.items, s.combined(), strict=True)
    ]
    rows = [cells[i : i + group_size] for i in range(0, len(cells), group_size)]
    return grid(rows[:groups])
