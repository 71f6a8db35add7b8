"""From noise to images: a model, a plan and seeds -> a trajectory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from retouch.core.steps import gaussian_log_prob
from retouch.rollout.plan import StepPlan
from retouch.rollout.transition import deterministic, transition
from retouch.types import Condition, DiffusionModel, Trajectory


@torch.no_grad()
def sample(
    model: DiffusionModel,
    network: nn.Module,
    plan: StepPlan,
    condition: Condition,
    seeds: Sequence[int],
    noise_seeds: Sequence[int] | None = None,
    region: Tensor | None = None,
) -> Trajectory:
    """Run the solver.

    Args:
        condition: B rows, one image each.
        seeds: B seeds; each row draws all its noise from a generator of its own, on the CPU, so that an image does not
            depend on the batch it was sampled in.
        noise_seeds: B seeds of the initial noise where it is shared within a group; None: `seeds`.
        region: [B, 1, h, w] where log-probabilities are taken; None: everywhere.
    """
    batch = len(condition)
    if len(seeds) != batch:
        raise ValueError(f"{len(seeds)} seeds for {batch} rows")
    device = next(iter(condition.tensors.values())).device
    shape = latent_shape(model, condition.size)
    x, generators = noise_for(shape, seeds, noise_seeds)
    x = x.to(device)
    states: list[Tensor] = []
    log_probs: list[Tensor] = []
    for i in range(plan.num_steps):
        step = torch.full((batch,), i, device=device)
        recorded = plan.first <= i < plan.first + plan.trained
        if recorded and not states:
            states.append(x)
        if plan.is_stochastic(i):
            mean, std = transition(model, network, plan, x, step, condition)
            fresh = torch.stack([torch.randn(shape, generator=g) for g in generators]).to(device)
            x = mean + std.reshape(-1, 1, 1, 1) * fresh
            if recorded:
                states.append(x)
                log_probs.append(gaussian_log_prob(x, mean, std, region))
        else:
            x = deterministic(model, network, plan, x, step, condition)
    kept = torch.stack(states, 1) if states else x.new_zeros(batch, 1, *shape)
    recorded_log_probs = torch.stack(log_probs, 1) if log_probs else x.new_zeros(batch, 0)
    return Trajectory(x, plan.schedule.times, plan.first, kept, recorded_log_probs)


def noise_for(
    shape: Sequence[int], seeds: Sequence[int], noise_seeds: Sequence[int] | None = None
) -> tuple[Tensor, list[torch.Generator]]:
    """Initial noise [B, *shape] fp32 on the CPU, and each row's generator, to draw its further noise from."""
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    if noise_seeds is None:
        return torch.stack([torch.randn(tuple(shape), generator=g) for g in generators]), generators
    first = [torch.Generator().manual_seed(seed) for seed in noise_seeds]
    return torch.stack([torch.randn(tuple(shape), generator=g) for g in first]), generators


def latent_shape(model: DiffusionModel, size: tuple[int, int]) -> tuple[int, int, int]:
    """(C, h, w) of images of `size` (height, width)."""
    spec = model.spec
    return spec.latent_channels, size[0] // spec.downsampling, size[1] // spec.downsampling


def to_uint8(images: Tensor) -> Tensor:
    """[B, 3, H, W] in [-1, 1] -> [B, H, W, 3] uint8 on the CPU."""
    return ((images.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().cpu()
