"""GRPO and PPO for diffusion policies.

Flow-GRPO (arXiv 2505.05470): denoising is a Markov decision process whose actions are the stochastic solver steps.

    1. K images of each of G examples, by the SDE (in a window of steps, elsewhere by the ODE: MixGRPO, 2507.21802).
    2. Rewards; advantages against the images of the same example (GRPO) or the whole batch (PPO).
    3. The clipped surrogate on the log-probabilities of the recorded steps, plus kl_weight times the KL to the
       reference policy: that at the start of RL, or the base (`kl_reference`). With `guard`, ratios are regulated as in
       GRPO-Guard (2510.22319); `kl_mask_threshold` replaces the clip by Flow-DPPO's mask (2606.11025).

Departures: log-probabilities are means over latent dims (so are the published ones) or over the repainted region; a
rollout without a valid reward leaves its group's baseline and counts in no loss; every image of an optimizer step
counts the same however it is split over ranks and micro-batches; before the first update the ratio is exactly 1,
without the rounding differences between forwards of different sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from retouch.algorithms.grpo.config import GrpoConfig
from retouch.core.objectives.grpo import gaussian_kl, grpo_loss, guard_log_probs
from retouch.core.reduce import weighted_mean
from retouch.core.steps import gaussian_log_prob
from retouch.rollout.plan import transition
from retouch.rollout.sampler import objective_region
from retouch.training.build import Run
from retouch.training.dealing import step_batches
from retouch.training.experience import Experience, collect
from retouch.training.session import Session
from retouch.training.step import Step
from retouch.training.supervised import warm_up


def train(run: Run) -> None:
    """Warm up, then train to max_steps."""
    algorithm = run.config.algorithm
    assert isinstance(algorithm, GrpoConfig)
    with Session(run) as session:
        warm_up(session, algorithm)
        for experience in session.epochs(Experience, collect, algorithm):
            train_epoch(session, algorithm, experience)
        session.finish()


def train_epoch(session: Session, algorithm: GrpoConfig, experience: Experience) -> None:
    """The optimizer steps on the rows of an epoch, with the reference's means and new records if the loss needs them
    and a checkpoint did not bring them."""
    if algorithm.kl_weight and not len(experience.reference_means):
        experience.reference_means = reference_means(session, algorithm, experience)
    several = session.run.derived.optimizer_steps_per_epoch > 1
    if algorithm.old_log_probs == "recomputed" and several and not session.resumed_epoch:
        record_again(session, algorithm, experience)
    for step in session.steps(experience):
        with step:
            session.run.encoded.encode(step.positions)  # after a resume inside an epoch they are not kept
            parts = session.size.parts(step.rows, experience.trained_steps, experience.first_inputs)
            for rows, span in step.forwards(parts):
                step.backward(*surrogate(session.run, algorithm, experience, step, rows, span))


def surrogate(
    run: Run, algorithm: GrpoConfig, experience: Experience, step: Step, rows: Tensor, span: range
) -> tuple[Tensor, Mapping[str, Tensor], Tensor]:
    """The loss of B rows over a span of W trained steps -> (loss, metrics, rows that count, by the share of their
    trained steps that the span is)."""
    device, width = run.engine.device, len(span)
    weight = experience.counts_in_loss[rows].to(device)
    now = forward_on_recorded(run, algorithm, experience, rows, span)
    recorded = experience.spanned("log_probs", rows, span).to(device)
    log_prob, old_log_prob = now.log_prob, step.old_policy_values(now.log_prob, recorded)
    step_weight, kl_exceeded = now.relative_std, None
    if run.plans.records_means:
        old_mean = step.old_policy_values(now.mean, experience.spanned("means", rows, span).to(device))
        if algorithm.kl_mask_threshold is not None:
            kl_exceeded = gaussian_kl(now.mean.detach(), old_mean, now.std, now.region) > algorithm.kl_mask_threshold
        if algorithm.guard:
            log_prob, old_log_prob = guard_log_probs(log_prob, old_log_prob, now.mean, old_mean, now.std, now.region)
            step_weight = -1 / now.dt
    share = width / experience.trained_steps  # its loss and its metrics count as that share of the row
    normalizer = step.normalizer / share
    advantages = experience.advantages[rows].to(device)
    clip_range = algorithm.clip_range if kl_exceeded is None else None
    by_row = [None if t is None else t.view(-1, width) for t in (step_weight, kl_exceeded)]
    loss, values = grpo_loss(
        log_prob.view(-1, width), old_log_prob.view(-1, width), advantages, clip_range, weight, normalizer, *by_row
    )
    values |= step.log_ratio_metric(now.log_prob.view(-1, width), recorded.view(-1, width), weight)
    if algorithm.kl_weight:
        reference = experience.spanned("reference_means", rows, span).to(device)
        kl = gaussian_kl(now.mean, reference, now.std, now.region, algorithm.kl_mode, now.dt).view(-1, width)
        loss = loss + algorithm.kl_weight * weighted_mean(kl, weight, normalizer)
        values["kl"] = weighted_mean(kl.detach(), weight)
    return loss, values, weight.sum() * share


class Forward(NamedTuple):
    """The current policy on recorded transitions, B rows x W trained steps, row-major.

    Attributes:
        log_prob: [B · W], with gradient.
        mean: [B · W, C, H, W'], with gradient.
        std: [B · W], with the step size in it.
        region: part of a latent that counts; None is all of it.
        dt: [B · W] sigma_next - sigma.
        relative_std: [B · W] see `StepPlan.relative_std`; None without `step_weight`.
    """

    log_prob: Tensor
    mean: Tensor
    std: Tensor
    region: Tensor | None
    dt: Tensor
    relative_std: Tensor | None


def forward_on_recorded(run: Run, algorithm: GrpoConfig, experience: Experience, rows: Tensor, span: range) -> Forward:
    """One forward of B x W rows (all steps of a row together, as `experience` stores them); one of the first step alone
    has a row of the network for each different input."""
    device = run.engine.device
    x, x_next, step = experience.transitions(rows, span, device)
    own = None
    if run.config.rollout.shares_first_step and span == range(1):
        first, own = experience.first_inputs(rows)
        rows, first = rows[first], first.to(device)
        x, step = x[first], step[first]
    wide = run.encoded.conditions(experience.position[rows].tolist(), device).repeated(len(span))
    region = objective_region(algorithm, wide, run.model.spec.downsampling)
    plan = run.plans.plan(run.schedule(wide.size))
    mean, std = transition(run.model, run.network, plan, x, step, wide)
    if own is not None:
        mean, std, own = of_inputs(mean, own), std.expand(len(mean)), own.to(device)
        std, step, region = std[own], step[own], None if region is None else region[own]
    log_prob = gaussian_log_prob(x_next, mean, std, region, algorithm.log_prob_mode)
    times, _ = plan.placed(device)
    dt = plan.schedule.sigma(times[step + 1]) - plan.schedule.sigma(times[step])
    relative = plan.relative_std(device)[step] if algorithm.step_weight == "std" else None
    return Forward(log_prob, mean, std, region, dt, relative)


def of_inputs(values: Tensor, own: Tensor) -> Tensor:
    """`values[own]` [B, ...], of values [U, ...] of the inputs, with sums of gradients in one order: those of an index
    are added by several threads of a CPU in an order that changes from run to run.

    Args:
        own: [B] which input each row has, on the CPU.
    """
    inputs = values.unbind()
    return torch.stack([inputs[number] for number in own.tolist()])


@torch.no_grad()
def reference_means(session: Session, algorithm: GrpoConfig, experience: Experience) -> Tensor:
    """Means of the reference policy at every recorded transition [n, S, C, H, W]; a first step that rows share has one
    row of the network, as in training."""
    run, means = session.run, torch.zeros_like(experience.latents[:, 1:])
    device, every = run.engine.device, torch.arange(len(means), dtype=torch.int64)
    span = range(int(run.config.rollout.shares_first_step), experience.trained_steps)
    with run.policy.use("reference"), run.clock.part("train_forward"):
        if span.start:
            for rows, first in session.size.parts(every, 1, experience.first_inputs):
                means[rows, 0] = forward_on_recorded(run, algorithm, experience, rows, first).mean.cpu()
        for rows in session.size.chunks(every) if span else ():
            condition = run.encoded.conditions(experience.position[rows].tolist(), device)
            plan = run.plans.plan(run.schedule(condition.size))
            x, _, step = experience.transitions(rows, span, device)
            by_step = [t.unflatten(0, (len(rows), -1)).transpose(0, 1).contiguous() for t in (x, step)]
            for s, states, steps in zip(span, *by_step, strict=True):
                mean, _ = transition(run.model, run.network, plan, states, steps, condition)
                means[rows, s] = mean.cpu()
    return means


@torch.no_grad()
def record_again(session: Session, algorithm: GrpoConfig, experience: Experience) -> None:
    """Replace the recorded log-probabilities and means by those of forwards with as many rows as training has: in the
    ratio their rounding cancels. For weights that have not changed since they sampled. `session.log_ratio` keeps the
    largest |log ratio| of what was recorded, over the rows of all processes that count."""
    run, config = session.run, session.config
    steps = run.derived.optimizer_steps_per_epoch // algorithm.inner_epochs
    dealt = len(experience.counts_in_loss), config.seed, session.progress.epoch, 1, steps
    batches = step_batches(*dealt, experience.optimizer_step)
    with run.clock.part("train_forward"):
        again = partial(recorded_in_batches, session, algorithm, experience, batches)
        log_probs, means = session.size.until_it_fits(again)
    off = (log_probs - experience.log_probs).abs()[experience.counts_in_loss > 0]
    experience.log_probs, experience.means = log_probs, means
    session.log_ratio = float(
        run.engine.gather(off.max()[None] if off.numel() else torch.zeros(1, dtype=torch.float32)).max()
    )


def recorded_in_batches(
    session: Session, algorithm: GrpoConfig, experience: Experience, batches: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """(Log-probabilities [n, S], means [n, S, C, H, W]) of the current policy, in the forwards of these optimizer
    steps; means are [0] where none are recorded."""
    log_probs, means = experience.log_probs.clone(), experience.means.clone()
    parts = (session.size.parts(rows, experience.trained_steps, experience.first_inputs) for rows in batches)
    for rows, span in chain.from_iterable(parts):
        now = forward_on_recorded(session.run, algorithm, experience, rows, span)
        log_probs[rows, span.start : span.stop] = now.log_prob.view(-1, len(span)).cpu()
        if len(means):
            means[rows, span.start : span.stop] = now.mean.unflatten(0, (-1, len(span))).cpu()
    return log_probs, means
