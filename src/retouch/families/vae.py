"""Autoencoders that take less: less memory (a picture at a time, in tiles, or on the CPU between its uses), and less
time where one made for video is given pictures."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from retouch.families.sections import Model


def save_memory(vae: Any, config: Model, device: torch.device) -> None:
    """Apply `model.vae_batch` and `model.offload_vae` in place.

    Args:
        vae: an autoencoder of diffusers.
        device: that it computes on.
    """
    if config.vae_batch in ("one", "tiles"):
        vae.enable_slicing()
    if config.vae_batch == "tiles":
        vae.enable_tiling()
    if config.offload_vae:
        for name in ("encode", "decode"):
            setattr(vae, name, _on_device(vae, getattr(vae, name), device))
        vae.to("cpu")


class FrameConv3d(QwenImageCausalConv3d):
    """A convolution over frames and those before them that does not compute with frames that are not there.

    Before the first frame there are only zeros, so that a single frame becomes its two-dimensional convolution with the
    last of the kernel's slices; for a kernel of three frames that is a third of the work.
    """

    def forward(self, x: Tensor, cache_x: Tensor | None = None) -> Tensor:
        padding: Any = self._padding  # its own, causal one
        left, _, top, _, before, _ = padding
        if x.shape[2] != 1 or cache_x is not None or before != self.kernel_size[0] - 1:
            return super().forward(x, cache_x)
        kernel = self.weight[:, :, -1]
        return functional.conv2d(x[:, :, 0], kernel, self.bias, self.stride[1:], (top, left))[:, :, None]


def frame_by_frame(vae: Any) -> None:
    """Let the autoencoder of Qwen-Image, which was made for video, take pictures as pictures; in place."""
    for module in vae.modules():
        if type(module) is QwenImageCausalConv3d and hasattr(module, "_padding"):
            module.__class__ = FrameConv3d


def _on_device(vae: Any, method: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """The method with the weights on the device for as long as it runs."""

    @wraps(method)
    def moved(*args: Any, **options: Any) -> Any:
        vae.to(device)
        try:
            return method(*args, **options)
        finally:
            vae.to("cpu")

    return moved
