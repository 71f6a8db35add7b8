"""Gradients of rewards with respect to clean latents, through the decoder. Legend: n samples of this process."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from retouch.algorithms.base import RlConfig
from retouch.errors import fitting
from retouch.rewards.gradient import PixelReward, combined_gradient, pixel_rewards
from retouch.rewards.protocol import RewardItem
from retouch.rollout.sampler import objective_region
from retouch.training.build import Run
from retouch.training.scoring import Tally, refuse_failures, summary
from retouch.training.session import Session
from retouch.types import Failure

logger = logging.getLogger(__name__)

_LEAST_DIVISOR = 1e-30


def latent_gradient(
    run: Run, rewards: Sequence[PixelReward], latents: Tensor, item: RewardItem, strip: int = 0
) -> Tensor | Failure:
    """d reward / d latents [1, C, h, w] fp32 on the CPU, of the weighted sum of rewards of one image; or a failure.

    Args:
        latents: [1, C, h, w], clean.
        item: what the image is scored with.
        strip: rows of the decoded image above the one that is scored.

    Raises:
        OutOfMemory: the decoder and its backward do not fit.
    """
    problem: list[Failure] = []

    def by_pixels(decoded: Tensor) -> Tensor:
        found, result = combined_gradient(rewards, (decoded[0, :, strip:] + 1) / 2, item), torch.zeros_like(decoded)
        if isinstance(found, Failure):
            problem.append(found)
        else:
            result[0, :, strip:] = found / 2  # pixels lie in [-1, 1]
        return result

    checkpointing = run.config.training.gradient_checkpointing
    remedies = "" if checkpointing else "training.gradient_checkpointing=true, "
    remedies += "a smaller data.resolution, or the device of the reward's scorer to cpu"
    with run.clock.part("vae"), fitting("in the gradient of a reward through the decoder", remedies):
        gradient = run.model.latent_gradient(latents, by_pixels, checkpointing=checkpointing).cpu()
    if problem:
        return problem[0]
    if not bool(gradient.isfinite().all()):
        return Failure("scorer_error", "the gradient of the reward contains NaN or Inf")
    return gradient


def scaled_reward_gradients(
    session: Session,
    algorithm: RlConfig,
    items: Sequence[RewardItem | None],
    position: Tensor,
    x0: Tensor,
    counts: Tensor,
) -> Tensor:
    """-d reward / d latents [n, C, h, w] fp32 of the rewards with a `gradient_weight`, divided by its root mean square
    and the number of elements of the region, times the sum of these weights. A sample whose
    gradient fails has 0, takes no part in the root mean square, and counts as a failure.

    Args:
        items: of the samples of this process; None for padding.
        position, x0, counts: of the samples of this process. No gradient is computed for samples that do not count.

    Raises:
        FailureRateExceeded: on every process.
    """
    run = session.run
    weights = {name: entry.gradient_weight for name, entry in run.config.rewards.items()}
    rewards = pixel_rewards(run.rewards, weights)
    result, failures = torch.zeros_like(x0), list[Failure]()
    has_gradient = counts.clone()
    with run.model.encoding():  # the autoencoder is moved to the device once
        for i in counts.nonzero().flatten().tolist():
            strip, item = run.encoded.examples([int(position[i])])[0].strip, items[i]
            assert item is not None, "padding does not count"
            found = latent_gradient(run, rewards, x0[i][None], item, 0 if strip is None else strip.height)
            if isinstance(found, Failure):
                failures.append(found)
                has_gradient[i] = 0
            else:
                result[i] = -found[0]
    refuse_lost_gradients(session, sum(item is not None for item in items), failures)
    rms, elements = region_rms(run, algorithm, position, result, has_gradient)
    return result * (sum(weights.values()) / divisor(rms, elements))


def divisor(rms: float, elements: float) -> float:
    """The divisor of gradients, see `region_rms`; 1 where they are 0, or so small that fp32 has no quotient."""
    product = rms * elements
    return product if product >= _LEAST_DIVISOR else 1.0


def region_rms(
    run: Run, algorithm: RlConfig, position: Tensor, gradient: Tensor, counts: Tensor
) -> tuple[float, float]:
    """(Root mean square of the gradients over the region, mean number of elements of a region) of the rows of all
    processes that count; (0, 0) without such rows.

    Args:
        position: [n] of each row's example in the dataset.
        gradient: [n, C, h, w].
        counts: [n].
    """
    total = torch.zeros(3, dtype=torch.float64)  # sum of squares, elements, rows
    for i in counts.nonzero().flatten().tolist():
        condition = run.encoded.conditions([int(position[i])], torch.device("cpu"))
        region = objective_region(algorithm, condition, run.model.spec.downsampling)
        g = gradient[i].double()
        share = torch.ones_like(g) if region is None else region[0].double().expand_as(g)
        total += torch.stack([(share * g**2).sum(), share.sum(), total.new_ones(())])
    squares, elements, count = run.engine.sum(total).cpu()
    return (float((squares / elements).sqrt()), float(elements / count)) if elements > 0 else (0.0, 0.0)


def refuse_lost_gradients(session: Session, sampled: int, failures: list[Failure]) -> None:
    """Count samples without a gradient as those without a reward.

    Args:
        sampled: samples of the epoch on this process, without padding.

    Raises:
        FailureRateExceeded: on every process.
    """
    rewards = session.run.rewards
    if failures:
        logger.warning("%d of %d samples have no gradient: %s", len(failures), sampled, summary(failures))
    tally = Tally(sampled, len(failures), failures, (rewards.asked - sampled, rewards.failed))
    refuse_failures(session.run.engine.gather_list([tally]), session.config.reward_client, "gradient")
    rewards.count(0, len(failures))
