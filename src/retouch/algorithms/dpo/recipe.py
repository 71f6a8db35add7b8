"""DPO for diffusion policies: the preferred image of a pair is trained to be easier to denoise than the other.

Diffusion-DPO (arXiv 2311.12908) on given pairs (`pairs: offline`), or online as in flow_grpo:

    1. K images of each of G examples by the ODE, from the current policy or from the reference.
    2. Rewards; the best and the worst image of a group are a pair; a group whose best and worst tie makes none.
    3. `dpo_loss` on the errors of the pair at one time with one noise, under the policy and under the reference.
    4. Every `reference_refresh_every` steps the reference becomes the policy.

The reference is a snapshot of the trained weights: with LoRA, of the adapter alone, beside one network; with
`kl_reference: base`, of an adapter that changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from retouch.algorithms.dpo.config import DpoConfig
from retouch.core.advantages import RewardRows
from retouch.core.objectives.dpo import dpo_loss
from retouch.core.objectives.sft import denoising_rows
from retouch.rollout.sampler import objective_region
from retouch.training.build import Run
from retouch.training.dealing import rows_of_all, shared_batches
from retouch.training.experience import rewarded_samples
from retouch.training.noised import NoisedRows, noised_copies, row_generators
from retouch.training.session import Session
from retouch.training.step import Step
from retouch.training.supervised import warm_up

TIE = 1e-6
"""Advantages that differ by no more are a tie: rounding must not make pairs."""


@dataclass
class Pairs:
    """Pairs of this process, on the CPU.

    Attributes:
        position: [P] of each pair's example in the dataset.
        seed: [P] int64 of its noise.
        win, lose: [P, C, h, w] clean latents.
        counts_in_loss: [P]: 1, or 0 for padding.
        optimizer_step: [P] as of `Experience`.
    """

    position: Tensor
    seed: Tensor
    win: Tensor
    lose: Tensor
    counts_in_loss: Tensor
    optimizer_step: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))


def train(run: Run) -> None:
    """Warm up, then train to max_steps."""
    algorithm = run.config.algorithm
    assert isinstance(algorithm, DpoConfig)
    with Session(run) as session:
        warm_up(session, algorithm)
        if algorithm.pairs == "offline":
            data, last = run.encoded_for_denoising, run.config.training.max_steps
            for step in session.steps_on_examples(last, data, "pair", images=2):
                train_step(session, algorithm, given_pairs(run, step), step)
        else:
            for pairs in session.epochs(Pairs, collect_pairs, algorithm):
                for step in session.steps(pairs):
                    train_step(session, algorithm, pairs, step)
        session.finish()


def train_step(session: Session, algorithm: DpoConfig, pairs: Pairs, step: Step) -> None:
    """One optimizer step on some pairs."""
    run = session.run
    refresh_reference(session, algorithm)
    with step:
        run.encoded_for_denoising.encode(step.positions)
        forwards = session.size.parts(step.rows, algorithm.timesteps_per_pair)
        with run.clock.part("train_forward"), run.policy.use("reference"):
            references = [errors(run, algorithm, noised_pairs(session, algorithm, pairs, *f)) for f in forwards]
        for (rows, piece), reference in step.forwards(list(zip(forwards, references, strict=True))):
            step.backward(*preference_loss(session, algorithm, pairs, step, rows, piece, reference))


def preference_loss(
    session: Session, algorithm: DpoConfig, pairs: Pairs, step: Step, rows: Tensor, piece: range, reference: Tensor
) -> tuple[Tensor, Mapping[str, Tensor], Tensor]:
    """The loss of one forward: B pairs, W noised copies of both members -> (loss, metrics, pairs that count, by the
    share of their copies that the piece is)."""
    win, lose = errors(session.run, algorithm, noised_pairs(session, algorithm, pairs, rows, piece))
    weight, share = pairs.counts_in_loss[rows].to(win.device), len(piece) / algorithm.timesteps_per_pair
    loss, values = dpo_loss(win, lose, reference[0], reference[1], algorithm.beta, weight, step.normalizer / share)
    return loss, values, weight.sum() * share


def noised_pairs(session: Session, algorithm: DpoConfig, pairs: Pairs, rows: Tensor, piece: range) -> NoisedRows:
    """W noised copies of both members of B pairs, those of a piece, the same whenever it is called in a step: once for
    the reference and once for the policy. They are not kept in between: the conditions of a step would fill a GPU."""
    run, device = session.run, session.run.engine.device
    condition = run.encoded_for_denoising.conditions(pairs.position[rows].tolist(), device)
    both = condition.select(torch.arange(len(rows), dtype=torch.int64).repeat(2))
    # win and lose of a pair draw from generators of one seed: one time, one noise
    generators = row_generators(pairs.seed[rows].repeat(2), "dpo", session.progress.step_in_epoch)
    x0 = torch.cat([pairs.win[rows], pairs.lose[rows]])
    return noised_copies(run, x0, both, generators, algorithm.timesteps_per_pair, piece)


def errors(run: Run, algorithm: DpoConfig, copies: NoisedRows) -> Tensor:
    """Denoising errors of the weights in use [2, B, W]: of the preferred images, then of the others."""
    region = objective_region(algorithm, copies.condition, run.model.spec.downsampling)
    prediction = run.model.predict(run.network, copies.x, copies.time, copies.condition)
    found = denoising_rows(prediction, copies.schedule.target(copies.x0, copies.noise), region)
    return found.view(2, -1, copies.copies)


def refresh_reference(session: Session, algorithm: DpoConfig) -> None:
    """The reference becomes the policy if the next step is the first of a new period. Calling it twice changes
    nothing."""
    taken, every = session.progress.step - algorithm.sft_steps, algorithm.refresh_every
    if every and taken and taken % every == 0:
        session.run.policy.snapshot("reference")


def collect_pairs(session: Session, algorithm: DpoConfig) -> Pairs:
    """Sample an epoch, score it, pair the best with the worst of each group, deal the pairs to the processes."""
    refresh_reference(session, algorithm)  # before it samples
    engine = session.run.engine
    policy = None if algorithm.rollout_policy == "current" else "reference"
    samples, _, rewards = rewarded_samples(session, algorithm, policy)
    best, worst = best_and_worst(rewards, algorithm.combine)
    # the members of a pair may lie on two processes, neither of which trains on it
    latents = rows_of_all(engine, samples.latents[:, -1], [*best.tolist(), *worst.tolist()])
    win, lose = latents[: len(best)], latents[len(best) :]
    seeds = engine.gather(samples.seed).cpu()
    steps = session.shared_steps
    batches = shared_batches(seeds[best], steps) if steps > 1 else [torch.arange(len(best), dtype=torch.int64)]
    shares = [own_pairs(batch, engine.rank, engine.world_size) for batch in batches]
    mine, weight = (torch.cat(parts) for parts in zip(*shares, strict=True))
    pairs = Pairs(rewards.example_index[best[mine]], seeds[best[mine]], win[mine], lose[mine], weight)
    if steps > 1:
        pairs.optimizer_step = torch.cat([torch.full_like(own, number) for number, (own, _) in enumerate(shares)])
    return pairs


def own_pairs(pairs: Tensor, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """A rank's consecutive share of pairs, as long on every rank, and whether each counts: what is filled up with the
    last pair does not."""
    each = -(-len(pairs) // world_size)
    place = torch.arange(rank * each, (rank + 1) * each, dtype=torch.int64)
    return pairs[place.clamp(max=max(0, len(pairs) - 1))], (place < len(pairs)).float()


def best_and_worst(rewards: RewardRows, combine: str) -> tuple[Tensor, Tensor]:
    """Rows of the best and the worst image of each group, groups in the order of their keys; ties make no pair.

    Of equal rows the one of the lowest index in the group is taken, whatever process it is on.
    """
    advantages = rewards.advantages(combine, "group", "group", clip=float("inf"))
    constant, usable = rewards.zero_variance_rows(combine), rewards.usable
    best: list[int] = []
    worst: list[int] = []
    for key in rewards.example_index[usable].unique().tolist():
        rows = ((rewards.example_index == key) & usable).nonzero().flatten()
        rows = rows[rewards.index[rows].argsort()]
        high, low = rows[advantages[rows].argmax()], rows[advantages[rows].argmin()]
        if not bool(constant[rows].all()) and advantages[high] - advantages[low] > TIE:
            best.append(int(high))
            worst.append(int(low))
    return torch.tensor(best, dtype=torch.long), torch.tensor(worst, dtype=torch.long)


def given_pairs(run: Run, step: Step) -> Pairs:
    """This process's pairs of an optimizer step, from the manifest."""
    data, cpu = run.encoded_for_denoising, torch.device("cpu")
    win, lose = data.images(step.positions, "win", cpu), data.images(step.positions, "lose", cpu)
    position, seeds = (torch.tensor(column, dtype=torch.int64) for column in (step.positions, step.seeds))
    return Pairs(position, seeds, win, lose, torch.ones(len(position), dtype=torch.float32))
