"""From noise to images: a model, a plan and seeds -> a trajectory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from retouch.core.steps import Estimate, gaussian_log_prob
from retouch.errors import fitting
from retouch.rollout.plan import StepPlan, deterministic, transition
from retouch.types import Condition, DiffusionModel, Diverged, Trajectory

if TYPE_CHECKING:
    from PIL.Image import Image

    from retouch.algorithms.base import Objective


@torch.no_grad()
def sample(
    model: DiffusionModel,
    network: nn.Module,
    plan: StepPlan,
    condition: Condition,
    seeds: Sequence[int],
    noise_seeds: Sequence[int] | None = None,
    region: Tensor | None = None,
    log_prob_mode: Literal["exact", "cps"] = "exact",
    *,
    keep_means: bool = False,
    share_first_step: bool = False,
) -> Trajectory:
    """Run the solver.

    Args:
        condition: B rows, one image each.
        seeds: B seeds; each row takes all its noise from its own generator on the CPU: an image does not depend on the
            batch it was sampled in.
        noise_seeds: B seeds of the initial noise where it is shared within a group; None: `seeds`. Rows with one noise
            seed must have one condition: the ODE steps before the first stochastic one are computed once for them.
        region: [B, 1, h, w] where log-probabilities are taken; None: everywhere.
        keep_means: record the means of the trained steps as well.
        share_first_step: the first stochastic step of rows with one noise seed, whose state is one, is computed once
            for them as well.

    Raises:
        OutOfMemory: the rows do not fit on the device.
    """
    batch = len(condition)
    if len(seeds) != batch:
        raise ValueError(f"{len(seeds)} seeds for {batch} rows")
    remedy = (
        f"rollout.batch_size_per_device={batch // 2}"
        if batch > 1
        else "model.dtype=bf16, model.offload_vae=true, model.offload_text_encoders=true, or a smaller data.resolution"
    )
    with fitting(f"while sampling {batch} images at once", remedy):
        device = next(iter(condition.tensors.values())).device
        shape = latent_shape(model, condition.size)
        x, generators = noise_for(shape, seeds, noise_seeds)
        x = x.to(device)
        # all noise [S, B, C, h, w] of the S stochastic steps before the first: the CPU would wait for a copy in each
        rows = [
            torch.randn(shape, generator=g, dtype=torch.float32) for _ in range(plan.stochastic) for g in generators
        ]
        fresh = torch.stack(rows or [x.new_zeros(0)]).reshape(plan.stochastic, batch, *shape).to(device)
        states: list[Tensor] = []
        means: list[Tensor] = []
        log_probs: list[Tensor] = []
        prefix = plan.first if plan.stochastic else 0
        together = share_first_step and plan.stochastic > 0
        x, first = _steps_before_window(model, network, plan, x, condition, prefix, noise_seeds, together=together)
        before: Estimate | None = None  # deterministic steps before the window are in the prefix
        for i in range(prefix, plan.num_steps):
            step = torch.full((batch,), i, dtype=torch.int64, device=device)
            recorded = plan.first <= i < plan.first + plan.trained
            if recorded and not states:
                states.append(x)
            if plan.first <= i < plan.first + plan.stochastic:
                mean, std = first or transition(model, network, plan, x, step, condition)
                first = None  # it is that of the first stochastic step
                x = mean + std.reshape(-1, 1, 1, 1) * fresh[i - plan.first]
                if recorded:
                    states.append(x)
                    log_probs.append(gaussian_log_prob(x, mean, std, region, log_prob_mode))
                    means += [mean] if keep_means else []
            else:
                x, before = deterministic(model, network, plan, x, step, condition, before)
                states += [x] if recorded else []
        return Trajectory(
            final=x,
            times=plan.schedule.times,
            first_step=plan.first,
            latents=torch.stack(states or [x], 1),
            log_probs=torch.stack(log_probs, 1) if log_probs else x.new_zeros(batch, 0),
            means=torch.stack(means, 1) if means else None,
        )


def _steps_before_window(
    model: DiffusionModel,
    network: nn.Module,
    plan: StepPlan,
    x: Tensor,
    condition: Condition,
    steps: int,
    noise_seeds: Sequence[int] | None,
    *,
    together: bool,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """The first ODE steps, computed once for rows that start from one noise -> (the states [B, C, h, w] after them, the
    Gaussians over the next ones if these are computed `together`, too: mean [B, C, h, w] and std [B])."""
    if steps == 0 and not together:
        return x, None
    first = {seed: row for row, seed in reversed(list(enumerate(noise_seeds or range(len(x)))))}
    rows = sorted(first.values())
    place = {row: i for i, row in enumerate(rows)}
    back = torch.tensor([place[first[seed]] for seed in noise_seeds or range(len(x))], dtype=torch.int64)
    index = torch.tensor(rows, dtype=torch.int64)  # a list would be copied to the device for every tensor
    few, lead = condition.select(index), x[index.to(x.device)]
    before: Estimate | None = None
    for i in range(steps):
        step = torch.full((len(rows),), i, dtype=torch.int64, device=x.device)
        lead, before = deterministic(model, network, plan, lead, step, few, before)
    back = back.to(x.device)
    if not together:
        return lead[back], None
    step = torch.full((len(rows),), steps, dtype=torch.int64, device=x.device)
    mean, std = transition(model, network, plan, lead, step, few)
    return lead[back], (mean[back], std.expand(len(mean))[back])


def noise_for(
    shape: Sequence[int], seeds: Sequence[int], noise_seeds: Sequence[int] | None = None
) -> tuple[Tensor, list[torch.Generator]]:
    """Initial noise [B, *shape] fp32 on the CPU, and each row's generator, to draw its further noise from."""
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    first = generators if noise_seeds is None else [torch.Generator().manual_seed(seed) for seed in noise_seeds]
    return torch.stack([torch.randn(tuple(shape), generator=g, dtype=torch.float32) for g in first]), generators


