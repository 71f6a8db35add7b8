"""Clean latents noised anew, for algorithms that train on the forward process (SFT, DPO, NFT)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from retouch.core.objectives.sft import denoising_rows
from retouch.core.schedule import Schedule
from retouch.data.sampler import derive_seed
from retouch.rollout.sampler import latent_noise
from retouch.training.build import Run
from retouch.types import Condition, DiffusionModel


@dataclass(frozen=True)
class NoisedRows:
    """B · W rows: W copies of each of B images, a row's copies together.

    Attributes:
        x0, x, noise: [B · W, C, h, w].
        time: [B · W] of the schedule.
    """

    condition: Condition
    schedule: Schedule
    x0: Tensor
    x: Tensor
    noise: Tensor
    time: Tensor


def noised_copies(
    run: Run, x0: Tensor, condition: Condition, generators: Sequence[torch.Generator], copies: int
) -> NoisedRows:
    """`copies` noised copies of each clean latent.

    Each row has its own generator. The times of its copies are stratified over equal shares of their distribution:
    independent ones would often lie close together. No time is noisier than the start of sampling: the model's output
    there affects no image.
    """
    device = run.engine.device
    schedule = run.model.schedule(run.config.rollout.num_steps, condition.size)
    noise = torch.stack([latent_noise(x0.shape[1:], g) for g in generators for _ in range(copies)]).to(device)
    draws = [(k + torch.rand((), generator=g, dtype=torch.float64)) / copies for g in generators for k in range(copies)]
    time = schedule.training_times(torch.stack(draws).clamp(1e-6, 1 - 1e-6), visited=True).to(device)
    wide = x0.to(device).repeat_interleave(copies, 0)
    rows = torch.arange(len(x0), dtype=torch.int64).repeat_interleave(copies)
    return NoisedRows(condition.select(rows), schedule, wide, schedule.add_noise(wide, noise, time), noise, time)


def denoising_error(
    model: DiffusionModel,
    network: nn.Module,
    schedule: Schedule,
    x0: Tensor,
    noise: Tensor,
    time: Tensor,
    condition: Condition,
    region: Tensor | None = None,
) -> Tensor:
    """Mean-squared error of the prediction at a noised `x0` -> [B]."""
    prediction = model.predict(network, schedule.add_noise(x0, noise, time), time, condition)
    return denoising_rows(prediction, schedule.target(x0, noise), region)


def row_generators(seeds: Sequence[int] | Tensor, *parts: int | str) -> list[torch.Generator]:
    """A generator for each row, from its own seed and the parts that name the step."""
    return [torch.Generator().manual_seed(derive_seed(int(seed), *parts)) for seed in seeds]
