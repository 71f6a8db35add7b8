"""Stable Diffusion 1.5 inpainting: a U-Net that predicts the noise of a masked image, on diffusers' own networks.

Everything here, and in what the U-Net families share (`retouch.families.unet`), equals
`diffusers.StableDiffusionInpaintPipeline` with a `DDIMScheduler` on the same weights
(tests/families/test_sd_inpaint.py), except that the masked image is encoded by the mode of the autoencoder's posterior:
a condition is then a function of its example.

Stable Diffusion 2 inpainting has the same pipeline, and loads as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from diffusers import StableDiffusionInpaintPipeline
from torch import Tensor
from transformers import CLIPTextModel

from retouch.families import tiny
from retouch.families.guidance import is_guided
from retouch.families.sd_inpaint.spec import SdInpaintModel
from retouch.families.text import Networks, TextEncoder, TextEncoders
from retouch.families.unet import tiny as unet_tiny
from retouch.families.unet.base import UnetInpaint


class SdInpaint(UnetInpaint):
    """The family protocol (`retouch.types.DiffusionModel`) for Stable Diffusion inpainting."""

    section = SdInpaintModel

    @classmethod
    def text_encoders(
        cls, config: SdInpaintModel, path: str, network: Networks, *, embedded: bool
    ) -> Mapping[str, TextEncoder]:
        return {"text": TextEncoder.load(network, CLIPTextModel, path, "")}

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
        unet = unet_tiny.unet((48, 96), 4, tiny.TEXT_WIDTH)
        absent: Any = None
        return StableDiffusionInpaintPipeline(
            vae=tiny.autoencoder(latent_channels=4, shift_factor=None),  # the pipeline applies no shift
            text_encoder=tiny.clip(),
            tokenizer=tiny.byte_clip_tokenizer(),
            unet=unet,
            scheduler=unet_tiny.scheduler(),
            safety_checker=absent,
            feature_extractor=absent,
            requires_safety_checker=False,
        )

    def added(self, tensors: Mapping[str, Tensor], size: tuple[int, int]) -> dict[str, Any] | None:
        """Input of diffusers' processors of a style adapter. A missing reference is the vector 0, also in the half
        without text: Tencent's convention, which every program that samples follows."""
        if "reference" not in tensors:
            return None
        vectors = tensors["reference"] * tensors["reference_keep"][:, None]
        rows = torch.cat([torch.zeros_like(vectors), vectors]) if is_guided(tensors) else vectors
        return {"image_embeds": [rows[:, None]]}
