"""DPO for diffusion policies: pairs of images, the better of which shall become easier to denoise than the other.

Diffusion-DPO (arXiv 2311.12908) on given pairs (`pairs: offline`), or online as in flow_grpo:

    1. K images of each of G examples by the ODE, from the current policy or from the reference.
    2. Rewards; the best and the worst image of a group are a pair; a group whose best and worst tie makes none.
    3. `dpo_loss` on the errors of the pair at one time with one noise, under the policy and under the reference.
    4. Every `reference_refresh_every` steps the reference becomes the policy.

The reference is a snapshot of the trained weights: with LoRA, of the adapter alone, beside one network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from retouch.algorithms.dpo.config import DpoConfig
from retouch.algorithms.sft.recipe import (
    rows_to_come,
    warm_up,
)
from retouch.core.objectives.dpo import dpo_loss
from retouch.core.objectives.sft import denoising_rows
from retouch.data.sampler import (
    batch_examples,
    derive_seed,
)
from retouch.rollout.encoded import EncodedData
from retouch.rollout.sampler import objective_region
from retouch.training.build import Run
from retouch.training.experience import combined_advantages, restored, rewarded_groups, rows_of_all, train_epoch
from retouch.training.noised import row_generators
from retouch.training.noised import (
    NoisedRows,
    noised_copies,
)
from retouch.training.scoring import RewardRows
from retouch.training.session import Session
from retouch.training.update import (
    MicroLoss,
    optimizer_step,
)

TIE = 1e-6
"""Advantages that differ by no more are alike: rounding must not make pairs."""


@dataclass
class Pairs:
    """Pairs of this rank, on the CPU.

    Attributes:
        position: [P] of each pair's example in the data set.
        seed: [P] int64 that its noise is drawn from.
        win, lose: [P, C, h, w] clean latents.
        weight: [P]: 1, or 0 for padding.
    """

    position: Tensor
    seed: Tensor
    win: Tensor
    lose: Tensor
    weight: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """For a checkpoint inside the epoch."""
        return dict(vars(self))


def train(run: Run) -> None:
    """Warm up, then train to max_steps."""
    algorithm = run.config.algorithm
    assert isinstance(algorithm, DpoConfig)
    with Session(run, "warmup" if algorithm.sft_steps else "rl") as session:
        warm_up(session, algorithm, ["reference"])
        data = EncodedData(run.model, run.data, run.guidance_scale, run.clock)
        noised = data.guided(run.denoising_guidance_scale)
        while session.progress.step < run.config.training.max_steps:
            if algorithm.pairs == "offline":
                pairs = given_pairs(session, noised)
                values, updated = train_step(session, noised, algorithm, pairs, torch.arange(len(pairs.weight)))
                session.end_step(values, updated=updated)
                continue
            refresh_reference(session, algorithm)  # before it samples
            saved = session.take_rollouts()
            pairs = restored(Pairs, saved) if saved else collect_pairs(session, data, algorithm)
            step = partial(train_step, session, noised, algorithm, pairs)
            train_epoch(session, len(pairs.weight), pairs.tensors, step)
        session.finish()


def collect_pairs(session: Session, data: EncodedData, algorithm: DpoConfig) -> Pairs:
    """Sample an epoch, score it, pair the best with the worst of each group, deal the pairs to the ranks."""
    engine = session.run.engine
    policy = None if algorithm.rollout_policy == "current" else "reference"
    rollouts, rewards = rewarded_groups(session, data, algorithm, policy)
    best, worst = best_and_worst(rewards, algorithm.combine)
    final = torch.cat([t.final for t in rollouts.trajectories]).cpu()
    # the members of a pair may lie on two ranks, neither of which trains on it
    latents = rows_of_all(engine, final, [*best.tolist(), *worst.tolist()])
    win, lose = latents[: len(best)], latents[len(best) :]
    seeds = engine.gather(torch.tensor(rollouts.seeds)).cpu()
    per_rank = -(-len(best) // engine.world_size)
    mine = torch.arange(engine.rank * per_rank, (engine.rank + 1) * per_rank)
    weight = (mine < len(best)).float()
    mine = mine.clamp(max=max(0, len(best) - 1))  # none where there are no pairs
    return Pairs(rewards.position[best[mine]], seeds[best[mine]], win[mine], lose[mine], weight)


def best_and_worst(rewards: RewardRows, combine: str) -> tuple[Tensor, Tensor]:
    """Rows of the best and the worst image of each group, groups in the order of their keys; ties make no pair.

    Of equal rows the one of the lowest index in the group is taken, whatever rank it is on.
    """
    advantages = combined_advantages(rewards, combine, "group", "group", clip=float("inf"))
    flat = rewards.flat(combine)
    best: list[int] = []
    worst: list[int] = []
    for key in rewards.position[rewards.valid].unique().tolist():
        rows = ((rewards.position == key) & rewards.valid).nonzero().flatten()
        rows = rows[rewards.index[rows].argsort()]
        high, low = rows[advantages[rows].argmax()], rows[advantages[rows].argmin()]
        if not bool(flat[rows].all()) and advantages[high] - advantages[low] > TIE:
            best.append(int(high))
            worst.append(int(low))
    return torch.tensor(best, dtype=torch.long), torch.tensor(worst, dtype=torch.long)


def given_pairs(session: Session, data: EncodedData) -> Pairs:
    """This rank's pairs of the next optimizer step, from the manifest."""
    run, optimizer, step = session.run, session.run.config.optimizer, session.progress.step
    per_rank = optimizer.batch_size_per_device * optimizer.gradient_accumulation
    chosen = batch_examples(len(run.data), per_rank * run.engine.world_size, run.config.seed, step)
    run.costs.images += 2 * per_rank
    rows = range(run.engine.rank * per_rank, (run.engine.rank + 1) * per_rank)
    positions = [chosen[row] for row in rows]
    data.read_ahead(rows_to_come(session, len(run.data), per_rank, run.config.training.max_steps))
    return Pairs(
        position=torch.tensor(positions),
        seed=torch.tensor([derive_seed(run.config.seed, "pair", step, row) for row in rows]),
        win=data.pictures(positions, "win", torch.device("cpu")),
        lose=data.pictures(positions, "lose", torch.device("cpu")),
        weight=torch.ones(per_rank),
    )


