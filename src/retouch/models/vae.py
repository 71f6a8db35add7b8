"""An autoencoder that takes less memory: a picture at a time, in tiles, or on the CPU between its uses."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from retouch.config.model_sections import Model


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
