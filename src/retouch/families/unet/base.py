"""Inpainting families on U-Nets, shared parts: inputs, noise levels, guidance.

The channels of the U-Net's input are, in this order: noisy latents, the mask (its pixel at the corner of each latent
cell), latents of the masked image.

Legend: B samples, C latent channels, h w latent sides, S text tokens, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers import DDIMScheduler
from torch import Tensor, nn

from retouch.core.schedule import AlphaBarSchedule
from retouch.families.diffusion import FamilyModel
from retouch.families.guidance import doubled, guided, halves
from retouch.families.inputs import inpainting_inputs, reference_inputs
from retouch.families.loading import ModelFilesError
from retouch.types import Condition, Example

NEEDED: Mapping[str, Any] = {
    "prediction_type": "epsilon",
    "timestep_spacing": "leading",
    "rescale_betas_zero_snr": False,  # at an alpha_bar of 0 the image does not follow from the noise
}
"""Settings of the scheduler."""


class UnetInpaint(FamilyModel):
    """A U-Net that predicts the noise of a masked image."""

    scheduler_class = "DDIMScheduler"
    patch = 1

    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        # any scheduler of the pipeline works: only the noise levels of its config are read
        self.scheduler: Any = DDIMScheduler.from_config(self.scheduler.config)
        for key, needed in NEEDED.items():
            given = self.scheduler.config[key]
            if given != needed:
                raise ModelFilesError(
                    f"model.path: scheduler/scheduler_config.json has {key} {given!r}; {self.spec.family} needs a "
                    f"model trained and sampled with {needed!r}"
                )
        if self.network.config.time_cond_proj_dim is not None:  # type: ignore[union-attr]
            raise ModelFilesError(
                "model.path: unet/config.json has time_cond_proj_dim: a consistency model takes the guidance scale as "
                f"an input, which {self.spec.family} does not give it; set another model"
            )

    def input_channels(self) -> int:
        return 2 * self.spec.latent_channels + 1

    def schedule(self, num_steps: int, size: tuple[int, int]) -> AlphaBarSchedule:
        final = float(self.scheduler.final_alpha_cumprod)
        # the pipelines sample with an offset of 1, whatever an old config contains
        return AlphaBarSchedule.make(self.scheduler.alphas_cumprod, num_steps, steps_offset=1, final_alpha_bar=final)

    @torch.no_grad()
    def encode(self, examples: Sequence[Example], guidance_scale: float) -> Condition:
        """Text, mask, masked-image latents and vectors of the references of examples of one size; a `guidance_scale`
        above 1 adds the empty prompt, and `predict` then doubles the batch of the network."""
        images, mask = inpainting_inputs(examples, self.spec, self.device)
        size = (images.shape[2], images.shape[3])
        cells = (size[0] // self.spec.downsampling, size[1] // self.spec.downsampling)
        tensors = {
            **self.guided_texts(examples, guidance_scale),
            "mask_cells": nn.functional.interpolate(mask, size=cells),
            "masked_latents": self.autoencoder.encode_once(images * (mask < 0.5)),
            **reference_inputs(examples, self.image_encoder, self.device),
        }
        return Condition(tensors, mask, size)

    def added(self, tensors: Mapping[str, Tensor], size: tuple[int, int]) -> dict[str, Any] | None:
        """Further conditions of the U-Net, of both halves with guidance."""
        return None

    def predict(self, network: nn.Module, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        """Noise [B, C, h, w] at timestep `t` [B], by classifier-free guidance (arXiv 2207.12598) where the condition
        has a `negative_text`: noise without text + guidance · (noise with text - noise without text)."""
        c = condition.tensors
        channels = torch.cat([x, c["mask_cells"].to(x), c["masked_latents"].to(x)], dim=1)
        output = network(
            sample=doubled(channels, c).to(self.dtype),
            timestep=doubled(t.long(), c),
            encoder_hidden_states=halves(c, "text").to(self.dtype),
            added_cond_kwargs=self.added(c, condition.size),
            return_dict=False,
        )[0].float()
        return guided(output, c)
