"""FLUX.1-Kontext: a flow model that changes an image by a prompt, on diffusers' own networks.

The tokens of the clean source follow those of the noisy latents; their position ids have 1 on the first axis. With a
mask, latents are blended as well (`retouch.families.blending`), and only the masked region changes; with
`model.reference_images`, the tokens are those of the reference instead. The released pipeline scales outputs to a
megapixel and sources to one of 17 sizes; here sizes are those of the examples.
`retouch.families.flux.base` has the rest.

Legend: B samples, C latent channels, h w latent sides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from diffusers import FluxKontextPipeline
from torch import Tensor, nn

from retouch.families import tiny
from retouch.families.blending import blended, edited_inputs
from retouch.families.diffusion import pack
from retouch.families.flux.base import FluxModel, grid_ids, tiny_parts
from retouch.families.flux_kontext.spec import FluxKontextModel
from retouch.families.inputs import reference_pixels
from retouch.types import Condition, Example


class FluxKontext(FluxModel):
    """The family protocol (`retouch.types.DiffusionModel`) for editing: a source, and a mask where there is one."""

    section = FluxKontextModel

    @staticmethod
    def tiny() -> FluxKontextPipeline:
        """See `tiny_parts`."""
        return FluxKontextPipeline(**tiny_parts(in_channels=4 * tiny.CHANNELS))

    @torch.no_grad()
    def encode(self, examples: Sequence[Example], guidance_scale: float) -> Condition:
        """Text, vectors of the references of a style adapter, latents of the sources, of the reference images and, if
        there are masks, the masks, of examples of one size.

        Raises:
            ValueError: an example without a source, some with a mask and some without, a reference image without a
                mask, or a size that the network does not take.
        """
        images, mask, size = edited_inputs(self, examples)
        tensors = self.encoded_texts(examples, guidance_scale) | images
        if self.config.reference_images:
            if mask is None:
                raise ValueError(
                    f"example {examples[0].id} has no mask, but model.reference_images repaints one; give it a mask, "
                    "or set model.reference_images=false"
                )
            references = torch.stack([reference_pixels(example, size) for example in examples]).to(self.device)
            tensors["reference_latents"] = self.autoencoder.encode_once(references)
        return Condition(tensors, mask, size)

    def sequence(self, x: Tensor, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The noisy latents, then the source, or the reference image in its place."""
        rows, columns, device = x.shape[2] // 2, x.shape[3] // 2, str(x.device)
        clean = tensors.get("reference_latents", tensors["source_latents"])
        tokens = torch.cat([pack(x), pack(clean.to(x))], dim=1)
        return tokens, torch.cat([grid_ids(rows, columns, device), grid_ids(rows, columns, device, image=1)])

    def predict(self, network: nn.Module, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        """Velocity [B, C, h, w] at sigma `t` [B]; outside a mask the one that leads to the source."""
        velocity = super().predict(network, x, t, condition)
        return blended(velocity, x, t, condition.tensors) if condition.mask is not None else velocity
