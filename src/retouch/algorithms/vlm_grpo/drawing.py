"""Pictures from text states that somebody else computed, by a frozen Qwen-Image(-Edit): what a text encoder in training
is judged by. Rows whose states differ in length are drawn in one masked forward a step.

Legend: B rows, K pictures of one row, L text tokens of a row, D width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor, nn

from retouch.data.sampler import derive_seed
from retouch.families.qwen.base import QwenModel
from retouch.observe.timing import Stopwatch
from retouch.rollout.plan import ode_plan
from retouch.rollout.sampler import sample


@dataclass(frozen=True)
class Drawing:
    """One picture to draw, or K of the same.

    Attributes:
        text: [L, D] states of the chat without its system part and padding, any dtype and device.
        noise_seed: rows of one seed start from the same noise, picture k of one as picture k of the other.
        size: (height, width) in pixels.
        negative: [L', D] what guidance steers away from; None where there is none (guidance_scale 1).
        sources: pictures to edit, each at the size at which the network shall see it; none for text to image.
    """

    text: Tensor
    noise_seed: int
    size: tuple[int, int]
    negative: Tensor | None = None
    sources: tuple[Image, ...] = ()


def freeze(model: QwenModel) -> None:
    """Nothing of the network or the autoencoder learns or drops out from here on."""
    for network in (model.network, model.vae):
        network.eval().requires_grad_(False)


@torch.no_grad()
def draw(
    model: QwenModel,
    drawings: Sequence[Drawing],
    num_steps: int,
    guidance_scale: float = 1.0,
    images_per_drawing: int = 1,
    batch_size: int = 8,
    clock: Stopwatch | None = None,
) -> list[Tensor]:
    """The plain ODE from each row's noise.

    Args:
        num_steps: 50 as released; 8 with a Lightning adapter in the network, at guidance_scale 1.
        guidance_scale: 4 as released, of true guidance that is scaled back; every drawing then needs its `negative`.
        batch_size: pictures of one forward; changes memory and speed, not pictures beyond rounding.
        clock: is told what the autoencoder takes; the rest is the caller's part.

    Returns:
        [K, 3, H, W] fp32 in [-1, 1] of each drawing, in order, on the CPU.

    Raises:
        RuntimeError: a network that is in training; `freeze` it.
        ValueError: sources or negatives that do not fit.
    """
    _require_frozen(model.network)
    clock = clock or Stopwatch()
    images: dict[tuple[int, int], Tensor] = {}
    latents: dict[int, Tensor] = {}
    for size, rows in _batches(drawings, images_per_drawing, batch_size):
        chunk = [drawings[i] for i, _ in rows]
        for picture in (p for drawing in chunk for p in drawing.sources):
            if id(picture) not in latents:
                with clock.part("vae"):
                    latents[id(picture)] = model.encode_picture(picture)
        condition = model.condition_on(
            [drawing.text for drawing in chunk],
            size,
            guidance_scale,
            [drawing.negative for drawing in chunk if drawing.negative is not None],
            [[latents[id(picture)] for picture in drawing.sources] for drawing in chunk],
        )
        seeds = [derive_seed("draw", drawings[i].noise_seed, k) for i, k in rows]
        plan = ode_plan(model.schedule(num_steps, size))
        final = sample(model, model.network, plan, condition, seeds).final
        with clock.part("vae"):
            decoded = model.decode(final).cpu()
        images |= dict(zip(rows, decoded, strict=True))
    return [torch.stack([images[i, k] for k in range(images_per_drawing)]) for i in range(len(drawings))]


@contextmanager
def drawing_on(model: QwenModel, device: Any, home: Any = "cpu") -> Iterator[None]:
    """Network and autoencoder on `device`, and back at `home` afterwards: room for what trains between drawings."""
    _place(model, device)
    try:
        yield
    finally:
        _place(model, home)


def _place(model: QwenModel, device: Any) -> None:
    model.network.to(device)
    model.to(device)


def _batches(
    drawings: Sequence[Drawing], images_per_drawing: int, batch_size: int
) -> Iterator[tuple[tuple[int, int], list[tuple[int, int]]]]:
    """(drawing, k) of pictures that fit into one forward: of one size, with sources of the same sizes."""
    alike: dict[Any, list[tuple[int, int]]] = {}
    for i, drawing in enumerate(drawings):
        key = (drawing.size, tuple(picture.size for picture in drawing.sources))
        alike.setdefault(key, []).extend((i, k) for k in range(images_per_drawing))
    for (size, _), rows in alike.items():
        for start in range(0, len(rows), batch_size):
            yield size, rows[start : start + batch_size]


def _require_frozen(network: nn.Module) -> None:
    learns = next((name for name, parameter in network.named_parameters() if parameter.requires_grad), None)
    if learns is not None:
        raise RuntimeError(f"the network that draws must be frozen, but {learns} requires a gradient; call freeze")
    if any(module.training for module in network.modules()):
        raise RuntimeError("the network that draws is in training mode, where it drops out; call freeze")
