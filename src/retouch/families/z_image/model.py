"""Z-Image: a flow model that generates an image from a prompt, or repaints a mask, on diffusers' own network.

The network takes lists: latents and text states of each row, of any lengths. Its time is 1 - sigma and its output the
negative velocity. The diffusers pipeline guides by c + g (c - u), with c the prediction with the prompt and u that
without; here the scale is w = 1 + g of u + w (c - u), as in every family. The network takes no mask: inpainting blends
latents (`retouch.families.blending`). Everything equals diffusers' pipelines on the same weights
(tests/families/test_z_image.py), except that the source is encoded by the mode of the autoencoder's posterior.

Legend: B samples, C latent channels, h w latent sides, S text tokens, L of one sample, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from torch import Tensor, nn
from transformers import AutoTokenizer, Qwen3Model

from retouch.families import tiny
from retouch.families.blending import blended, blending_inputs
from retouch.families.diffusion import FamilyModel
from retouch.families.loading import load_component
from retouch.families.qwen3.text import Qwen3States
from retouch.families.qwen3.tiny import chat_tokenizer, qwen3
from retouch.families.text import Encoding, Networks, TextEncoders
from retouch.families.z_image.spec import ZImageModel
from retouch.types import Condition, Example


class ZImage(FamilyModel):
    """The family protocol (`retouch.types.DiffusionModel`) for Z-Image, with a source and mask or without."""

    section = ZImageModel
    on_host = frozenset({"text_length"})

    @classmethod
    def text_encoders(cls, config: ZImageModel, path: str, network: Networks, *, embedded: bool) -> Mapping[str, Any]:
        encoder = network(Qwen3Model, "text_encoder")
        return _chat(encoder, load_component(AutoTokenizer, path, "tokenizer", None), config.max_sequence_length)

    @classmethod
    def from_pipeline(cls, pipeline: Any, length: int = 128, config: ZImageModel | None = None) -> Self:
        """The networks of a `ZImagePipeline` in memory, prompts of up to `length` tokens."""
        text = TextEncoders(_chat(pipeline.text_encoder, pipeline.tokenizer, length))
        return cls(pipeline.transformer, pipeline.vae, text, pipeline.scheduler, config=config)

    @staticmethod
    def tiny() -> ZImagePipeline:
        """2 layers and 2 refiners of width 64 on an autoencoder that downsamples by 4; prompts are bytes."""
        lengths = [512, 64, 64]  # first axis: tokens of a prompt
        transformer: Any = ZImageTransformer2DModel(
            in_channels=tiny.CHANNELS,
            dim=64,
            n_layers=2,
            n_refiner_layers=1,
            n_heads=4,
            n_kv_heads=4,
            cap_feat_dim=32,
            axes_dims=[4, 6, 6],
            axes_lens=lengths,
        )
        nn.init.normal_(transformer.x_pad_token)  # zeros would hide that padding is attended to
        nn.init.normal_(transformer.cap_pad_token)
        tokenizer: Any = chat_tokenizer()
        return ZImagePipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=6.0),
            vae=tiny.autoencoder(),
            text_encoder=qwen3(Qwen3Model),
            tokenizer=tokenizer,
            transformer=transformer,
        )

    @torch.no_grad()
    def encode(self, examples: Sequence[Example], guidance_scale: float) -> Condition:
        """Text and, if there are sources, their latents and the mask, of examples of one size; a `guidance_scale` above
        1 adds the empty prompt, and `predict` then doubles the batch of the network.

        Raises:
            ValueError: some examples with a source and some without, neither a source nor a size, or guidance of a
                model that was distilled to sample without.
        """
        blending, mask, size = blending_inputs(self, examples)
        return Condition(self.guided_texts(examples, guidance_scale) | blending, mask, size, self.on_host)

    def predict(self, network: nn.Module, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        """Velocity [B, C, h, w] at sigma `t` [B], by classifier-free guidance; outside the mask the one that leads to
        the source."""
        c = condition.tensors
        latents, time, states = x.to(self.dtype), 1 - t, _rows(c, "text")
        if "negative_text" in c:
            latents, time, states = torch.cat([latents] * 2), torch.cat([time] * 2), states + _rows(c, "negative_text")
        text = [row.to(self.dtype) for row in states]
        output = network(list(latents[:, :, None].unbind()), time, text, return_dict=False)[0]
        velocity = -torch.stack(list(output))[:, :, 0].float()
        if "negative_text" in c:
            with_text, without = velocity.chunk(2)
            velocity = self._guided(with_text, without, c["guidance"])
        return blended(velocity, x, t, c)

    def _guided(self, with_text: Tensor, without: Tensor, scale: Tensor) -> Tensor:
        """u + w (c - u) of each sample, no longer than `model.cfg_normalization` times c."""
        guided = without + scale.view(-1, 1, 1, 1) * (with_text - without)
        limit = self.config.cfg_normalization
        if limit is None:
            return guided
        norm, longest = (v.flatten(1).norm(dim=1).view(-1, 1, 1, 1) for v in (guided, limit * with_text))
        return guided * (longest / norm).clamp(max=1)


def _chat(encoder: Any, tokenizer: Any, length: int) -> dict[str, Any]:
    """States of the layer before the last [S, D], zeros where a chat is shorter, and L."""
    states = Qwen3States(encoder, tokenizer, length, layers=(-2,), thinking=True, encodes_padding=False)
    return {"text": states, "text_length": Encoding(states, states.lengths)}


def _rows(tensors: Mapping[str, Tensor], name: str) -> list[Tensor]:
    """States [L, D] of each row, without padding."""
    counts = tensors[f"{name}_length"].tolist()
    return [row[:count] for row, count in zip(tensors[name], counts, strict=True)]
