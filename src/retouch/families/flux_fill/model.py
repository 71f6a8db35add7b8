"""FLUX.1-Fill: a flow model that repaints a mask, on diffusers' own networks.

The token sequence of the transformer is, per 2 x 2 patch of latent cells and in this order: noisy latents, latents of
the masked image, the mask itself with its pixels unshuffled into channels. `retouch.families.flux.base` has the rest.

Legend: B samples, C latent channels, h w latent sides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from diffusers import FluxFillPipeline
from torch import Tensor, nn

from retouch.families import tiny
from retouch.families.diffusion import pack
from retouch.families.flux.base import FluxModel, grid_ids, tiny_parts
from retouch.families.flux_fill.spec import FluxFillModel
from retouch.families.inputs import inpainting_inputs
from retouch.types import Condition, Example


class FluxFill(FluxModel):
    """The family protocol (`retouch.types.DiffusionModel`) for FLUX.1-Fill."""

    section = FluxFillModel

    @staticmethod
    def tiny() -> FluxFillPipeline:
        """See `tiny_parts`."""
        factor = 4
        return FluxFillPipeline(**tiny_parts(in_channels=4 * (2 * tiny.CHANNELS + factor**2)))

    def input_channels(self) -> int:
        return 4 * (2 * self.spec.latent_channels + self.spec.downsampling**2)

    @torch.no_grad()
    def encode(self, examples: Sequence[Example], guidance_scale: float) -> Condition:
        """Text, masked-image latents, unshuffled mask and vectors of the references of examples of one size."""
        images, mask = inpainting_inputs(examples, self.spec, self.device)
        tensors = {
            **self.encoded_texts(examples, guidance_scale),
            "masked_latents": self.autoencoder.encode_once(images * (1 - mask)),
            "mask_cells": nn.functional.pixel_unshuffle(mask, self.spec.downsampling),
        }
        return Condition(tensors, mask, (images.shape[2], images.shape[3]))

    def sequence(self, x: Tensor, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """One token for each patch, with all its channels."""
        channels = torch.cat([x, tensors["masked_latents"].to(x), tensors["mask_cells"].to(x)], dim=1)
        return pack(channels), grid_ids(x.shape[2] // 2, x.shape[3] // 2, str(x.device))
