"""Frozen autoencoders: images to latents and back, with less memory (a few images at a time, in tiles, or on the CPU
between uses) and, where one made for video encodes single frames, in less time."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from retouch.errors import fitting
from retouch.families.offload import OffloadedNetworks
from retouch.lru import LruCache

if TYPE_CHECKING:
    from retouch.families.embeddings import EmbeddingCache

KEPT = 512
"""Images whose latents are kept; 256 KiB each for FLUX at 512 x 512."""

_LESS = "model.vae_batch=one, or model.vae_batch=tiles for large images"
"""Remedies where memory ends."""


class Autoencoder:
    """An `AutoencoderKL` of diffusers: images [B, 3, H, W] in [-1, 1] <-> latents [B, C, h, w] fp32.

    Images are encoded by the mode of the posterior: latents are then a function of their image.

    Args:
        vae: of diffusers, in the pipeline's layout.
        device: where it computes.
        batch: images at a time (`model.vae_batch`).
        offload: whether it is on the CPU between uses.
        stored: latents on disk that are looked up first.

    Attributes:
        placement: where the networks are.
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
        self.stored = stored
        self.placement = OffloadedNetworks([vae], offload)
        if offload:
            vae.to("cpu")
        self._kept: LruCache[str, Tensor] = LruCache(KEPT)
        limit_batch(vae, batch)
        self.to(device)

    def to(self, device: torch.device | str) -> None:
        """Set the device to compute on."""
        self.device = torch.device(device)
        self.placement.to(self.device)

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
        with fitting(f"while encoding {len(images)} images", _LESS), self.placement.on_device():
            latents = self._encode(images)
        if self.stored is not None:
            self.stored.add_images(images, latents)
        return latents

    def encode_once(self, images: Tensor) -> Tensor:
        """As `encode`, each image alone and only the first time; latents are kept on the CPU, and returned on the
        device of the images. They depend neither on the prompt nor on the guidance scale."""
        pixels = [image.cpu().contiguous() for image in images]
        keys = [hashlib.sha256(str(tuple(p.shape)).encode() + p.numpy().tobytes()).hexdigest() for p in pixels]
        rows = dict(zip(keys, images, strict=True))
        with self.placement.kept_on_device():
            latents = self._kept.get_all(keys, lambda missing: [self.encode(rows[k][None])[0].cpu() for k in missing])
        return torch.stack(latents).to(images.device)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """[B, C, h, w] -> [B, 3, H, W] fp32 in [-1, 1], or NaN where the network returns NaN or Inf."""
        with (
            fitting(f"while decoding {len(latents)} images", _LESS),
            self.placement.on_device(),
            self.vae.decoder.register_forward_hook(_nan_for_inf),
        ):
            return self._decode(latents.float()).float().clamp(-1, 1)

    def latent_gradient(
        self, latents: Tensor, pixel_gradient: Callable[[Tensor], Tensor], *, checkpointing: bool
    ) -> Tensor:
        """The gradient of a function of the decoded images by their latents, [B, C, h, w] fp32 on this device.

        On its way through the decoder it is scaled by a power of two to about 1: its dtype may be fp16, in which the
        gradient of a mean over a million pixels would be 0.

        Args:
            latents: [B, C, h, w], on any device.
            pixel_gradient: the decoded images [B, 3, H, W] fp32 -> the gradient by them, of this shape. They are not
                clamped to [-1, 1].
            checkpointing: computes each block of the decoder again in the backward and keeps only its input.
        """
        blocks = decoder_blocks(self.vae.decoder) if checkpointing else []
        with self.placement.on_device(), torch.enable_grad(), recomputed(blocks):
            latents = latents.detach().to(self.device, torch.float32).requires_grad_()
            decoded = self.decode_unclamped(latents).float()
            gradient = pixel_gradient(decoded.detach())
            exponent = torch.frexp(gradient.abs().max()).exponent.clamp(-120, 120)
            return torch.ldexp(torch.autograd.grad(decoded, latents, torch.ldexp(gradient, -exponent))[0], exponent)

    def decode_unclamped(self, latents: Tensor) -> Tensor:
        """[B, C, h, w] -> [B, 3, H, W] as the network returns it, beyond [-1, 1], too."""
        return self._decode(latents)

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


