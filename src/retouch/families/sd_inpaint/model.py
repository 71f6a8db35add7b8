"""Stable Diffusion 1.5 inpainting: a U-Net that predicts the noise of a masked picture, on diffusers' own networks.

The channels of its input are, in this order: noisy latents, the mask (its pixel at the corner of each latent cell),
latents of the masked image. Everything here equals `diffusers.StableDiffusionInpaintPipeline` with a `DDIMScheduler` on
the same weights (tests/families/test_sd_inpaint.py); unlike it, the masked image is encoded by the mode of the
autoencoder's posterior, so that a condition is a function of its example.

Stable Diffusion 2 inpainting has the same pipeline, and loads as well.

Legend: B rows, C latent channels, h w latent sides, S text tokens, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel
from torch import Tensor, nn
from transformers import CLIPTextModel

from retouch.core.schedule import AlphaBarSchedule
from retouch.families.embeddings import open_cache
from retouch.families.inputs import (
    KeptLatents,
    inpainting_inputs,
    reference_encoder,
    reference_inputs,
)
from retouch.families.loading import (
    ModelFilesError,
    load_component,
    open_pipeline,
)
from retouch.families.text import (
    TextEncoder,
    TextEncoders,
)
from retouch.image_encoder import ImageEncoder
from retouch.types import Condition, Example, ModelSpec

if TYPE_CHECKING:
    from retouch.families.sections import SdInpaintModel

GUIDANCE_SCALE = 7.5  # default of the pipeline

LORA_TARGETS = ("to_q", "to_k", "to_v", "to_out.0")
"""Self- and cross-attention of every block."""

RELEASED_UNET: dict[str, Any] = {
    "sample_size": 64,
    "in_channels": 9,
    "out_channels": 4,
    "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    "block_out_channels": (320, 640, 1280, 1280),
    "layers_per_block": 2,
    "attention_head_dim": 8,
    "cross_attention_dim": 768,
}
"""Config of the released U-Net: 859.5 M parameters."""


class SdInpaint:
    """The family protocol (`retouch.types.DiffusionModel`) for Stable Diffusion inpainting."""

    network_name = "unet"

    def __init__(
        self,
        network: Any,  # UNet2DConditionModel; diffusers' configs are untyped
        vae: Any,  # AutoencoderKL
        text: TextEncoders,
        scheduler: Any,  # any of the pipeline's schedulers: only the noise levels of its config are read
        device: torch.device | str = "cpu",
        image_encoder: ImageEncoder | None = None,  # of references, for a style adapter in the network
    ) -> None:
        self.network: nn.Module = network
        self.vae = vae.eval().requires_grad_(False).to(device)
        self.text = text
        self.scheduler: Any = DDIMScheduler.from_config(scheduler.config)
        self.image_encoder = image_encoder
        self.device = torch.device(device)
        if image_encoder is not None:
            image_encoder.to(device)
        self._kept = KeptLatents(lambda images: self.encode_images(images))
        self.dtype: torch.dtype = network.dtype
        self._factor = 2 ** (len(vae.config.block_out_channels) - 1)
        self.spec = ModelSpec(
            family="sd_inpaint",
            prediction="epsilon",
            latent_channels=vae.config.latent_channels,
            downsampling=self._factor,
            size_multiple=self._factor,  # the U-Net pads what its own levels cannot halve
            guidance_scale=GUIDANCE_SCALE,
            needs=frozenset({"source", "mask"}),
            lora_targets=LORA_TARGETS,
            network_name=self.network_name,
            reference_width=image_encoder.width if image_encoder is not None else None,
        )
        expected = 2 * vae.config.latent_channels + 1
        if network.config.in_channels != expected:
            raise ModelFilesError(
                f"model.path: the U-Net takes {network.config.in_channels} channels, an inpainting model with this "
                f"autoencoder takes {expected}; a text-to-image Stable Diffusion cannot inpaint: use "
                "stable-diffusion-v1-5/stable-diffusion-inpainting (once runwayml/stable-diffusion-inpainting)"
            )
        for key, needed in (("prediction_type", "epsilon"), ("timestep_spacing", "leading")):
            given = self.scheduler.config[key]
            if given != needed:
                raise ModelFilesError(
                    f"model.path: scheduler/scheduler_config.json says {key} {given!r}; sd_inpaint needs a model "
                    f"trained and sampled with {needed!r}"
                )

    @classmethod
    def from_config(cls, config: SdInpaintModel, device: torch.device | str = "cpu") -> SdInpaint:
        """Load a hub id or a local folder in the diffusers layout ("tiny": the base of the package).

        Raises:
            ModelFilesError: a component is missing or of another class.
            ConfigError: no such image encoder.
        """
        path, trained, frozen = open_pipeline(config, "StableDiffusionInpaintPipeline")
        stored = open_cache(config)
        network = load_component(UNet2DConditionModel, path, "unet", trained)
        encoders = {"text": TextEncoder.load(CLIPTextModel, path, "", frozen)} if stored is None else {}
        return cls(
            network=network,
            vae=load_component(AutoencoderKL, path, "vae", frozen),
            text=TextEncoders(encoders, device, config.offload_text_encoders, stored=stored),
            scheduler=load_component(DDIMScheduler, path, "scheduler", None),
            device=device,
            image_encoder=reference_encoder(config),
        )

    @classmethod
    def from_pipeline(cls, pipeline: Any) -> SdInpaint:
        """The networks of a `StableDiffusionInpaintPipeline` in memory."""
        clip = TextEncoder(pipeline.text_encoder, pipeline.tokenizer, pipeline.tokenizer.model_max_length)
        return cls(pipeline.unet, pipeline.vae, TextEncoders({"text": clip}), pipeline.scheduler)

    @staticmethod
    def released_network() -> nn.Module:
        """The network at its released size; build it under `torch.device("meta")`."""
        return UNet2DConditionModel(**RELEASED_UNET)

    def to(self, device: Any) -> None:
        self.device = torch.device(device)
        self.vae.to(self.device)
        self.text.to(self.device)
        if self.image_encoder is not None:
            self.image_encoder.to(self.device)

    def schedule(self, num_steps: int, size: tuple[int, int]) -> AlphaBarSchedule:
        final = float(self.scheduler.final_alpha_cumprod)
        # the pipeline samples with an offset of 1, whatever an old config says
        return AlphaBarSchedule.make(self.scheduler.alphas_cumprod, num_steps, steps_offset=1, final_alpha_bar=final)

    @torch.no_grad()
    def encode(self, examples: Sequence[Example], guidance_scale: float) -> Condition:
        """Text, mask, masked-image latents and vectors of the references of examples of one size; a `guidance_scale`
        above 1 adds the empty prompt, and `predict` then runs the network on twice the rows."""
        images, mask = inpainting_inputs(examples, self.spec, self.device)
        size = (images.shape[2], images.shape[3])
        tensors = {
            "text": self.text.encode([e.prompt for e in examples])["text"],
            "mask_cells": nn.functional.interpolate(mask, size=(size[0] // self._factor, size[1] // self._factor)),
            "masked_latents": self._kept(images * (mask < 0.5)),
            "guidance": torch.full((len(examples),), guidance_scale, device=self.device),
            **reference_inputs(examples, self.image_encoder, self.device),
        }
        if guidance_scale > 1:
            tensors["negative_text"] = self.text.encode([""])["text"].expand_as(tensors["text"])
        return Condition(tensors, mask, size)

    @torch.no_grad()
    def encode_images(self, images: Tensor) -> Tensor:
        latents = self.vae.encode(images.to(self.device, self.vae.dtype)).latent_dist.mode()
        return latents.float() * self.vae.config.scaling_factor

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        latents = latents.float() / self.vae.config.scaling_factor
        return self.vae.decode(latents.to(self.device, self.vae.dtype)).sample.float().clamp(-1, 1)

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

    def cache_prompts(self, prompts: Sequence[str]) -> None:
        self.text.cache(["", *prompts])

    def release_text_encoders(self) -> None:
        self.text.release()


def _reference(tensors: Mapping[str, Tensor], *, guided: bool) -> dict[str, Any] | None:
    """What diffusers' processors of a style adapter take. A reference that is not there is the vector 0, and so is that
    of the rows without text: Tencent's convention, which every program that samples follows."""
    if "reference" not in tensors:
        return None
    vectors = tensors["reference"] * tensors["reference_keep"][:, None]
    rows = torch.cat([torch.zeros_like(vectors), vectors]) if guided else vectors
    return {"image_embeds": [rows[:, None]]}
