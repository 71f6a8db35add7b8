"""GRPO and PPO for diffusion policies.

Flow-GRPO (arXiv 2505.05470): denoising is a Markov decision process whose actions are the stochastic solver steps.

    1. K images of each of G examples, by the SDE (in a window of steps, elsewhere by the ODE: MixGRPO, 2507.21802).
    2. Rewards; advantages against the images of the same example (GRPO) or the whole batch (PPO).
    3. The clipped surrogate on the log-probabilities of the recorded steps, plus kl_weight times the KL to the policy
       at the start of RL.

Departures: log-probabilities are means over latent dims (so are the published ones) or over the repainted region; a
rollout without a valid reward leaves its group's baseline and has weight 0 everywhere; every image of an optimizer step
counts the same however it is split over ranks and micro-batches.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from retouch.build import Run
from retouch.config.schema import GrpoConfig
from retouch.core.objectives.grpo import gaussian_kl, grpo_loss
from retouch.core.reduce import weighted_mean
from retouch.core.steps import gaussian_log_prob
from retouch.observe import Metrics
from retouch.recipes.experience import Experience, collect
from retouch.recipes.session import Session
from retouch.recipes.sft import supervised_phase
from retouch.rollout import EncodedData, latent_region, make_plan, transition

logger = logging.getLogger(__name__)

ON_POLICY_TOLERANCE = {"no": 1e-5, "bf16": 5e-3, "fp16": 1e-3}
"""Largest |log ratio| before the first update of an epoch that rounding explains, by training.mixed_precision. More
means that rollout and training run different policies."""


def train(run: Run) -> None:
    """Warm up, then train to max_steps."""
    config, algorithm = run.config, run.config.algorithm
    assert isinstance(algorithm, GrpoConfig)
    with Session(run, "warmup" if algorithm.warmup_steps else "rl") as session:
        if session.progress.phase == "warmup":
            lr = config.optimizer.warmup_lr or config.optimizer.lr
            supervised_phase(session, algorithm.warmup_steps, lr, algorithm.warmup_shifted_times, algorithm.region)
            begin_rl(session)
        if algorithm.kl_weight and "reference" not in run.policy.snapshots:
            run.policy.snapshot("reference")
        data = EncodedData(run.model, run.data, run.guidance_scale, run.clock)
        while session.progress.step < config.training.max_steps:
            if session.rollouts is not None:
                experience = Experience.restore(session.rollouts)
                session.rollouts = None
            else:
                experience = collect(session, data, algorithm)
            train_epoch(session, data, algorithm, experience)
        session.finish()


def begin_rl(session: Session) -> None:
    """The end of the warm-up: its weights are the reference, the optimizer starts afresh."""
    run = session.run
    session.evaluate("warmup")
    session.progress.phase = "rl"
    run.engine.new_optimizer()
    if run.config.algorithm.kl_weight:  # type: ignore[union-attr]
        run.policy.snapshot("reference")
    session.save(pinned=True)


def train_epoch(session: Session, data: EncodedData, algorithm: GrpoConfig, experience: Experience) -> None:
    """Every optimizer step on one epoch's rollouts that has not been taken yet."""
    run, progress = session.run, session.progress
    steps = run.derived.optimizer_steps_per_epoch
    batches = experience.step_batches(run.config.seed, progress.epoch, algorithm.inner_epochs, steps)
    for rows in batches[progress.position :]:
        if progress.step >= run.config.training.max_steps:
            return
        on_policy = progress.position == 0
        values, updated = train_step(session, data, algorithm, experience, rows)
        if on_policy and updated:
            warn_off_policy(values["max_abs_log_ratio"], run.config.training.mixed_precision)
        progress.position += 1
        finished = progress.position == len(batches)
        if finished:
            progress.epoch, progress.position = progress.epoch + 1, 0
        session.end_step(values, updated=updated, rollouts=None if finished else experience.tensors())