class QwenAutoencoder(Autoencoder):
    """The autoencoder of Qwen-Image, which was made for video, on single frames."""

    def __init__(self, vae: Any, *args: Any, **options: Any) -> None:
        frame_by_frame(vae)
        self._mean, self._std = (
            torch.tensor(list(values), dtype=torch.float32).view(1, -1, 1, 1)
            for values in (vae.config.latents_mean, vae.config.latents_std)
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
        with single_frames(self.vae):
            latents = self.vae.encode(frames).latent_dist.mode()[:, :, 0].float()
        return (latents - self._mean.to(latents)) / self._std.to(latents)

    def _decode(self, latents: Tensor) -> Tensor:
        with single_frames(self.vae):
            return self.vae.decode(self._frames(latents)).sample[:, :, 0]

    def decode_unclamped(self, latents: Tensor) -> Tensor:
        """Without diffusers' clamp and tiles."""
        return self._decoded_frames(self.vae.post_quant_conv(self._frames(latents)))[:, :, 0]

    def _decoded_frames(self, frames: Tensor) -> Tensor:
        return self.vae.decoder(frames)

    def _frames(self, latents: Tensor) -> Tensor:
        """-> [B, C, 1, h, w] as the network takes them."""
        latents = latents * self._std.to(latents.device) + self._mean.to(latents.device)
        return latents.to(self.device, self.vae.dtype)[:, :, None]


def _nan_for_inf(_: nn.Module, __: object, decoded: Tensor) -> Tensor:
    """NaN in place of Inf, of which a clamp, also that of diffusers, would make white or black."""
    return decoded.masked_fill(decoded.isinf(), torch.nan)


def decoder_blocks(decoder: Any) -> list[nn.Module]:
    """The residual, attention and upsampling blocks of a decoder of diffusers."""
    kinds = ("resnets", "attentions", "upsamplers")
    return [block for name, block in decoder.named_modules() if name.split(".")[-2:-1] in ([kind] for kind in kinds)]


@contextmanager
def recomputed(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, each of these blocks keeps only its input for the backward."""
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def gradient_bytes(autoencoder: Autoencoder, latents: Tensor) -> tuple[int, int]:
    """Bytes of the activations that `Autoencoder.latent_gradient` keeps for its backward at most, without and with
    checkpointing: then the inputs of all blocks, and what the largest block keeps while it is computed again.

    Args:
        latents: of the shape to decode; with tensors without data nothing is computed.
    """
    storages = [weight.untyped_storage() for weight in autoencoder.vae.parameters()]
    seen, kept, inputs, inside = {storage._cdata for storage in storages}, Counter[int](), Counter[int](), [-1]

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            storages.append(storage)  # no other tensor may take its place
            kept[inside[0]] += storage.nbytes()
        return tensor

    def enter(number: int, _: nn.Module, given: tuple[Tensor, ...]) -> None:
        inside[0], inputs[number] = number, given[0].nbytes

    def leave(*_: Any) -> None:
        inside[0] = -1

    with ExitStack() as hooks:
        for number, block in enumerate(decoder_blocks(autoencoder.vae.decoder)):
            hooks.enter_context(block.register_forward_pre_hook(partial(enter, number)))
            hooks.enter_context(block.register_forward_hook(leave))
        hooks.enter_context(torch.enable_grad())
        hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor))
        autoencoder.decode_unclamped(latents.requires_grad_())
    whole, outside = kept.total(), kept.pop(-1, 0)
    return whole, outside + inputs.total() + max(kept.values())


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


@contextmanager
def single_frames(vae: Any) -> Iterator[None]:
    """Inside, Qwen-Image's autoencoder copies no input of a convolution for the frame that follows: an image has none.
    Encoded and decoded numbers stay the same."""

    def keep_nothing() -> None:
        vae._feat_map = vae._enc_feat_map = None

    vae.clear_cache = keep_nothing  # diffusers calls it before a video, and before each tile of one
    try:
        yield
    finally:
        del vae.clear_cache


def frame_by_frame(vae: Any) -> None:
    """Make every causal convolution of Qwen-Image's autoencoder a `FrameConv3d`, in place: weights and names stay."""
    for module in vae.modules():
        if type(module) is QwenImageCausalConv3d and hasattr(module, "_padding"):
            module.__class__ = FrameConv3d
