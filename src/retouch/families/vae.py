"""Frozen autoencoders: images to latents and back, with less memory (a few images at a time, in tiles, or on the CPU
between uses) and, where one made for video encodes single frames, in less time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d
from torch import Tensor
from torch.nn import functional

from retouch.lru import LruCache

if TYPE_CHECKING:
    from retouch.families.embeddings import EmbeddingCache

KEPT = 512
"""Images whose latents are kept; 256 KiB each for FLUX at 512 x 512."""


class Autoencoder:
    """An `AutoencoderKL` of diffusers: images [B, 3, H, W] in [-1, 1] <-> latents [B, C, h, w] fp32.

    Images are encoded by the mode of the posterior: latents are then a function of their image.

    Args:
        vae: of diffusers, in the pipeline's layout.
        device: where it computes.
        batch: images at a time (`model.vae_batch`).
        offload: whether it is on the CPU between uses.
        stored: latents on disk that are looked up first.
    """

    def __init__(
        self,
        vae: Any,
        device: torch.device | str = "cpu",
        batch: Literal["all", "one", "tiles"] = "all",
        *,
        offload: bool = False,
        stored: EmbeddingCache | None = None,
    ) -> None:
        self.vae = vae
        self.offload = offload
        self.stored = stored
        self._kept: LruCache[str, Tensor] = LruCache(KEPT)
        limit_batch(vae, batch)
        self.to(device)

    def to(self, device: torch.device | str) -> None:
        """Set the device to compute on."""
        self.device = torch.device(device)
        self.vae.to("cpu" if self.offload else self.device)

    @property
    def downsampling(self) -> int:
        """Pixels per side of a latent cell."""
        return 2 ** (len(self.vae.config.block_out_channels) - 1)

    @property
    def channels(self) -> int:
        """C of the latents."""
        return self.vae.config.latent_channels

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, C, h, w]; a batch whose images are all stored is looked up."""
        if self.stored is not None:
            rows = [self.stored.image(row) for row in images]
            known = [row for row in rows if row is not None]
            if len(known) == len(rows):
                return torch.stack(known).to(self.device)
        with self._in_use():
            latents = self._encode(images)
        if self.stored is not None:
            self.stored.add_images(images, latents)
        return latents

    def encode_once(self, images: Tensor) -> Tensor:
        """As `encode`, each image alone and only the first time; latents are kept on the CPU, and returned on the
        device of the images. They depend neither on the prompt nor on the guidance scale."""
        pixels = [image.cpu().contiguous() for image in images]
        keys = [hashlib.sha256(str(tuple(p.shape)).encode() + p.numpy().tobytes()).hexdigest() for p in pixels]
        latents = self._kept.get_all(keys, lambda rows: [self.encode(images[i][None])[0].cpu() for i in rows])
        return torch.stack(latents).to(images.device)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """[B, C, h, w] -> [B, 3, H, W] fp32 in [-1, 1]."""
        with self._in_use():
            return self._decode(latents.float()).float().clamp(-1, 1)

    def _encode(self, images: Tensor) -> Tensor:
        """-> fp32 latents, shifted and scaled."""
        config = self.vae.config
        latents = self.vae.encode(images.to(self.device, self.vae.dtype)).latent_dist.mode().float()
        if config.shift_factor is not None:
            latents = latents - config.shift_factor
        return latents * config.scaling_factor

    def _decode(self, latents: Tensor) -> Tensor:
        config = self.vae.config
        latents = latents / config.scaling_factor
        if config.shift_factor is not None:
            latents = latents + config.shift_factor
        return self.vae.decode(latents.to(self.device, self.vae.dtype)).sample

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """With the weights on the device."""
        if not self.offload:
            yield
            return
        self.vae.to(self.device)
        try:
            yield
        finally:
            self.vae.to("cpu")


class QwenAutoencoder(Autoencoder):
    """The autoencoder of Qwen-Image, which was made for video, on single frames."""

    def __init__(self, vae: Any, *args: Any, **options: Any) -> None:
        frame_by_frame(vae)
        self._mean, self._std = (
            torch.tensor(list(values)).view(1, -1, 1, 1) for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        super().__init__(vae, *args, **options)

    @property
    def downsampling(self) -> int:
        return 2 ** len(self.vae.temperal_downsample)  # diffusers' spelling

    @property
    def channels(self) -> int:
        return self.vae.config.z_dim

    def _encode(self, images: Tensor) -> Tensor:
        frames = images.to(self.device, self.vae.dtype)[:, :, None]
        latents = self.vae.encode(frames).latent_dist.mode()[:, :, 0].float()
        return (latents - self._mean.to(latents)) / self._std.to(latents)

    def _decode(self, latents: Tensor) -> Tensor:
        latents = latents * self._std.to(latents.device) + self._mean.to(latents.device)
        return self.vae.decode(latents.to(self.device, self.vae.dtype)[:, :, None]).sample[:, :, 0]


def limit_batch(vae: Any, batch: Literal["all", "one", "tiles"]) -> None:
    """Apply `model.vae_batch` to an autoencoder of diffusers."""
    if batch != "all":
        vae.enable_slicing()
    if batch == "tiles":
        vae.enable_tiling()


class FrameConv3d(QwenImageCausalConv3d):
    """A causal convolution over frames that does not compute with the zeros before the first frame.

    A single frame becomes its two-dimensional convolution with the last slice of the kernel; for a kernel of three
    frames that is a third of the work.
    """

    def forward(self, x: Tensor, cache_x: Tensor | None = None) -> Tensor:
        padding: Any = self._padding  # its own, causal one
        left, _, top, _, before, _ = padding
        if x.shape[2] != 1 or cache_x is not None or before != self.kernel_size[0] - 1:
            return super().forward(x, cache_x)
        kernel = self.weight[:, :, -1]
        return functional.conv2d(x[:, :, 0], kernel, self.bias, self.stride[1:], (top, left))[:, :, None]


def frame_by_frame(vae: Any) -> None:
    """Make every causal convolution of Qwen-Image's autoencoder a `FrameConv3d`, in place: weights and names stay."""
    for module in vae.modules():
        if type(module) is QwenImageCausalConv3d and hasattr(module, "_padding"):
            module.__class__ = FrameConv3d
