"""FLUX.1-dev: a flow model that generates an image from a prompt, or repaints a mask, on diffusers' own networks.

The network takes no mask: inpainting blends latents (`retouch.families.blending`). `retouch.families.flux.base` has
the rest.

Legend: B samples, C latent channels, h w latent sides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from diffusers import FluxPipeline
from torch import Tensor, nn

from retouch.families import tiny
from retouch.families.blending import blended, blending_inputs
from retouch.families.diffusion import pack
from retouch.families.flux.base import FluxModel, grid_ids, tiny_parts
from retouch.families.flux_dev.spec import FluxDevModel
from retouch.types import Condition, Example


class FluxDev(FluxModel):
    """The family protocol (`retouch.types.DiffusionModel`) for FLUX.1-dev, with a source and mask or without."""

    section = FluxDevModel

    @staticmethod
    def tiny() -> FluxPipeline:
        """See `tiny_parts`."""
        return FluxPipeline(**tiny_parts(in_channels=4 * tiny.CHANNELS))

    @torch.no_grad()
    def encode(self, examples: Sequence[Example], guidance_scale: float) -> Condition:
        """Text, vectors of the references and, if there are sources, their latents and the mask, of examples of one
        size.

        Raises:
            ValueError: some examples with a source and some without, or neither a source nor a size.
        """
        blending, mask, size = blending_inputs(self, examples)
        return Condition({**self.encoded_texts(examples, guidance_scale), **blending}, mask, size)

    def sequence(self, x: Tensor, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The noisy latents alone."""
        return pack(x), grid_ids(x.shape[2] // 2, x.shape[3] // 2, str(x.device))

    def predict(self, network: nn.Module, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        """Velocity [B, C, h, w] at sigma `t` [B]; outside the mask the one that leads to the source."""
        return blended(super().predict(network, x, t, condition), x, t, condition.tensors)
