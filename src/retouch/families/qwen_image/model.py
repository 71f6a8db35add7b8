"""Qwen-Image: a flow model that draws what a sentence says, or repaints a mask, on diffusers' own networks.

The network knows no mask: inpainting blends latents. Outside the mask the state stays on the straight line from the
noise to the source, which is to say that the velocity there is (x - x0) / sigma. So the blend is a part of `predict`,
solvers need not know of it, and what lies outside is the source's at every step, as in `QwenImageInpaintPipeline`.
Everything here equals diffusers' pipelines on the same weights (tests/families/test_qwen_image.py); unlike them, the
source is encoded by the mode of the autoencoder's posterior, so that a condition is a function of its example.

Legend: B rows, C latent channels, h w latent sides, S text tokens, D widths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel
from torch import Tensor, nn
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

from retouch.families.embeddings import open_cache
from retouch.families.inputs import (
    inpainting_inputs,
    reference_encoder,
    reference_inputs,
)
from retouch.families.loading import (
    load_component,
    open_pipeline,
)
from retouch.families.qwen.base import (
    LORA_TARGETS,
    NEGATIVE,
    QwenModel,
)
from retouch.families.qwen.distillation import merge_distillation_lora
from retouch.families.qwen.text import (
    ChatStates,
    chat_encoders,
)
from retouch.families.text import TextEncoders
from retouch.image_encoder import ImageEncoder
from retouch.types import Condition, Example

if TYPE_CHECKING:
    from retouch.families.sections import QwenImageModel

__all__ = ["LORA_TARGETS", "NEGATIVE", "QwenImage"]


class QwenImage(QwenModel):
    """The family protocol (`retouch.types.DiffusionModel`) for Qwen-Image, with a source and mask or without."""

    def __init__(
        self,
        network: Any,  # QwenImageTransformer2DModel; diffusers' configs are untyped
        vae: Any,  # AutoencoderKLQwenImage
        text: TextEncoders | None,
        scheduler: Any,  # FlowMatchEulerDiscreteScheduler
        device: torch.device | str = "cpu",
        image_encoder: ImageEncoder | None = None,  # of references, for a style adapter in the network
        shift: float | None = None,
    ) -> None:
        super().__init__(
            network,
            vae,
            text,
            scheduler,
            device,
            family="qwen_image",
            released="Qwen/Qwen-Image",
            reference_width=image_encoder.width if image_encoder is not None else None,
            shift=shift,
        )
        self.image_encoder = image_encoder
        if image_encoder is not None:
            image_encoder.to(device)

    @classmethod
    def from_config(
        cls, config: QwenImageModel, device: torch.device | str = "cpu", *, with_text: bool = True
    ) -> QwenImage:
        """Load a hub id or a local folder in the diffusers layout; without its text encoder only to draw from states.

        Raises:
            ModelFilesError: a component is missing or of another class.
            ConfigError: no such image encoder.
        """
        path, trained, frozen = open_pipeline(config, "QwenImagePipeline")
        stored = open_cache(config)
        text = None
        if stored is not None:
            text = TextEncoders({}, device, config.offload_text_encoders, stored=stored)
        elif with_text:
            model = load_component(Qwen2_5_VLForConditionalGeneration, path, "text_encoder", frozen)
            tokenizer = load_component(AutoTokenizer, path, "tokenizer", None)
            chat = ChatStates(model, tokenizer, None, "draw", config.max_sequence_length)
            text = chat_encoders(chat, _words, device, config.offload_text_encoders)
        network = load_component(QwenImageTransformer2DModel, path, "transformer", trained)
        merge_distillation_lora(network, config.distillation_lora)
        return cls(
            network=network,
            vae=load_component(AutoencoderKLQwenImage, path, "vae", frozen),
            text=text,
            scheduler=load_component(FlowMatchEulerDiscreteScheduler, path, "scheduler", None),
            device=device,
            image_encoder=reference_encoder(config),
            shift=config.distillation_lora.shift if config.distillation_lora else None,
        )

    @classmethod
    def from_pipeline(cls, pipeline: Any, length: int = 128) -> QwenImage:
        """The networks of a `QwenImagePipeline` in memory, prompts of up to `length` tokens; no text encoder where the
        pipeline has none."""
        text = None
        if pipeline.text_encoder is not None:
            text = chat_encoders(ChatStates(pipeline.text_encoder, pipeline.tokenizer, None, "draw", length), _words)
        return cls(pipeline.transformer, pipeline.vae, text, pipeline.scheduler)

    def to(self, device: Any) -> None:
        super().to(device)
        if self.image_encoder is not None:
            self.image_encoder.to(self.device)

    @torch.no_grad()
    def encode(self, examples: Sequence[Example], guidance_scale: float) -> Condition:
        """Text, vectors of the references and, where there are sources, their latents and the mask, of examples of one
        size; a `guidance_scale` above 1 adds the negative prompt, and `predict` then runs twice the rows.

        Raises:
            ValueError: some examples with a source and some without, or neither a source nor a size.
        """
        text = self.texts()
        tensors = {
            **text.encode([e.prompt for e in examples]),
            "guidance": torch.full((len(examples),), guidance_scale, device=self.device),
            **reference_inputs(examples, self.image_encoder, self.device),
        }
        if guidance_scale > 1:
            negative = text.encode([NEGATIVE])
            tensors |= {f"negative_{name}": t.expand_as(tensors[name]) for name, t in negative.items()}
        if any(e.source is not None for e in examples):
            images, mask = inpainting_inputs(examples, self.spec, self.device)
            size = (images.shape[2], images.shape[3])
            cells = (size[0] // self.spec.downsampling, size[1] // self.spec.downsampling)
            tensors["source_latents"] = self.kept_latents(images)
            tensors["mask_cells"] = nn.functional.interpolate(mask, size=cells)
            return Condition(tensors, mask, size)
        sizes = {e.size for e in examples}
        size = examples[0].size
        if size is None or len(sizes) > 1:
            raise ValueError(f"examples without a source need one size; given {sorted(map(str, sizes))}")
        self.require_size(size)
        return Condition(tensors, None, size)

    def predict(self, network: nn.Module, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        """Velocity [B, C, h, w] at sigma `t` [B]: by classifier-free guidance whose result is scaled back, token by
        token, to the length of the guided prediction; outside the mask the one that leads to the source."""
        c = condition.tensors
        reference = _reference(c, guided="negative_text" in c)
        velocity = self._velocity(network, x, t, condition, attention_kwargs=reference)
        if "source_latents" not in c:
            return velocity
        to_source = (x - c["source_latents"]) / t.view(-1, 1, 1, 1)
        return torch.where(c["mask_cells"] > 0, velocity, to_source)


def _words(prompt: str) -> tuple[str, tuple[()]]:
    return prompt, ()


def _reference(tensors: Mapping[str, Tensor], *, guided: bool) -> dict[str, Any] | None:
    """What the attention processors of a style adapter take; rows of the negative prompt attend to no token."""
    if "reference" not in tensors:
        return None
    vectors, keep = tensors["reference"], tensors["reference_keep"]
    if guided:
        vectors, keep = torch.cat([vectors] * 2), torch.cat([torch.zeros_like(keep), keep])
    return {"ip_adapter_image_embeds": (vectors, keep)}
