"""Stable Diffusion 1.5 inpainting: a U-Net that predicts the noise of a masked image, on diffusers' own networks.

The channels of its input are, in this order: noisy latents, the mask (its pixel at the corner of each latent cell),
latents of the masked image. Everything here equals `diffusers.StableDiffusionInpaintPipeline` with a `DDIMScheduler` on
the same weights (tests/families/test_sd_inpaint.py), except that the masked image is encoded by the mode of the
autoencoder's posterior: a condition is then a function of its example.

Stable Diffusion 2 inpainting has the same pipeline, and loads as well.

Legend: B samples, C latent channels, h w latent sides, S text tokens, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from diffusers import DDIMScheduler, StableDiffusionInpaintPipeline, UNet2DConditionModel
from torch import Tensor, nn
from transformers import CLIPTextModel

from retouch.core.schedule import AlphaBarSchedule
from retouch.families import tiny
from retouch.families.diffusion import FamilyModel
from retouch.families.inputs import inpainting_inputs, reference_inputs
from retouch.families.loading import ModelFilesError
from retouch.families.sd_inpaint.spec import SdInpaintModel
from retouch.families.text import TextEncoder, TextEncoders
from retouch.types import Condition, Example


class SdInpaint(FamilyModel):
    """The family protocol (`retouch.types.DiffusionModel`) for Stable Diffusion inpainting."""

    section = SdInpaintModel
    scheduler_class = "DDIMScheduler"
    patch = 1

    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        # any scheduler of the pipeline works: only the noise levels of its config are read
        self.scheduler: Any = DDIMScheduler.from_config(self.scheduler.config)
        for key, needed in (("prediction_type", "epsilon"), ("timestep_spacing", "leading")):
            given = self.scheduler.config[key]
            if given != needed:
                raise ModelFilesError(
                    f"model.path: scheduler/scheduler_config.json has {key} {given!r}; sd_inpaint needs a model "
                    f"trained and sampled with {needed!r}"
                )

    @classmethod
    def load_text(
        cls, config: SdInpaintModel, path: str, dtype: torch.dtype, device: torch.device | str, *, embedded: bool
    ) -> TextEncoders:
        clip = TextEncoder.load(CLIPTextModel, path, "", dtype)
        return TextEncoders({"text": clip}, device, config.offload_text_encoders)

    @classmethod
    def from_pipeline(cls, pipeline: Any) -> Self:
        """The networks of a `StableDiffusionInpaintPipeline` in memory."""
        clip = TextEncoder(pipeline.text_encoder, pipeline.tokenizer, pipeline.tokenizer.model_max_length)
        return cls(pipeline.unet, pipeline.vae, TextEncoders({"text": clip}), pipeline.scheduler)

    @staticmethod
    def tiny() -> StableDiffusionInpaintPipeline:
        """A U-Net of two levels, 48 wide and 96 wide with attention, on an autoencoder that downsamples by 4 to the 4
        channels that the pipeline requires: 8 x 16 cells for 32 x 64 pixels, 2.5 M parameters in all. Noise levels are
        those of the released model."""
        widths: Any = (48, 96)
        down: Any = ("DownBlock2D", "CrossAttnDownBlock2D")
        up: Any = ("CrossAttnUpBlock2D", "UpBlock2D")
        unet = UNet2DConditionModel(
            sample_size=16,
            in_channels=9,
            out_channels=4,
            down_block_types=down,
            up_block_types=up,
            block_out_channels=widths,
            layers_per_block=1,
            norm_num_groups=8,
            attention_head_dim=4,
            cross_attention_dim=tiny.TEXT_WIDTH,
        )
        scheduler: Any = DDIMScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            clip_sample=False,
            set_alpha_to_one=False,
            steps_offset=1,
        )
        absent: Any = None
        return StableDiffusionInpaintPipeline(
            vae=tiny.autoencoder(latent_channels=4, shift_factor=None),  # the pipeline applies no shift
            text_encoder=tiny.clip(),
            tokenizer=tiny.byte_clip_tokenizer(),
            unet=unet,
            scheduler=scheduler,
            safety_checker=absent,
            feature_extractor=absent,
            requires_safety_checker=False,
        )

    def input_channels(self) -> int:
        return 2 * self.spec.latent_channels + 1

    def schedule(self, num_steps: int, size: tuple[int, int]) -> AlphaBarSchedule:
        final = float(self.scheduler.final_alpha_cumprod)
        # the pipeline samples with an offset of 1, whatever an old config contains
        return AlphaBarSchedule.make(self.scheduler.alphas_cumprod, num_steps, steps_offset=1, final_alpha_bar=final)

    @torch.no_grad()
    def encode(self, examples: Sequence[Example], guidance_scale: float) -> Condition:
        """Text, mask, masked-image latents and vectors of the references of examples of one size; a `guidance_scale`
        above 1 adds the empty prompt, and `predict` then doubles the batch of the network."""
        text, (images, mask) = self.texts(), inpainting_inputs(examples, self.spec, self.device)
        size = (images.shape[2], images.shape[3])
        cells = (size[0] // self.spec.downsampling, size[1] // self.spec.downsampling)
        tensors = {
            "text": text.encode([e.prompt for e in examples])["text"],
            "mask_cells": nn.functional.interpolate(mask, size=cells),
            "masked_latents": self.autoencoder.encode_once(images * (mask < 0.5)),
            "guidance": torch.full((len(examples),), guidance_scale, device=self.device),
            **reference_inputs(examples, self.image_encoder, self.device),
        }
        if guidance_scale > 1:
            empty = text.encode([self.spec.empty_prompt])["text"]
            tensors["negative_text"] = empty.expand_as(tensors["text"])
        return Condition(tensors, mask, size)

    def predict(self, network: nn.Module, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        """Noise [B, C, h, w] at timestep `t` [B], by classifier-free guidance (arXiv 2207.12598) where the condition
        has a `negative_text`: noise without text + guidance · (noise with text - noise without text)."""
        c = condition.tensors
        channels = torch.cat([x, c["mask_cells"].to(x), c["masked_latents"].to(x)], dim=1)
        timestep, text = t.long(), c["text"]
        guided = "negative_text" in c
        if guided:
            channels, timestep = torch.cat([channels] * 2), torch.cat([timestep] * 2)
            text = torch.cat([c["negative_text"], text])
        output = network(
            sample=channels.to(self.dtype),
            timestep=timestep,
            encoder_hidden_states=text.to(self.dtype),
            added_cond_kwargs=_reference(c, guided=guided),
            return_dict=False,
        )[0].float()
        if not guided:
            return output
        without, with_text = output.chunk(2)
        return without + c["guidance"].view(-1, 1, 1, 1) * (with_text - without)


def _reference(tensors: Mapping[str, Tensor], *, guided: bool) -> dict[str, Any] | None:
    """Input of diffusers' processors of a style adapter. A missing reference is the vector 0, also in the half without
    text: Tencent's convention, which every program that samples follows."""
    if "reference" not in tensors:
        return None
    vectors = tensors["reference"] * tensors["reference_keep"][:, None]
    rows = torch.cat([torch.zeros_like(vectors), vectors]) if guided else vectors
    return {"image_embeds": [rows[:, None]]}
