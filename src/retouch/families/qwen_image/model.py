"""Qwen-Image: a flow model that generates an image from a prompt, or repaints a mask, on diffusers' own networks.

The network takes no mask: inpainting blends latents (`retouch.families.blending`). Everything here equals diffusers'
pipelines on the same weights (tests/families/test_qwen_image.py), except that the source is encoded by the
mode of the autoencoder's posterior: a condition is then a function of its example.

Legend: B samples, C latent channels, h w latent sides, S text tokens, D widths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from diffusers import QwenImagePipeline
from torch import Tensor, nn
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

from retouch.families.blending import blended, blending_inputs
from retouch.families.guidance import adapter_inputs
from retouch.families.inputs import reference_inputs
from retouch.families.loading import load_component
from retouch.families.qwen import tiny
from retouch.families.qwen.base import QwenModel
from retouch.families.qwen.text import ChatStates, chat_encoders
from retouch.families.qwen_image.spec import QwenImageModel
from retouch.families.text import Encoding, Networks, TextEncoders
from retouch.types import Condition, Example


class QwenImage(QwenModel):
    """The family protocol (`retouch.types.DiffusionModel`) for Qwen-Image, with a source and mask or without."""

    section = QwenImageModel

    @classmethod
    def text_encoders(
        cls, config: QwenImageModel, path: str, network: Networks, *, embedded: bool
    ) -> Mapping[str, Encoding]:
        model = network(Qwen2_5_VLForConditionalGeneration, "text_encoder")
        tokenizer = load_component(AutoTokenizer, path, "tokenizer", None)
        return chat_encoders(ChatStates(model, tokenizer, None, "draw", config.max_sequence_length), _prompt_alone)

    @classmethod
    def from_pipeline(cls, pipeline: Any, length: int = 128) -> Self:
        """The networks of a `QwenImagePipeline` in memory, prompts of up to `length` tokens; no text encoder if the
        pipeline has none."""
        text = None
        if pipeline.text_encoder is not None:
            chat = ChatStates(pipeline.text_encoder, pipeline.tokenizer, None, "draw", length)
            text = TextEncoders(chat_encoders(chat, _prompt_alone))
        return cls(pipeline.transformer, pipeline.vae, text, pipeline.scheduler)

    @staticmethod
    def tiny() -> QwenImagePipeline:
        """2 blocks of width 64 on an autoencoder that downsamples by 4; prompts are bytes."""
        return QwenImagePipeline(tokenizer=tiny.byte_qwen_tokenizer(), **tiny.parts())

    @torch.no_grad()
    def encode(self, examples: Sequence[Example], guidance_scale: float) -> Condition:
        """Text, vectors of the references and, if there are sources, their latents and the mask, of examples of one
        size; a `guidance_scale` above 1 adds the negative prompt, and `predict` then doubles the batch of the network.

        Raises:
            ValueError: some examples with a source and some without, or neither a source nor a size.
        """
        tensors = {
            **self.guided_texts(examples, guidance_scale),
            **reference_inputs(examples, self.image_encoder, self.device),
        }
        blending, mask, size = blending_inputs(self, examples)
        return Condition(tensors | blending, mask, size, self.on_host)

    def predict(self, network: nn.Module, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        """Velocity [B, C, h, w] at sigma `t` [B]: by classifier-free guidance whose result is scaled back, token by
        token, to the length of the guided prediction; outside the mask the one that leads to the source."""
        c = condition.tensors
        velocity = self._velocity(network, x, t, condition, lambda part: {"attention_kwargs": adapter_inputs(part)})
        return blended(velocity, x, t, c)


def _prompt_alone(prompt: str) -> tuple[str, tuple[()]]:
    return prompt, ()
