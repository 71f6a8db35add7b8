"""Images from given text states, by a frozen Qwen-Image(-Edit): how completions of a text encoder in training become
images. Requests whose states differ in length share one masked forward a step.

Legend: B requests of a batch, K images of one request, L text tokens of a request, D width.
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
class ImageRequest:
    """One image to generate, or K images from the same text.

    Attributes:
        text: [L, D] states of the chat without its system part and padding, any dtype and device.
        noise_seed: seed of the initial noise: image k of two requests with the same seed starts from the same noise.
        size: (height, width) in pixels.
        negative: [L', D] states of the negative prompt; None without guidance (guidance_scale 1).
        sources: images to edit, each at the size at which the diffusion model reads it; empty for text to image.
    """

    text: Tensor
    noise_seed: int
    size: tuple[int, int]
    negative: Tensor | None = None
    sources: tuple[Image, ...] = ()


def freeze(model: QwenModel) -> None:
    """Put the diffusion model and its autoencoder in eval mode, without gradients."""
    for network in (model.network, model.vae):
        network.eval().requires_grad_(False)


@torch.no_grad()
def generate_images(
    model: QwenModel,
    requests: Sequence[ImageRequest],
    num_steps: int,
    guidance_scale: float = 1.0,
    images_per_request: int = 1,
    batch_size: int = 8,
    clock: Stopwatch | None = None,
) -> list[Tensor]:
    """Solve the plain ODE from each request's noise.

    Args:
        num_steps: 50 as released; 8 with a Lightning LoRA in the network, at guidance_scale 1.
        guidance_scale: true classifier-free guidance with rescaling, 4 as released; above 1 every request needs its
            `negative`.
        batch_size: images of one forward; changes memory and speed, and images by rounding only.
        clock: the autoencoder's time is recorded as "vae"; the rest belongs to the caller's part.

    Returns:
        [K, 3, H, W] fp32 in [-1, 1] of each request, in order, on the CPU.

    Raises:
        RuntimeError: the diffusion model is not frozen.
        ValueError: sources or negatives that do not fit.
    """
    _require_frozen(model.network)
    clock = clock or Stopwatch()
    images: dict[tuple[int, int], Tensor] = {}
    latents: dict[int, Tensor] = {}
    # Latents are kept by the identity of the image: requests and batches that share a source encode it once. Seeds do
    # not depend on the batch, whose size changes images by rounding only.
    for size, slots in _batches(requests, images_per_request, batch_size):
        chunk = [requests[i] for i, _ in slots]
        for source in (source for request in chunk for source in request.sources):
            if id(source) not in latents:
                with clock.part("vae"):
                    latents[id(source)] = model.encode_picture(source)
        condition = model.condition_on(
            [request.text for request in chunk],
            size,
            guidance_scale,
            [request.negative for request in chunk if request.negative is not None],
            [[latents[id(source)] for source in request.sources] for request in chunk],
        )
        seeds = [derive_seed("draw", requests[i].noise_seed, k) for i, k in slots]
        plan = ode_plan(model.schedule(num_steps, size))
        final = sample(model, model.network, plan, condition, seeds).final
        with clock.part("vae"):
            decoded = model.decode(final).cpu()
        images |= dict(zip(slots, decoded, strict=True))
    return [torch.stack([images[i, k] for k in range(images_per_request)]) for i in range(len(requests))]


@contextmanager
def placed_on(model: QwenModel, device: Any, home: Any = "cpu") -> Iterator[None]:
    """Move diffusion model and autoencoder to `device`, and back to `home` at the end, which frees memory."""
    _place(model, device)
    try:
        yield
    finally:
        _place(model, home)


def _place(model: QwenModel, device: Any) -> None:
    model.network.to(device)
    model.to(device)


def _batches(
    requests: Sequence[ImageRequest], images_per_request: int, batch_size: int
) -> Iterator[tuple[tuple[int, int], list[tuple[int, int]]]]:
    """(size, [(request, k), ...]) of the images of one forward: of one size, with sources of the same sizes."""
    groups: dict[Any, list[tuple[int, int]]] = {}
    for i, request in enumerate(requests):
        key = (request.size, tuple(source.size for source in request.sources))
        groups.setdefault(key, []).extend((i, k) for k in range(images_per_request))
    for (size, _), slots in groups.items():
        for start in range(0, len(slots), batch_size):
            yield size, slots[start : start + batch_size]


def _require_frozen(network: nn.Module) -> None:
    trained = next((name for name, parameter in network.named_parameters() if parameter.requires_grad), None)
    if trained is not None:
        raise RuntimeError(f"the diffusion model must be frozen, but {trained} requires a gradient; call freeze")
    if any(module.training for module in network.modules()):
        raise RuntimeError("the diffusion model is in training mode, with dropout; call freeze")
