"""Shared by the trainings of the tiny bases: optimizer steps, the autoencoder, pixels and files."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from retouch.config.errors import ConfigError
from retouch.files.disk import only_writer

logger = logging.getLogger(__name__)

CARD = "card.json"
"""Facts of a network of the package, beside its weights."""


class Updates:
    """Optimizer steps of AdamW: `for step in updates: updates.apply(loss)`.

    The learning rate grows linearly over `ramp` steps, then follows a cosine down to 2 % of its peak; the gradient norm
    is clipped to 1.
    """

    def __init__(
        self,
        name: str,
        parameters: Iterable[nn.Parameter],
        steps: int,
        peak: float,
        ramp: int,
        betas: tuple[float, float] = (0.9, 0.99),
    ) -> None:
        self.name, self.steps, self.peak, self.ramp = name, steps, peak, ramp
        self.parameters = list(parameters)
        self.optimizer = torch.optim.AdamW(self.parameters, betas=betas, weight_decay=0.01)
        self.step = 0

    def __iter__(self) -> Iterator[int]:
        for step in range(self.steps):
            cosine = 0.5 * (1 + math.cos(math.pi * step / self.steps)) + 0.02
            for group in self.optimizer.param_groups:
                group["lr"] = self.peak * min(1.0, (step + 1) / self.ramp) * cosine
            self.step = step
            yield step

    def apply(self, loss: Tensor) -> None:
        """One optimizer step."""
        update(self.optimizer, loss, self.parameters)
        if self.step % 50 == 0:
            logger.info("%s step %d: loss %.3f", self.name, self.step, float(loss.detach()))


def update(optimizer: torch.optim.Optimizer, loss: Tensor, parameters: Iterable[nn.Parameter]) -> None:
    """One optimizer step with the gradient norm clipped to 1."""
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()


def train_autoencoder(vae: Any, batch: Callable[[], Tensor], updates: Updates, noise: torch.Generator) -> None:
    """Train reconstruction with noisy latents, then freeze.

    Args:
        batch: the next images, in [-1, 1].
        noise: generator of the latents' noise.
    """
    vae.train()
    for _ in updates:
        x = batch()
        mean = vae.encode(x).latent_dist.mean
        error = vae.decode(mean + 0.05 * torch.randn(mean.shape, generator=noise)).sample - x
        updates.apply(4 * error.square().mean() + 0.5 * error.abs().mean() + 1e-3 * mean.square().mean())
    vae.eval().requires_grad_(False)


def pixels_of(images: Sequence[Image.Image]) -> Tensor:
    """RGB images of one size -> [N, 3, H, W] in [-1, 1]."""
    stacked = np.stack([np.asarray(image, np.float32) for image in images])
    return torch.from_numpy(stacked).permute(0, 3, 1, 2) / 127.5 - 1


def networks_of(pipeline: Any) -> list[nn.Module]:
    """The networks of a diffusers pipeline."""
    return [component for component in pipeline.components.values() if isinstance(component, nn.Module)]


def save_half(pipeline: Any, out: Path) -> None:
    """Write a diffusers folder with fp16 weights."""
    for network in networks_of(pipeline):
        network.half()
    pipeline.save_pretrained(out, safe_serialization=True)


def save_weights(network: nn.Module, path: Path) -> None:
    """Write one network as a safetensors file of fp16 weights."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.half().contiguous() for name, tensor in network.state_dict().items()}, path)


def write_card(out: Path, card: dict[str, Any], started: float, drawn: float) -> dict[str, Any]:
    """Write `out/card.json` -> the card, and the seconds from `started` until `drawn`, and until now."""
    (out / CARD).write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
    return card | {"seconds": {"drawing": round(drawn - started, 1), "in all": round(monotonic() - started, 1)}}


@contextmanager
def empty_folder(out: Path) -> Iterator[None]:
    """Within it, `out` is a folder without files of others, which this process alone builds in.

    Raises:
        ConfigError: it is a file, holds files, or another process builds in it.
    """
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out: {out} is a file; choose another folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        out.mkdir()
        is_new = True
    except FileExistsError:
        is_new = False
        if not out.is_dir():  # a link to nowhere
            raise
    with only_writer(out):  # another process may be there already, in a folder that this one made
        require_empty(out)
        try:
            yield
        except BaseException:
            if is_new:
                with suppress(OSError):  # it holds files
                    out.rmdir()
            raise


def require_empty(out: Path) -> None:
    """Raises: ConfigError: an `out` that holds files."""
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"--out: {out} is not empty; choose another folder")


def write_result(out: Path, result: dict[str, Any]) -> dict[str, Any]:
    """Write `out/base.json`: the measures of the committed base are what another build should reach."""
    (out / "base.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result
