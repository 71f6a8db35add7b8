"""GRPO and PPO for diffusion policies.

Flow-GRPO (arXiv 2505.05470): denoising is a Markov decision process whose actions are the stochastic solver steps.

    1. K images of each of G examples, by the SDE (in a window of steps, elsewhere by the ODE: MixGRPO, 2507.21802).
    2. Rewards; advantages against the images of the same example (GRPO) or the whole batch (PPO).
    3. The clipped surrogate on the log-probabilities of the recorded steps, plus kl_weight times the KL to the policy
       at the start of RL. With `guard`, ratios are regulated as in GRPO-Guard (2510.22319).

Departures: log-probabilities are means over latent dims (so are the published ones) or over the repainted region; a
rollout without a valid reward leaves its group's baseline and has weight 0 everywhere; every image of an optimizer step
counts the same however it is split over ranks and micro-batches; before the first update the ratio is 1, not what the
rounding of forwards of different sizes makes of it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from retouch.algorithms.grpo.config import GrpoConfig
from retouch.algorithms.sft.recipe import warm_up
from retouch.core.objectives.grpo import gaussian_kl, grpo_loss, guard_log_probs
from retouch.core.reduce import weighted_mean
from retouch.core.steps import gaussian_log_prob
from retouch.rollout.encoded import EncodedData
from retouch.rollout.plan import make_plan
from retouch.rollout.sampler import objective_region
from retouch.rollout.plan import transition
from retouch.training.build import Run
from retouch.training.experience import Experience, collect, train_epoch
from retouch.training.step import step_batches
from retouch.training.session import Session
from retouch.training.update import (
    MicroLoss,
    optimizer_step,
    within_memory,
)

logger = logging.getLogger(__name__)

ON_POLICY_TOLERANCE = {"no": 1e-5, "bf16": 5e-3, "fp16": 1e-3}
"""Largest |log ratio| before the first update of an epoch that is not warned of, by training.mixed_precision: what
rounding explains where forwards of sampling and of training have about as many rows."""


def train(run: Run) -> None:
    """Warm up, then train to max_steps."""
    algorithm = run.config.algorithm
    assert isinstance(algorithm, GrpoConfig)
    with Session(run, "warmup" if algorithm.sft_steps else "rl") as session:
        warm_up(session, algorithm, ["reference"] if algorithm.kl_weight else [])
        data = EncodedData(run.model, run.data, run.guidance_scale, run.clock)
        while session.progress.step < run.config.training.max_steps:
            saved, off = session.take_rollouts(), 0.0
            if saved is not None:
                experience = Experience.restore(saved)
            else:
                experience = collect(session, data, algorithm)
                if algorithm.kl_weight:
                    experience.reference_means = reference_means(run, data, experience, session.rows_per_forward)
                if algorithm.old_log_probs == "recomputed" and run.derived.optimizer_steps_per_epoch > 1:
                    off = record_again(session, data, algorithm, experience)
            step = partial(train_step, session, data, algorithm, experience, off=off)
            train_epoch(session, len(experience.weight), experience.tensors, step)
        session.finish()


def train_step(
    session: Session,
    data: EncodedData,
    algorithm: GrpoConfig,
    experience: Experience,
    rows: Tensor,
    *,
    off: float = 0.0,
) -> tuple[dict[str, float], bool]:
    """One optimizer step on rows of the experience -> (metrics, whether the weights changed).

    Args:
        off: the largest |log ratio| of what the sampler recorded, where it was put aside.
    """
    run, optimizer = session.run, session.run.config.optimizer
    total = run.engine.sum(experience.weight[rows].sum())
    if float(total) == 0:  # no row with a signal on any rank
        return {"skipped": 1.0}, False
    spans = step_spans(experience.steps, optimizer.steps_per_forward)
    fresh = session.progress.updates_in_epoch == 0

    def losses_of(size: int) -> list[MicroLoss]:
        chunks = rows.split(size)
        return [
            partial(surrogate, run, data, algorithm, experience, chunk, span, total, fresh=fresh)
            for chunk in chunks
            for span in spans
        ]

    values, updated = optimizer_step(session, losses_of, session.rl_learning_rate(algorithm.sft_steps))
    if fresh:
        values["max_abs_log_ratio"] = max(values["max_abs_log_ratio"], off)
    if fresh and updated:
        warn_off_policy(values["max_abs_log_ratio"], run.config.training.mixed_precision)
    return {**values, "rows": float(total), "skipped": 0.0}, updated


class Replay(NamedTuple):
    """What the policy says now of recorded transitions, B rows x W trained steps, row-major.

    Attributes:
        log_prob: [B · W], with gradient.
        mean: [B · W, C, H, W'], with gradient.
        std: [B · W], with the step size in it.
        region: what counts of a latent; None is all of it.
        dt: [B · W] sigma_next - sigma.
    """

    log_prob: Tensor
    mean: Tensor
    std: Tensor
    region: Tensor | None
    dt: Tensor


def replay(
    run: Run, data: EncodedData, algorithm: GrpoConfig, experience: Experience, rows: Tensor, span: range
) -> Replay:
    """One forward of B x W rows (all steps of a row together, as `experience` stores them)."""
    device, width = run.engine.device, len(span)
    condition = data.conditions(experience.position[rows].tolist(), device)
    x, x_next, step = (t.to(device) for t in experience.transitions(rows, span))
    wide = condition.select(torch.arange(len(rows), device=device).repeat_interleave(width))
    region = objective_region(algorithm, wide, run.model.spec.downsampling)
    plan = make_plan(run.config, run.model.schedule(run.config.rollout.num_steps, wide.size), batch=0)
    mean, std = transition(run.model, run.network, plan, x, step, wide)
    log_prob = gaussian_log_prob(x_next, mean, std, region, algorithm.log_prob_mode)
    times = plan.schedule.times.to(device)
    dt = plan.schedule.sigma(times[step + 1]) - plan.schedule.sigma(times[step])
    return Replay(log_prob, mean, std, region, dt)


def surrogate(
    run: Run,
    data: EncodedData,
    algorithm: GrpoConfig,
    experience: Experience,
    rows: Tensor,
    span: range,
    total: Tensor,
    *,
    fresh: bool,
) -> tuple[Tensor, Mapping[str, Tensor], Tensor]:
    """The loss of some rows over a span of their trained steps.

    Args:
        fresh: the weights are still those that sampled, so that the ratio is 1. It is taken as 1 then: what was
            recorded differs by rounding alone, which under bf16 is many times the clip range and would clip at random.
            `max_abs_log_ratio` is against the record all the same.
    """
    device, width = run.engine.device, len(span)
    weight = experience.weight[rows].to(device)
    now = replay(run, data, algorithm, experience, rows, span)
    recorded = experience.log_probs[rows][:, span.start : span.stop].flatten().to(device)
    log_prob, old_log_prob = now.log_prob, now.log_prob.detach() if fresh else recorded
    balance = None
    if algorithm.guard:
        old_mean = experience.means[rows][:, span.start : span.stop].flatten(0, 1).to(device)
        old_mean = now.mean.detach() if fresh else old_mean
        log_prob, old_log_prob = guard_log_probs(log_prob, old_log_prob, now.mean, old_mean, now.std, now.region)
        balance = (-1 / now.dt).view(-1, width)
    # a span is a share of the row's trained steps: its loss counts as that share
    share = width / experience.steps
    loss, values = grpo_loss(
        log_prob.view(-1, width),
        old_log_prob.view(-1, width),
        experience.advantages[rows].to(device),
        algorithm.clip_range,
        weight,
        total / share,
        balance,
    )
    if fresh:
        off = (now.log_prob.detach() - recorded).abs().view(-1, width).amax(1)
        values["max_abs_log_ratio"] = torch.where(weight > 0, off, 0.0).max()
    if algorithm.kl_weight:
        reference = experience.reference_means[rows][:, span.start : span.stop].flatten(0, 1).to(device)
        kl = gaussian_kl(now.mean, reference, now.std, now.region, algorithm.kl_mode, now.dt).view(-1, width)
        loss = loss + algorithm.kl_weight * weighted_mean(kl, weight, total / share)
        values["kl"] = weighted_mean(kl.detach(), weight)
    return loss, values, weight.sum()


def record_again(session: Session, data: EncodedData, algorithm: GrpoConfig, experience: Experience) -> float:
    """Put in place of the recorded log-probabilities and means those of forwards as training takes them, of as many
    rows: in the ratio their rounding cancels. For weights that have not changed since they sampled. Out of memory, it
    begins again with half the rows, as an optimizer step does.

    Returns:
        The largest |log ratio| of what was recorded, over the rows with a weight of all ranks.
    """
    with session.run.clock.part("train_forward"):
        found = within_memory(session, lambda rows: _computed_again(session, data, algorithm, experience, rows))
    off = (found[0] - experience.log_probs).abs()[experience.weight > 0]
    experience.log_probs, experience.means = found
    return float(session.run.engine.gather(off.max()[None] if off.numel() else torch.zeros(1)).max())


@torch.no_grad()
def _computed_again(
    session: Session, data: EncodedData, algorithm: GrpoConfig, experience: Experience, rows_per_forward: int
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and means in the batches of the first inner epoch."""
    run, config = session.run, session.run.config
    log_probs, means = experience.log_probs.clone(), experience.means.clone()
    steps = run.derived.optimizer_steps_per_epoch // algorithm.inner_epochs
    for batch in step_batches(len(experience.weight), config.seed, session.progress.epoch, 1, steps):
        for rows in batch.split(rows_per_forward) if len(batch) else ():
            for span in step_spans(experience.steps, config.optimizer.steps_per_forward):
                now = replay(run, data, algorithm, experience, rows, span)
                log_probs[rows, span.start : span.stop] = now.log_prob.view(-1, len(span)).cpu()
                if len(means):
                    means[rows, span.start : span.stop] = now.mean.unflatten(0, (-1, len(span))).cpu()
    return log_probs, means


@torch.no_grad()
def reference_means(run: Run, data: EncodedData, experience: Experience, rows_per_forward: int) -> Tensor:
    """Means of the reference policy at every recorded transition [n, S, C, H, W]."""
    device, means = run.engine.device, torch.zeros_like(experience.latents[:, 1:])
    if not len(means):  # no group with a signal; splitting nothing gives an empty piece
        return means
    with run.policy.use("reference"), run.clock.part("train_forward"):
        for rows in torch.arange(len(experience.weight)).split(rows_per_forward):
            condition = data.conditions(experience.position[rows].tolist(), device)
            plan = make_plan(run.config, run.model.schedule(run.config.rollout.num_steps, condition.size), batch=0)
            for s in range(experience.steps):
                x, _, step = experience.transitions(rows, range(s, s + 1))
                mean, _ = transition(run.model, run.network, plan, x.to(device), step.to(device), condition)
                means[rows, s] = mean.cpu()
    return means


def step_spans(steps: int, steps_per_forward: int | None) -> list[range]:
    """The trained steps in consecutive pieces of at most `steps_per_forward`."""
    size = steps_per_forward or steps
    return [range(start, min(start + size, steps)) for start in range(0, steps, size)]


def warn_off_policy(max_abs_log_ratio: float, precision: str) -> None:
    """The alarm on ratio = 1: before the first update the policy is the sampler."""
    if max_abs_log_ratio > ON_POLICY_TOLERANCE[precision]:
        logger.warning(
            "off policy before the first update: max |log ratio| is %.2e, above %.0e. Where forwards of sampling and "
            "of training have other numbers of rows, bf16 explains it, with guidance above all: set "
            "algorithm.old_log_probs=recomputed. Else rollout and training do not compute the same policy",
            max_abs_log_ratio,
            ON_POLICY_TOLERANCE[precision],
        )