def latent_shape(model: DiffusionModel, size: tuple[int, int]) -> tuple[int, int, int]:
    """(C, h, w) of images of `size` (height, width)."""
    spec = model.spec
    return spec.latent_channels, size[0] // spec.downsampling, size[1] // spec.downsampling


def broken_rows(*tensors: Tensor) -> list[int]:
    """Indices of rows of tensors [B, ...] in any of which there is NaN or Inf."""
    finite = torch.stack([t.isfinite().flatten(1).all(1) for t in tensors]).all(0)
    return (~finite).nonzero().flatten().tolist()


def require_drawn(broken: Sequence[int], example: int) -> None:
    """Reject samples with NaN or Inf. For samples that are not scored; of a scored one, the reward fails.

    Raises:
        Diverged: `broken` is not empty.
    """
    if broken:
        raise Diverged(
            f"example {example}: its sample contains NaN or Inf; the weights are broken, or overflow in this "
            "precision; use an earlier checkpoint"
        )


def to_uint8(images: Tensor, strip: Image | None = None) -> Tensor:
    """[B, 3, H, W] in [-1, 1] -> [B, H, W, 3] uint8 on the CPU; NaN becomes black (see `broken_rows`).

    Args:
        strip: the in-context reference above each image, which is left out.
    """
    images = images if strip is None else images[:, :, strip.height :]
    return (
        ((images.nan_to_num(-1.0).clamp(-1, 1) + 1) * 127.5)
        .round()
        .to(torch.uint8)
        .permute(0, 2, 3, 1)
        .contiguous()
        .cpu()
    )


def latent_region(mask: Tensor, downsampling: int, dilation: int = 0, seam_weight: float = 1.0) -> Tensor:
    """Pixel mask [B, 1, H, W] -> latent weights [B, 1, h, w]: 1 for a cell with any repainted pixel, `seam_weight` for
    cells within `dilation` cells of these (in both axes), 0 elsewhere."""
    inside = nn.functional.max_pool2d(mask, downsampling)
    if not dilation:
        return inside
    grown = nn.functional.max_pool2d(inside, 2 * dilation + 1, stride=1, padding=dilation)
    return inside + seam_weight * (grown - inside)


def objective_region(objective: Objective, condition: Condition, downsampling: int) -> Tensor | None:
    """Where the run file wants a loss to be taken: latent weights [B, 1, h, w], or None for everywhere."""
    if objective.region == "all" or condition.mask is None:
        return None
    return latent_region(condition.mask, downsampling, objective.region_dilation, objective.seam_weight)
