"""Stable Diffusion XL inpainting: a U-Net that predicts the noise of a masked image, on diffusers' own networks.

Beside the states of two CLIPs, side by side on the width, the U-Net takes the projected vector of the second one and
the size of the image. Everything here, and in what the U-Net families share (`retouch.families.unet`), equals
`diffusers.StableDiffusionXLInpaintPipeline` with a `DDIMScheduler` on the same weights
(tests/families/test_sdxl_inpaint.py), with two exceptions: the masked image is encoded by the mode of the autoencoder's
posterior (a condition is then a function of its example); and an empty prompt has the states and the vector 0, as a
missing negative prompt in the pipeline: captions that training drops are those that guidance steers away from.

Legend: B samples, S text tokens, D widths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Self

import torch
from diffusers import StableDiffusionXLInpaintPipeline
from torch import Tensor
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from retouch.families import tiny
from retouch.families.guidance import halves
from retouch.families.loading import ModelFilesError
from retouch.families.sdxl_inpaint.spec import SdxlInpaintModel
from retouch.families.text import Networks, TextEncoder, TextEncoders
from retouch.families.unet import tiny as unet_tiny
from retouch.families.unet.base import UnetInpaint


class SdxlInpaint(UnetInpaint):
    """The family protocol (`retouch.types.DiffusionModel`) for Stable Diffusion XL inpainting."""

    section = SdxlInpaintModel

    def __init__(self, network: Any, vae: Any, *parts: Any, **options: Any) -> None:
        if vae.config.latents_mean is not None or vae.config.latents_std is not None:
            # the pipeline decodes with them and encodes without: an inpainting U-Net trained on either is unknown
            raise ModelFilesError(
                "model.path: its vae/config.json has latents_mean and latents_std, which sdxl_inpaint does not apply; "
                "set a model whose autoencoder has scaling_factor alone"
            )
        if vae.dtype == torch.float16 and vae.config.force_upcast:
            vae = vae.float()  # activations of the released autoencoder overflow in fp16
        super().__init__(network, vae, *parts, **options)

    @classmethod
    def require_index(cls, config: SdxlInpaintModel, index: Mapping[str, Any]) -> None:
        super().require_index(config, index)
        if index.get("force_zeros_for_empty_prompt") is False:
            raise ModelFilesError(
                "model.path: its model_index.json has force_zeros_for_empty_prompt false; sdxl_inpaint steers away "
                "from zeros; set a model that was trained with them"
            )

    @classmethod
    def text_encoders(
        cls, config: SdxlInpaintModel, path: str, network: Networks, *, embedded: bool
    ) -> Mapping[str, TextEncoder]:
        first = TextEncoder.load(network, CLIPTextModel, path, "")
        return _encoders(first, TextEncoder.load(network, CLIPTextModelWithProjection, path, "_2"))

    @classmethod
    def from_pipeline(cls, pipeline: Any) -> Self:
        """The networks of a `StableDiffusionXLInpaintPipeline` in memory."""
        clips = [
            TextEncoder(model, tokenizer, tokenizer.model_max_length, name=name)
            for model, tokenizer, name in (
                (pipeline.text_encoder, pipeline.tokenizer, "text_encoder"),
                (pipeline.text_encoder_2, pipeline.tokenizer_2, "text_encoder_2"),
            )
        ]
        return cls(pipeline.unet, pipeline.vae, TextEncoders(_encoders(*clips)), pipeline.scheduler)

    @staticmethod
    def tiny() -> StableDiffusionXLInpaintPipeline:
        """A U-Net of two levels, 32 wide and 64 wide with two attention layers, on an autoencoder that downsamples by 4
        to the 4 channels that the pipeline requires, 1.0 M parameters in all. Noise levels are those of the released
        model."""
        unet = unet_tiny.unet(
            (32, 64),
            (2, 4),
            16 + 32,
            use_linear_projection=True,
            transformer_layers_per_block=(1, 2),
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=16 + 6 * 8,
        )
        return StableDiffusionXLInpaintPipeline(
            vae=tiny.autoencoder(latent_channels=4, shift_factor=None),  # the pipeline applies no shift
            text_encoder=tiny.deep_clip(16),
            tokenizer=tiny.byte_clip_tokenizer(),
            text_encoder_2=tiny.projected_clip(32, 16),
            tokenizer_2=tiny.byte_clip_tokenizer(pad="!"),
            unet=unet,
            scheduler=unet_tiny.scheduler(),
            add_watermarker=False,
        )

    def text_tensors(self, prompts: Sequence[str]) -> dict[str, Tensor]:
        """`text` [B, S, D] and `pooled` [B, D']."""
        made = self.texts().encode(prompts)
        keep = torch.tensor([float(prompt != "") for prompt in prompts], dtype=torch.float32, device=self.device)
        text = torch.cat([made["clip"], made["clip_2"]], dim=-1)
        return {"text": text * keep.view(-1, 1, 1).to(text), "pooled": made["pooled"] * keep.view(-1, 1).to(text)}

    def added(self, tensors: Mapping[str, Tensor], size: tuple[int, int]) -> dict[str, Any]:
        """Vector of the prompt, and of each sample: size of the image before it was scaled, corner and size of its
        crop, all of which are those of the image."""
        pooled = halves(tensors, "pooled")
        return {"text_embeds": pooled.to(self.dtype), "time_ids": _sizes(size, pooled.device).expand(len(pooled), -1)}


@lru_cache(maxsize=16)
def _sizes(size: tuple[int, int], device: torch.device) -> Tensor:
    """[6], on a device that would be waited for if it were copied there in every step."""
    return torch.tensor([*size, 0, 0, *size], device=device, dtype=torch.float32)


def _encoders(clip: TextEncoder, clip_2: TextEncoder) -> Mapping[str, TextEncoder]:
    """By the names of their tensors: states of the last layer but one, and the second one's projected vector."""
    return {
        "clip": replace(clip, output=(-2,)),
        "clip_2": replace(clip_2, output=(-2,)),
        "pooled": replace(clip_2, output="text_embeds"),
    }