def refresh_reference(session: Session, algorithm: DpoConfig) -> None:
    """The reference becomes the policy, where the next step is the first of a new period. Twice is as good as once."""
    taken, every = session.progress.step - algorithm.sft_steps, algorithm.refresh_every
    if every and taken and taken % every == 0:
        session.run.policy.snapshot("reference")


def train_step(
    session: Session, data: EncodedData, algorithm: DpoConfig, pairs: Pairs, rows: Tensor
) -> tuple[dict[str, float], bool]:
    """One optimizer step on some pairs -> (metrics, whether the weights changed)."""
    run = session.run
    total = run.engine.sum(pairs.weight[rows].sum())
    refresh_reference(session, algorithm)
    if float(total) == 0:  # every group tied
        return {"skipped": 1.0}, False

    def losses_of(size: int) -> list[MicroLoss]:
        chunks = rows.split(size)
        # drawn twice and alike, for the reference and for the policy: a step's worth of conditions would fill a GPU
        noised = [partial(noised_pairs, session, data, algorithm, pairs, chunk) for chunk in chunks]
        with run.clock.part("train_forward"), run.policy.use("reference"):
            references = [errors(run, algorithm, copies()) for copies in noised]
        return [
            partial(micro_loss, run, algorithm, copies, reference, pairs.weight[chunk], total)
            for chunk, copies, reference in zip(chunks, noised, references, strict=True)
        ]

    values, updated = optimizer_step(session, losses_of, session.rl_learning_rate(algorithm.sft_steps))
    return {**values, "rows": float(total), "skipped": 0.0}, updated


def noised_pairs(session: Session, data: EncodedData, algorithm: DpoConfig, pairs: Pairs, rows: Tensor) -> NoisedRows:
    """W noised copies of both members of B pairs, the same whenever it is called in a step."""
    run, device = session.run, session.run.engine.device
    condition = data.conditions(pairs.position[rows].tolist(), device)
    both = condition.select(torch.arange(len(rows), device=device).repeat(2))
    # win and lose of a pair draw from generators of one seed: one time, one noise
    generators = row_generators(pairs.seed[rows].repeat(2), "dpo", session.progress.position)
    x0 = torch.cat([pairs.win[rows], pairs.lose[rows]])
    return noised_copies(run, x0, both, generators, algorithm.timesteps_per_pair)


def micro_loss(
    run: Run,
    algorithm: DpoConfig,
    copies: Callable[[], NoisedRows],
    reference: Tensor,
    weight: Tensor,
    total: Tensor,
) -> tuple[Tensor, Mapping[str, Tensor], Tensor]:
    """The loss of one forward: B pairs, W noised copies of both members."""
    win, lose = errors(run, algorithm, copies())
    weight = weight.to(win.device)
    loss, values = dpo_loss(win, lose, reference[0], reference[1], algorithm.beta, weight, total)
    return loss, values, weight.sum()


def errors(run: Run, algorithm: DpoConfig, copies: NoisedRows) -> Tensor:
    """Denoising errors of the weights in use [2, B, W]: of the preferred images, then of the others."""
    region = objective_region(algorithm, copies.condition, run.model.spec.downsampling)
    prediction = run.model.predict(run.network, copies.x, copies.time, copies.condition)
    rows = denoising_rows(prediction, copies.schedule.target(copies.x0, copies.noise), region)
    return rows.view(2, -1, algorithm.timesteps_per_pair)
