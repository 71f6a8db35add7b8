"""KTO: images with a label good or bad, each for itself (Diffusion-KTO, arXiv 2404.04465).

    1. The labelled images of a step (`target_path` of a manifest), noised anew.
    2. Errors under the reference and under the policy; z = max(mean gain over the step, 0).
    3. `kto_loss`: good images become easier to denoise than under the reference, bad ones harder.

Departures: z is the mean over the whole optimizer step, in an additional forward without gradient, and not over a
micro-batch, on whose size the published gradient depends. Labels are not balanced by sampling: `good_weight` and
`bad_weight` weigh them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from retouch.algorithms.kto.config import KtoConfig, label_of
from retouch.core.objectives.kto import kto_baseline, kto_loss
from retouch.core.objectives.sft import denoising_rows
from retouch.rollout.sampler import objective_region
from retouch.training.build import Run
from retouch.training.noised import noised_copies, row_generators
from retouch.training.session import Session
from retouch.training.step import Step
from retouch.training.supervised import warm_up


def train(run: Run) -> None:
    """Warm up, then train to max_steps."""
    algorithm = run.config.algorithm
    assert isinstance(algorithm, KtoConfig)
    with Session(run) as session:
        warm_up(session, algorithm)
        for step in session.steps_on_examples(run.config.training.max_steps, run.encoded_for_denoising, "kto"):
            train_step(session, algorithm, step)
        session.finish()


def train_step(session: Session, algorithm: KtoConfig, step: Step) -> None:
    """One optimizer step on labelled images."""
    run = session.run
    with step:
        run.encoded_for_denoising.encode(step.positions)
        forwards = session.size.parts(step.rows, algorithm.timesteps_per_image)
        with run.clock.part("train_forward"), run.policy.use("reference"):
            references = [errors(session, algorithm, step, *forward) for forward in forwards]
        compared = list(zip(forwards, references, strict=True))
        with run.clock.part("train_forward"), run.policy.use(None):
            gains = [r - errors(session, algorithm, step, *forward) for forward, r in compared]
        shares = [g.mean(1).sum() * share_of(algorithm, f[1]) for f, g in zip(forwards, gains, strict=True)]
        total = run.engine.sum(torch.stack(shares).sum())
        baseline = kto_baseline(total / step.normalizer)
        for (rows, piece), reference in step.forwards(compared):
            step.backward(*labels_loss(session, algorithm, step, rows, piece, reference, baseline))


def labels_loss(
    session: Session,
    algorithm: KtoConfig,
    step: Step,
    rows: Tensor,
    piece: range,
    reference: Tensor,
    baseline: Tensor,
) -> tuple[Tensor, Mapping[str, Tensor], float]:
    """The loss of one forward of B x W rows -> (loss, metrics, images, by the share of their copies that the piece
    is)."""
    found, share = errors(session, algorithm, step, rows, piece), share_of(algorithm, piece)
    items = session.run.data.items
    good = torch.tensor([label_of(items[p]) for p in chosen(step, rows)], dtype=torch.bool, device=found.device)
    weights = algorithm.good_weight, algorithm.bad_weight
    normalizer = step.normalizer / share
    loss, values = kto_loss(found, reference, good, algorithm.beta, *weights, baseline=baseline, normalizer=normalizer)
    return loss, values, len(rows) * share


def share_of(algorithm: KtoConfig, piece: range) -> float:
    """Share of the noised copies of an image that a piece of them is."""
    return len(piece) / algorithm.timesteps_per_image


def errors(session: Session, algorithm: KtoConfig, step: Step, rows: Tensor, piece: range) -> Tensor:
    """Denoising errors of the weights in use [B, W], at the same times and noise whenever it is called in a step."""
    run, device = session.run, session.run.engine.device
    data, positions = run.encoded_for_denoising, chosen(step, rows)
    generators = row_generators([step.seeds[row] for row in rows], "kto")
    x0, condition = data.images(positions, "target", device), data.conditions(positions, device)
    copies = noised_copies(run, x0, condition, generators, algorithm.timesteps_per_image, piece)
    region = objective_region(algorithm, copies.condition, run.model.spec.downsampling)
    prediction = run.model.predict(run.network, copies.x, copies.time, copies.condition)
    found = denoising_rows(prediction, copies.schedule.target(copies.x0, copies.noise), region)
    return found.view(-1, len(piece))


def chosen(step: Step, rows: Tensor) -> Sequence[int]:
    """Positions in the data of some rows of a step."""
    return [step.positions[row] for row in rows]
