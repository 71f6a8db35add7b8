"""Whether this machine computes as the one that made a set: a digest of what torch, diffusers and transformers compute
with the networks of the set, without the package. Kernels depend on the processor and on versions, and their sums round
differently; where the digest is the recorded one, they do not, and runs must be equal to the bit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLQwenImage,
    FluxTransformer2DModel,
    QwenImageTransformer2DModel,
    UNet2DConditionModel,
)
from torch import Tensor
from transformers import CLIPTextModel, Qwen2_5_VLForConditionalGeneration, SiglipVisionModel, T5EncoderModel

BATCHES = (1, 2, 4)
"""Batches of the runs; kernels depend on sizes."""


def digests(bases: Path) -> dict[str, str]:
    """Digest of the arithmetic with each base, by name."""
    return {base: digest(bases / base) for base in _COMPUTED}


def digest(base: Path) -> str:
    """SHA-256 of outputs, gradients and weights after two steps of AdamW."""
    found = hashlib.sha256()
    with _alone():
        for tensor in _COMPUTED[base.name](base):
            found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


@contextmanager
def _alone() -> Iterator[None]:
    """With one thread and seeds of its own."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            yield
    finally:
        torch.set_num_threads(threads)


def _trained(network: Any, forward: Callable[[int], Tensor]) -> Iterator[Tensor]:
    """What two steps compute, on each batch."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    for batch in BATCHES:
        for _ in range(2):
            optimizer.zero_grad()
            output = forward(batch)
            output.square().mean().backward()
            yield output
            yield torch.nn.utils.clip_grad_norm_(network.parameters(), 1e-3)
            optimizer.step()
    yield from network.parameters()


def _flux_fill(base: Path) -> Iterator[Tensor]:
    network: Any = _load(FluxTransformer2DModel, base / "transformer")

    def forward(batch: int) -> Tensor:
        return network(
            hidden_states=torch.randn(batch, 8, 96),
            encoder_hidden_states=torch.randn(batch, 24, 16),
            pooled_projections=torch.randn(batch, 16),
            timestep=torch.rand(batch),
            guidance=torch.ones(batch),
            img_ids=torch.randn(8, 3),
            txt_ids=torch.zeros(24, 3),
        ).sample

    yield from _trained(network, forward)
    yield from _encoded(base)
    text: Any = _load(T5EncoderModel, base / "text_encoder_2")
    yield text(input_ids=_tokens()).last_hidden_state


def _sd_inpaint(base: Path) -> Iterator[Tensor]:
    network: Any = _load(UNet2DConditionModel, base / "unet")
    forward = lambda batch: network(torch.randn(batch, 9, 4, 8), 7, torch.randn(batch, 24, 16)).sample  # noqa: E731
    yield from _trained(network, forward)
    yield from _encoded(base)


def _image_encoder(base: Path) -> Iterator[Tensor]:
    encoder: Any = _load(SiglipVisionModel, base)
    yield encoder(pixel_values=torch.randn(1, 3, 16, 16)).pooler_output


def _encoded(base: Path) -> Iterator[Tensor]:
    """Of the autoencoder and CLIP."""
    autoencoder: Any = _load(AutoencoderKL, base / "vae")
    for batch in BATCHES:
        latents = autoencoder.encode(torch.randn(batch, 3, 16, 32)).latent_dist.mean
        yield latents
        yield autoencoder.decode(latents).sample
    text: Any = _load(CLIPTextModel, base / "text_encoder")
    yield text(input_ids=_tokens()).last_hidden_state


def _qwen_image_edit(base: Path) -> Iterator[Tensor]:
    policy: Any = _load(Qwen2_5_VLForConditionalGeneration, base / "text_encoder")
    yield from _trained(policy.model.language_model, lambda batch: policy(input_ids=_tokens(batch)).logits)
    yield policy.model.visual(torch.randn(16, 1176), torch.tensor([[1, 4, 4]]))[0]
    network: Any = _load(QwenImageTransformer2DModel, base / "transformer")
    for batch in BATCHES:
        yield network(
            hidden_states=torch.randn(batch, 32, 16),
            encoder_hidden_states=torch.randn(batch, 40, 16),
            encoder_hidden_states_mask=torch.ones(batch, 40, dtype=torch.bool),
            timestep=torch.rand(batch),
            img_shapes=[[(1, 4, 4), (1, 4, 4)]] * batch,
        ).sample
    autoencoder: Any = _load(AutoencoderKLQwenImage, base / "vae")
    latents = autoencoder.encode(torch.randn(2, 3, 1, 32, 32)).latent_dist.mean
    yield latents
    yield autoencoder.decode(latents).sample


def _tokens(batch: int = 1) -> Tensor:
    return torch.randint(60, 120, (batch, 24))


def _load(kind: Any, folder: Path) -> Any:
    return kind.from_pretrained(folder, dtype=torch.float32).eval()


_COMPUTED: dict[str, Callable[[Path], Iterator[Tensor]]] = {
    "flux_fill": _flux_fill,
    "sd_inpaint": _sd_inpaint,
    "qwen_image_edit": _qwen_image_edit,
    "image_encoder": _image_encoder,
}
