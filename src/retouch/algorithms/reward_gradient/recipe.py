"""Reward gradients: differentiable rewards train single denoising steps directly.

    1. Samples by the ODE; the states of the trained steps are recorded.
    2. Rewards, as in every algorithm; and g = -d reward / d latents through the decoder, one image at a time.
    3. At a recorded state x_k: loss = c_k <v(x_k), g> + kl_weight mean |v - v_reference|². x_k, g and c_k, which is
       d x0 / d v_k, are constants (`step_coefficients`): each trained step of a sample is a row of its own.

The last step alone is DRaFT-1 (arXiv 2309.17400), any other steps are DRTune (2405.00760), and with the gradient taken
at the image that the prediction of the step implies it is ReFL (2304.05977). An epsilon model has the coefficients of
DDIM. One sample of an example suffices: nothing is compared.

Departures: g is taken of the composite within the crop that the reward scores, and only the region counts; by default
it is divided by its root mean square over the epoch (`gradient_scale`); a sample whose reward or gradient fails
does not count. Pixels are not clamped, and not rounded to 8 bits as in the logged rewards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

import torch
from torch import Tensor

from retouch.algorithms.reward_gradient.config import RewardGradientConfig
from retouch.core.objectives.reward_gradient import estimate_coefficients, implied_data, linear_loss, step_coefficients
from retouch.core.reduce import region_of_kept, row_mean, weighted_mean, within
from retouch.data.sampler import derive_seed
from retouch.rewards.gradient import PixelReward, pixel_rewards
from retouch.rewards.protocol import RewardItem
from retouch.rollout.sampler import objective_region
from retouch.training.build import Run
from retouch.training.dealing import evenly_dealt
from retouch.training.experience import items_by_row, rewarded_samples
from retouch.training.pixel_gradients import divisor, latent_gradient, refuse_lost_gradients, region_rms
from retouch.training.session import Session
from retouch.training.step import Step
from retouch.training.supervised import warm_up
from retouch.types import Condition, Failure


@dataclass
class TrainedSteps:
    """Denoising steps to train, with the gradients of their rewards, on the CPU; a sample has one row or several.

    Attributes:
        position: [n] of each row's example in the dataset.
        seed: [n] int64 of the row's image.
        step: [n] int64 index of the denoising step.
        latents: [n, C, h, w] fp32, the recorded state before the step.
        gradient: [n, C, h, w] fp32, -d reward / d latents.
        coefficient: [n] fp32, d x0 / d prediction of the step, times the scale of the epoch's gradients.
        counts_in_loss: [n]: 1, or 0 for padding and rows whose reward or gradient failed.
        optimizer_step: [n] as of `Experience`.
    """

    position: Tensor
    seed: Tensor
    step: Tensor
    latents: Tensor
    gradient: Tensor
    coefficient: Tensor
    counts_in_loss: Tensor
    optimizer_step: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))


def train(run: Run) -> None:
    """Warm up, then train to max_steps."""
    algorithm = run.config.algorithm
    assert isinstance(algorithm, RewardGradientConfig)
    with Session(run) as session:
        warm_up(session, algorithm)
        for rows in session.epochs(TrainedSteps, collect, algorithm):
            for step in session.steps(rows):
                train_step(session, algorithm, rows, step)
        session.finish()


def train_step(session: Session, algorithm: RewardGradientConfig, rows: TrainedSteps, step: Step) -> None:
    """One optimizer step. The reference predicts before the policy's first forward: weights must not be swapped between
    a forward and its backward."""
    run = session.run
    with step:
        forwards = session.size.chunks(step.rows)
        references: Sequence[Tensor | None] = [None] * len(forwards)
        if algorithm.kl_weight:
            with run.clock.part("train_forward"), run.policy.use("reference"):
                references = [predict(run, rows, chosen, rows_condition(run, rows, chosen)) for chosen in forwards]
        for chosen, reference in step.forwards(list(zip(forwards, references, strict=True))):
            step.backward(*reward_gradient_loss(run, algorithm, rows, chosen, reference, step.normalizer))


def reward_gradient_loss(
    run: Run,
    algorithm: RewardGradientConfig,
    rows: TrainedSteps,
    chosen: Tensor,
    reference: Tensor | None,
    total: Tensor,
) -> tuple[Tensor, Mapping[str, Tensor], Tensor]:
    """The loss of one forward -> (loss, metrics, rows that count).

    Args:
        chosen: [B] rows of the forward.
        reference: what the reference predicts for them; None without a KL.
    """
    device = run.engine.device
    weight = rows.counts_in_loss[chosen].to(device)
    condition = rows_condition(run, rows, chosen)
    region = objective_region(algorithm, condition, run.model.spec.downsampling)
    prediction = predict(run, rows, chosen, condition)
    gradient, coefficient = rows.gradient[chosen].to(device), rows.coefficient[chosen].to(device)
    loss, values = linear_loss(prediction, gradient, coefficient, region, weight, total)
    if reference is not None:
        counted = region_of_kept(region, weight)
        kl = row_mean(within(prediction - reference, counted) ** 2, counted)
        loss = loss + algorithm.kl_weight * weighted_mean(kl, weight, total)
        values["kl"] = weighted_mean(kl.detach(), weight)
    return loss, values, weight.sum()


def rows_condition(run: Run, rows: TrainedSteps, chosen: Tensor) -> Condition:
    """The condition of B rows, under the guidance of sampling."""
    return run.encoded.conditions(rows.position[chosen].tolist(), run.engine.device)


def predict(run: Run, rows: TrainedSteps, chosen: Tensor, condition: Condition) -> Tensor:
    """[B, C, h, w] of the weights in use at the recorded states."""
    device, times = run.engine.device, run.schedule(condition.size).times[rows.step[chosen]]
    return run.model.predict(run.network, rows.latents[chosen].to(device), times.to(device), condition)


# --- an epoch ---


def collect(session: Session, algorithm: RewardGradientConfig) -> TrainedSteps:
    """Sample an epoch, score it, take the gradients of the rewards, deal the rows to the processes.

    Raises:
        RewardOutage, FailureRateExceeded: nothing of the epoch was trained on.
        Stopped: asked to stop between batches.
    """
    run, engine = session.run, session.run.engine
    samples, scores, rewards = rewarded_samples(session, algorithm, None)
    padding, usable = rewards.padding[rewards.own], rewards.usable[rewards.own]
    states, items = samples.latents, items_by_row(padding, scores)  # [n, S + 1, C, h, w]
    trained = [trained_denoising_steps(algorithm, run.config.rollout.num_steps, seed) for seed in samples.seed.tolist()]
    steps = torch.tensor(trained, dtype=torch.int64)
    gradient = torch.zeros(*steps.shape, *states.shape[2:], dtype=torch.float32)
    coefficient = torch.zeros(steps.shape, dtype=torch.float32)
    failures: list[Failure] = []
    scorers = pixel_rewards(run.rewards, run.rewards.weights)
    with run.model.encoding():  # the autoencoder is moved to the device once
        for i in usable.nonzero().flatten().tolist():
            item = items[i]
            assert item is not None, "padding is not usable"
            found = sample_gradient(run, algorithm, scorers, states[i], steps[i], item, samples.position[i])
            if isinstance(found, Failure):
                failures.append(found)
                usable[i] = False
            else:
                gradient[i], coefficient[i] = found
    refuse_lost_gradients(session, int((~padding).sum()), failures)
    rows = TrainedSteps(
        position=samples.position.repeat_interleave(steps.shape[1]),
        seed=samples.seed.repeat_interleave(steps.shape[1]),
        step=steps.flatten(),
        latents=states_before(states, steps, run.config.rollout.num_steps).flatten(0, 1),
        gradient=gradient.flatten(0, 1),
        coefficient=coefficient.flatten(),
        counts_in_loss=usable.float().repeat_interleave(steps.shape[1]),
    )
    if algorithm.gradient_scale == "rms":
        rms, elements = region_rms(run, algorithm, rows.position, rows.gradient, rows.counts_in_loss)
        rows.coefficient /= divisor(rms, elements)
    return evenly_dealt(engine, rows, engine.gather(rows.counts_in_loss).cpu(), session.shared_steps)


def trained_denoising_steps(algorithm: RewardGradientConfig, num_steps: int, seed: int) -> list[int]:
    """Indices of the denoising steps that a sample trains."""
    last = range(num_steps - (algorithm.last_steps or num_steps), num_steps)
    if algorithm.trained_step == "random":
        return [Random(derive_seed(seed, "step")).choice(last)]
    return list(last) if algorithm.trained_step == "all" else [num_steps - 1]


def states_before(states: Tensor, steps: Tensor, num_steps: int, *, after: int = 0) -> Tensor:
    """The recorded states [n, W, C, h, w] before steps [n, W], or those `after` them by so many steps.

    Args:
        states: [n, S + 1, C, h, w] around the last S steps.
    """
    place = steps - (num_steps - (states.shape[1] - 1)) + after
    return states[torch.arange(len(states), dtype=torch.int64)[:, None], place]


def sample_gradient(
    run: Run,
    algorithm: RewardGradientConfig,
    scorers: list[PixelReward],
    states: Tensor,
    steps: Tensor,
    item: RewardItem,
    position: Tensor,
) -> tuple[Tensor, Tensor] | Failure:
    """-d reward / d latents [W, C, h, w] of one sample and d x0 / d prediction [W] of its trained steps [W]; or a
    failure.

    Args:
        states: [S + 1, C, h, w] around the last S steps.
    """
    states, num_steps = states.to(run.engine.device), run.config.rollout.num_steps
    example = run.encoded.examples([int(position)])[0]
    condition = run.encoded.conditions([int(position)], run.engine.device)
    schedule = run.schedule(condition.size)
    if algorithm.reward_at == "final":
        scored, coefficients = states[-1:], step_coefficients(schedule)
    else:
        before, then = (states_before(states[None], steps[None], num_steps, after=after)[0] for after in (0, 1))
        scored, coefficients = implied_data(schedule, before, then, steps), estimate_coefficients(schedule)
    strip = 0 if example.strip is None else example.strip.height
    found: list[Tensor] = []
    for x0 in scored:
        gradient = latent_gradient(run, scorers, x0[None], item, strip)
        if isinstance(gradient, Failure):
            return gradient
        found.append(-gradient)
    return torch.cat(found).expand(len(steps), *states.shape[1:]), coefficients[steps].float()
