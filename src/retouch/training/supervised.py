"""Supervised optimizer steps: the denoising loss on examples with a target image (flow matching, arXiv 2210.02747).

Alone they are SFT; before RL they are the warm-up. Departure from the paper: times go through the same shift as
sampling (`shifted`): training then uses the noise levels that sampling visits. For classifier-free guidance (arXiv
2207.12598) a share of the rows can be trained without caption (`caption_dropout`) and, with a style adapter, without
the reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from retouch.algorithms.base import Objective, RlConfig
from retouch.core.objectives.sft import denoising_loss
from retouch.data.sampler import derive_seed
from retouch.engine import CheckpointError
from retouch.rollout.encoded import EncodedData, drop_references
from retouch.rollout.sampler import noise_for, objective_region
from retouch.training.noised import denoising_error
from retouch.training.session import Session
from retouch.training.step import Step


def supervised_phase(session: Session, until: int, lr: float, objective: Objective, *, shifted: bool) -> None:
    """Supervised optimizer steps up to step `until` of the run."""
    run = session.run
    data = EncodedData(run.model, run.warmup_data, run.denoising_guidance_scale, run.clock, conditional=True)
    for step in session.steps_on_examples(until, data, "sft", lr):
        with step:
            encode_step(data, objective, step)
            for rows in step.forwards():
                step.backward(*supervised_loss(session, data, objective, step, rows, shifted))


def supervised_loss(
    session: Session, data: EncodedData, objective: Objective, step: Step, rows: Tensor, shifted: bool
) -> tuple[Tensor, Mapping[str, Tensor], int]:
    """The loss of one forward -> (loss, metrics, rows).

    The noise of a row, its time and its caption dropout depend on (run seed, step, number of the row among those of all
    processes), not on the process or micro-batch that computes it.
    """
    run, device, number = session.run, session.run.engine.device, session.progress.step
    global_rows = [session.run.engine.rank * len(step.rows) + int(row) for row in rows]
    positions = [step.positions[row] for row in rows]
    x0 = data.images(positions, "target", device)
    noise, uniform, uncaptioned = row_draws(x0.shape[1:], [step.seeds[row] for row in rows], objective)
    condition = data.conditions(positions, torch.device("cpu"), uncaptioned)
    train = run.config.model.train
    if train.kind == "ip_adapter":
        draws = [derive_seed(run.config.seed, "reference", number, row) for row in global_rows]
        condition = drop_references(condition, train.reference_dropout, draws, uncaptioned)
    condition = condition.to(device)  # with the references that are kept: each copy is a wait
    schedule = run.schedule(condition.size)
    time = schedule.training_times(uniform.clamp(1e-6, 1 - 1e-6), shifted=shifted).to(device)
    region = objective_region(objective, condition, run.model.spec.downsampling)
    errors = denoising_error(run.model, run.network, schedule, x0, noise.to(device), time, condition, region)
    loss, values = denoising_loss(errors, normalizer=step.normalizer)
    return loss, values, len(rows)


def row_draws(shape: Sequence[int], seeds: Sequence[int], objective: Objective) -> tuple[Tensor, Tensor, list[bool]]:
    """Random numbers of each row by its seed: noise of this shape, a uniform number for its time, and whether it has
    no caption."""
    noise, generators = noise_for(shape, seeds)
    uniform = torch.stack([torch.rand((), generator=g, dtype=torch.float64) for g in generators])
    uncaptioned = [
        float(torch.rand((), generator=g, dtype=torch.float32)) < objective.caption_dropout for g in generators
    ]
    return noise, uniform, uncaptioned


def encode_step(data: EncodedData, objective: Objective, step: Step) -> None:
    """Encode the prompts of a step before its first forward, see `EncodedData.encode`."""
    uncaptioned = None
    if objective.caption_dropout:  # its numbers come after those of the noise
        shape = data.images(step.positions[:1], "target", torch.device("cpu")).shape[1:]
        uncaptioned = row_draws(shape, step.seeds, objective)[2]
    data.encode(step.positions, uncaptioned)


def warm_up(session: Session, algorithm: RlConfig) -> None:
    """The supervised steps before RL, if there are any. Its end, or the start of the run, is what the snapshots of the
    algorithm hold.

    Raises:
        CheckpointError: resumed after the warm-up from a checkpoint without a snapshot. The policy of today is no
            replacement for it.
    """
    run, optimizer = session.run, session.config.optimizer
    if session.progress.phase == "warmup":
        lr = optimizer.sft_lr or optimizer.lr
        supervised_phase(session, algorithm.sft_steps, lr, algorithm, shifted=True)
        session.recorder.evaluate("warmup")
        session.progress.phase = "rl"
        run.engine.new_optimizer()
        session.take_snapshots()
        session.recorder.save(pinned=True)
    for name in sorted(algorithm.snapshots - {*run.policy.snapshots}):
        raise CheckpointError(
            f"{session.resumed_from}: has no snapshot {name!r}, which {algorithm.name} needs; give another "
            "checkpoint, or start a new run under another name=..."
        )
