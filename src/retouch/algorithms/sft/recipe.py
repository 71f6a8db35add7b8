"""Supervised fine-tuning: the denoising loss on examples with a target picture (flow matching, arXiv 2210.02747).

Alone it is the baseline; before RL it is the warm-up. Departure from the paper: times go through the same shift as
sampling (`shifted_times`), so that training sees the noise levels that sampling visits. For classifier-free guidance
(arXiv 2207.12598) a share of the rows can be trained without caption (`caption_dropout`) and, of a style adapter,
without the reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from retouch.algorithms.base import Objective, RlConfig
from retouch.algorithms.sft.config import SftConfig
from retouch.core.objectives.sft import denoising_loss
from retouch.data.sampler import (
    batch_examples,
    derive_seed,
)
from retouch.engine import CheckpointError
from retouch.rollout.encoded import (
    EncodedData,
    drop_references,
)
from retouch.rollout.sampler import noise_for
from retouch.training.noised import denoising_error
from retouch.rollout.sampler import objective_region
from retouch.training.build import Run
from retouch.training.session import Session
from retouch.training.update import (
    MicroLoss,
    optimizer_step,
)


def train(run: Run) -> None:
    """Train to max_steps."""
    algorithm = run.config.algorithm
    assert isinstance(algorithm, SftConfig)
    with Session(run, "sft") as session:
        supervised_phase(
            session, run.config.training.max_steps, run.config.optimizer.lr, algorithm.shifted_times, algorithm
        )
        session.finish()


def warm_up(session: Session, algorithm: RlConfig, snapshots: Sequence[str]) -> None:
    """The supervised steps before RL, where there are any. Its end, or the start of the run, is what the named
    snapshots hold.

    Raises:
        CheckpointError: resumed after the warm-up from a checkpoint without one of them. The policy of today is no
            stand-in for that of then.
    """
    run, optimizer = session.run, session.config.optimizer
    if session.progress.phase == "warmup":
        lr = optimizer.sft_lr or optimizer.lr
        supervised_phase(session, algorithm.sft_steps, lr, algorithm.sft_shifted_times, algorithm)
        session.evaluate("warmup")
        session.progress.phase = "rl"
        run.engine.new_optimizer()
        for name in snapshots:
            run.policy.snapshot(name)
        session.save(pinned=True)
    for name in snapshots:
        if name in run.policy.snapshots:
            continue
        if session.resumed_from is not None:
            raise CheckpointError(
                f"{session.resumed_from}: has no snapshot {name!r}, with which {session.config.algorithm.name} goes "
                "on; give another checkpoint, or start a new run under another name=..."
            )
        run.policy.snapshot(name)


def supervised_phase(session: Session, until: int, lr: float, shifted: bool, objective: Objective) -> None:
    """Supervised optimizer steps up to step `until` of the run.

    Row r of step s draws its noise, its time and whether it loses its caption from (run seed, s, r), whatever the rank
    or micro-batch it lands in.
    """
    run, progress = session.run, session.progress
    config, engine = run.config, run.engine
    data = EncodedData(run.model, run.warmup_data, run.denoising_guidance_scale, run.clock)
    per_rank = config.optimizer.batch_size_per_device * config.optimizer.gradient_accumulation
    total = per_rank * engine.world_size
    while progress.step < until:
        positions = batch_examples(len(run.warmup_data), total, config.seed, progress.step)
        rows = range(engine.rank * per_rank, (engine.rank + 1) * per_rank)
        data.read_ahead(rows_to_come(session, len(run.warmup_data), per_rank, until))
        run.costs.images += per_rank

        def losses_of(size: int, positions: Sequence[int] = positions, rows: Sequence[int] = rows) -> list[MicroLoss]:
            chunks = [rows[start : start + size] for start in range(0, per_rank, size)]
            return [partial(_loss, session, data, positions, chunk, shifted, objective, total) for chunk in chunks]

        values, updated = optimizer_step(session, losses_of, session.learning_rate(lr, progress.step, until))
        session.end_step(values, updated=updated)


def rows_to_come(session: Session, size: int, per_rank: int, until: int) -> list[int]:
    """Positions, in data of `size` examples, of this rank's rows of the next step and, where there is one, of that
    after it."""
    engine, begun = session.run.engine, session.progress.step
    steps = range(begun, min(begun + 2, until))
    drawn = [batch_examples(size, per_rank * engine.world_size, session.config.seed, step) for step in steps]
    return [p for rows in drawn for p in rows[engine.rank * per_rank : (engine.rank + 1) * per_rank]]


def _loss(
    session: Session,
    data: EncodedData,
    positions: Sequence[int],
    rows: Sequence[int],
    shifted: bool,
    objective: Objective,
    total: int,
) -> tuple[Tensor, Mapping[str, Tensor], int]:
    run, device = session.run, session.run.engine.device
    chosen = [positions[r] for r in rows]
    x0 = data.targets(chosen, device)
    seeds = [derive_seed(run.config.seed, "sft", session.progress.step, r) for r in rows]
    noise, generators = noise_for(x0.shape[1:], seeds)
    uniform = torch.stack([torch.rand((), generator=g, dtype=torch.float64) for g in generators])
    uncaptioned = [float(torch.rand((), generator=g)) < objective.caption_dropout for g in generators]
    condition = data.conditions(chosen, device, uncaptioned)
    train = run.config.model.train
    if train.kind == "ip_adapter":
        draws = [derive_seed(run.config.seed, "reference", session.progress.step, r) for r in rows]
        condition = drop_references(condition, train.reference_dropout, draws, uncaptioned)
    schedule = run.model.schedule(run.config.rollout.num_steps, condition.size)
    time = schedule.training_times(uniform.clamp(1e-6, 1 - 1e-6), shifted=shifted).to(device)
    region = objective_region(objective, condition, run.model.spec.downsampling)
    errors = denoising_error(run.model, run.network, schedule, x0, noise.to(device), time, condition, region)
    loss, values = denoising_loss(errors, normalizer=total)
    return loss, values, len(rows)
