"""Clean latents noised anew, for algorithms that train on the forward process (SFT, DPO, NFT)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from retouch.core.objectives.sft import denoising_rows
from retouch.core.schedule import Schedule
from retouch.data.sampler import derive_seed
from retouch.training.build import Run
from retouch.types import Condition, DiffusionModel


@dataclass(frozen=True)
class NoisedRows:
    """B · W rows: W copies of each of B images (or those of a piece), a row's copies together.

    Attributes:
        x0, x, noise: [B · W, C, h, w].
        time: [B · W] of the schedule: sigma, or a timestep of an epsilon model (`schedule.sigma(time)` is in [0, 1]).
        copies: W.
    """

    condition: Condition
    schedule: Schedule
    x0: Tensor
    x: Tensor
    noise: Tensor
    time: Tensor
    copies: int


def noised_copies(
    run: Run,
    x0: Tensor,
    condition: Condition,
    generators: Sequence[torch.Generator],
    copies: int,
    piece: range | None = None,
) -> NoisedRows:
    """`copies` noised copies of each clean latent, or those of a piece of them, which are the same in any piece.

    Each row has its own generator. The times of its copies are stratified over equal shares of their distribution:
    independent ones would often lie close together. No time is noisier than the start of sampling: the model's output
    there affects no image.
    """
    device = run.engine.device
    schedule = run.schedule(condition.size)
    # all are sampled, whichever are taken: a copy must not depend on how many are in a forward
    shape = x0.shape[1:]
    sampled = [[torch.randn(shape, generator=g, dtype=torch.float32) for _ in range(copies)] for g in generators]
    places = [
        [(k + torch.rand((), generator=g, dtype=torch.float64)) / copies for k in range(copies)] for g in generators
    ]
    taken = range(copies) if piece is None else piece
    noise = torch.stack([row[k] for row in sampled for k in taken]).to(device)
    draws = torch.stack([row[k] for row in places for k in taken])
    time = schedule.training_times(draws.clamp(1e-6, 1 - 1e-6), visited=True).to(device)
    wide = x0.to(device).repeat_interleave(len(taken), 0)
    return NoisedRows(
        condition.repeated(len(taken)), schedule, wide, schedule.add_noise(wide, noise, time), noise, time, len(taken)
    )


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