def train_step(
    session: Session, data: EncodedData, algorithm: GrpoConfig, experience: Experience, rows: Tensor
) -> tuple[dict[str, float], bool]:
    """One optimizer step on rows of the experience -> (metrics, whether the weights changed)."""
    run, engine, metrics = session.run, session.run.engine, Metrics()
    optimizer = run.config.optimizer
    total = engine.sum(experience.weight[rows].sum())
    if float(total) == 0:  # no row with a signal on any rank
        return {"skipped": 1.0}, False
    chunks = rows.split(optimizer.batch_size_per_device)
    for number, chunk in enumerate(chunks):
        condition = data.conditions(experience.position[chunk].tolist(), engine.device)
        weight = experience.weight[chunk].to(engine.device)
        spans = step_spans(experience.steps, optimizer.steps_per_forward)
        for span in spans:
            last = number == len(chunks) - 1 and span == spans[-1]
            with engine.micro_step(last=last):
                with run.clock.part("train_forward"):
                    loss, values = surrogate(run, algorithm, experience, chunk, span, condition, weight, total)
                with run.clock.part("train_backward"):
                    engine.backward(loss)
            metrics.add(values | {"loss": loss}, weight=weight.sum())
    taken = session.progress.step - algorithm.warmup_steps
    rate = session.learning_rate(optimizer.lr, taken, run.config.training.max_steps - algorithm.warmup_steps)
    with run.clock.part("optimizer"):
        stepped = engine.step(rate)
    return {**metrics.reduce(engine), **stepped, "lr": rate, "rows": float(total), "skipped": 0.0}, not stepped[
        "overflow"
    ]


def surrogate(
    run: Run,
    algorithm: GrpoConfig,
    experience: Experience,
    rows: Tensor,
    span: range,
    condition: object,
    weight: Tensor,
    total: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of some rows over a span of their trained steps: one forward of B x W rows.

    Row-major order (all steps of a row together), as `experience` stores them.
    """
    device, width = run.engine.device, len(span)
    repeated = torch.arange(len(rows)).repeat_interleave(width)
    x, x_next, step = (t.to(device) for t in experience.transitions(rows, span))
    wide = condition.select(repeated.to(device))  # type: ignore[attr-defined]
    region = latent_region(wide.mask, run.model.spec.downsampling) if algorithm.region == "mask" else None
    plan = make_plan(run.config, run.model.schedule(run.config.rollout.num_steps, wide.size), batch=0)
    mean, std = transition(run.model, run.network, plan, x, step, wide)
    log_prob = gaussian_log_prob(x_next, mean, std, region).view(-1, width)
    old_log_prob = experience.log_probs[rows][:, span.start : span.stop].to(device)
    # a span is a share of the row's trained steps: its loss counts as that share
    share = width / experience.steps
    loss, values = grpo_loss(
        log_prob, old_log_prob, experience.advantages[rows].to(device), algorithm.clip_range, weight, total / share
    )
    if algorithm.kl_weight:
        times = plan.schedule.times.to(device)
        reference = experience.reference_means(rows, span).to(device)
        kl = gaussian_kl(mean, reference, std, region, algorithm.kl_mode, times[step + 1] - times[step]).view(-1, width)
        loss = loss + algorithm.kl_weight * weighted_mean(kl, weight, total / share)
        values["kl"] = weighted_mean(kl.detach(), weight)
    return loss, values


def step_spans(steps: int, steps_per_forward: int | None) -> list[range]:
    """The trained steps in consecutive pieces of at most `steps_per_forward`."""
    size = steps_per_forward or steps
    return [range(start, min(start + size, steps)) for start in range(0, steps, size)]


def warn_off_policy(max_abs_log_ratio: float, precision: str) -> None:
    """The alarm on ratio = 1: before the first update the policy is the sampler."""
    if max_abs_log_ratio > ON_POLICY_TOLERANCE[precision]:
        logger.warning(
            "off policy before the first update: max |log ratio| is %.2e, rounding explains %.0e; rollout and training "
            "do not compute the same policy",
            max_abs_log_ratio,
            ON_POLICY_TOLERANCE[precision],
        )
