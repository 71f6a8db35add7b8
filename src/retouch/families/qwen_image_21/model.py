"""Qwen-Image-2.1: a flow model for text to image, edits and inpainting, on diffusers' own network.

One sequence holds the text, the latents of source images where the prompt has slots for them, and the noisy latents at
its end; it is causal, but the tokens of an image attend to all of that image. Inpainting blends latents as well
(`retouch.families.blending`). Everything equals diffusers' pipeline on the same weights and sizes
(tests/families/test_qwen_image_21.py), with these differences: images keep the size of the examples, decoded images are
RGB on white (the autoencoder has an alpha channel), and keys and values of the prompt are computed again at every step.

The network takes the layout of a batch from its first sample, and the positions of the noisy latents depend on the
length of the prompt. `predict` therefore runs the samples of one length together: one forward for each length.

Legend: B samples, C latent channels, h w latent sides, S text tokens, N image tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from diffusers import (
    AutoencoderKLQwenImage21,
    FlowMatchEulerDiscreteScheduler,
    QwenImage21Pipeline,
    QwenImage21Transformer2DModel,
)
from diffusers.models.autoencoders.autoencoder_kl_qwenimage21 import _unpatchify
from PIL.Image import Image
from torch import Tensor, nn
from transformers import Qwen2VLImageProcessorPil, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from retouch.families.blending import blended, blending_inputs, mask_cells
from retouch.families.diffusion import FamilyModel
from retouch.families.inputs import image_pixels, optional_masks
from retouch.families.loading import ModelFilesError, load_component
from retouch.families.qwen.base import picture_tensors, pictures_in
from retouch.families.qwen.text import CHAT_TEMPLATE, Shown
from retouch.families.qwen.tiny import byte_qwen_tokenizer, special_tokens
from retouch.families.qwen_image_21.network import SLOT_TOKENS, arranged
from retouch.families.qwen_image_21.spec import QwenImage21Model
from retouch.families.qwen_image_21.text import PADDING, SLOT, ImageTextProcessor, PromptStates
from retouch.families.text import Encoding, Networks, TextEncoders
from retouch.families.tiny import SHIFTED
from retouch.families.vae import QwenAutoencoder
from retouch.imaging.fitting import stack_above
from retouch.types import Condition, Example


class QwenImage21Autoencoder(QwenAutoencoder):
    """The autoencoder of Qwen-Image-2.1, whose images have an alpha channel: opaque in, on white out."""

    @property
    def downsampling(self) -> int:
        return self.vae.spatial_compression_ratio

    def _encode(self, images: Tensor) -> Tensor:
        return super()._encode(torch.cat([images, torch.ones_like(images[:, :1])], dim=1))

    def _decode(self, latents: Tensor) -> Tensor:
        colour, alpha = super()._decode(latents).float().clamp(-1, 1).split([3, 1], dim=1)
        return _on_white(colour, alpha)

    def decode_unclamped(self, latents: Tensor) -> Tensor:
        colour, alpha = super().decode_unclamped(latents).float().split([3, 1], dim=1)
        return _on_white(colour, alpha.clamp(-1, 1))

    def _decoded_frames(self, frames: Tensor) -> Tensor:
        decoded = self.vae.decoder(frames, first_chunk=True)
        patch = self.vae.config.patch_size
        return decoded if patch is None else _unpatchify(decoded, patch_size=patch)


def _on_white(colour: Tensor, alpha: Tensor) -> Tensor:
    opacity = (alpha + 1) / 2
    return colour * opacity + (1 - opacity)


class QwenImage21(FamilyModel):
    """The family protocol (`retouch.types.DiffusionModel`) for Qwen-Image-2.1: a prompt, with source images or without,
    and a mask where there is a source."""

    section = QwenImage21Model
    autoencoder_class = QwenImage21Autoencoder
    on_host = frozenset({"text_kinds"})

    def __init__(self, network: nn.Module, *parts: Any, **options: Any) -> None:
        super().__init__(arranged(network), *parts, **options)

    @classmethod
    def text_encoders(
        cls, config: QwenImage21Model, path: str, network: Networks, *, embedded: bool
    ) -> Mapping[str, Any]:
        model = network(Qwen3VLForConditionalGeneration, "text_encoder")
        processor = load_component(ImageTextProcessor, path, "processor", None)
        return _encoders(PromptStates(model, processor, config.max_sequence_length))

    @classmethod
    def require_index(cls, config: QwenImage21Model, index: Mapping[str, Any]) -> None:
        """As `FamilyModel.require_index`; also for a few-step variant, whose index has times of its own."""
        super().require_index(config, index)
        times = index.get("sample_sigmas")
        if times is not None:
            raise ModelFilesError(
                f"model.path: given a few-step variant, whose model_index.json sets the {len(times)} sampling times "
                "sample_sigmas, which qwen_image_21 does not support; set model.path=Qwen/Qwen-Image-2.1"
            )

    @classmethod
    def from_pipeline(cls, pipeline: Any, length: int = 128) -> Self:
        """The networks of a `QwenImage21Pipeline` in memory, prompts padded to `length` tokens."""
        config = QwenImage21Model(max_sequence_length=length)
        cls.require_index(config, pipeline.config)
        text = TextEncoders(_encoders(PromptStates(pipeline.text_encoder, pipeline.processor, length)))
        return cls(pipeline.transformer, pipeline.vae, text, pipeline.scheduler, config=config)

    @staticmethod
    def tiny() -> QwenImage21Pipeline:
        """2 blocks of width 32 on an autoencoder that downsamples by 16, as the pipeline assumes; prompts are bytes."""
        width, channels = 32, 8
        vae: Any = AutoencoderKLQwenImage21(
            base_dim=8,
            decoder_base_dim=8,
            z_dim=channels,
            dim_mult=[1, 1, 2, 2, 2],
            num_res_blocks=1,
            latents_mean=[0.1 * i - 0.3 for i in range(channels)],
            latents_std=[0.8 + 0.1 * i for i in range(channels)],
        )
        transformer: Any = QwenImage21Transformer2DModel(
            in_channels=channels,
            out_channels=channels,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            context_in_dim=width,
            axes_dims_rope=(4, 6, 6),
        )
        images = Qwen2VLImageProcessorPil(patch_size=16, min_pixels=32 * 32, max_pixels=64 * 32 * 32)
        processor: Any = ImageTextProcessor(images, byte_qwen_tokenizer(), chat_template=CHAT_TEMPLATE)
        scheduler = FlowMatchEulerDiscreteScheduler(**SHIFTED, shift_terminal=0.02)
        return QwenImage21Pipeline(scheduler, vae, _tiny_qwen3_vl(width), processor, transformer)

    def image_tokens(self, size: tuple[int, int]) -> int:
        return (size[0] // self.spec.downsampling) * (size[1] // self.spec.downsampling)

    @torch.no_grad()
    def encode(self, examples: Sequence[Example], guidance_scale: float) -> Condition:
        """Text with its source images, their latents and the mask, of examples of one size; a `guidance_scale` above 1
        adds the negative prompt with the same images, and `predict` then runs the network twice.

        Raises:
            ValueError: some examples with a source or a mask and some without, not as many sources in each, neither a
                source nor a size, or a size that the network does not take.
        """
        sources = [_sources(example) for example in examples]
        if len({len(row) for row in sources}) > 1:
            counts = [len(row) for row in sources]
            raise ValueError(f"examples have {counts} source images; a batch needs as many in each")
        for source in (source for row in sources for source in row):
            self.require_size((source.height, source.width))
        if sources[0] and self.texts().stored is not None:
            raise ValueError(
                "model.embeddings: stored by the prompt alone, but the examples have source images, which the text "
                "encoder reads with the prompt; set model.embeddings=null"
            )
        tensors = self.guided_texts(examples, guidance_scale, lambda prompt, place: _text(prompt, sources[place]))
        # Without sources there is nothing to keep outside a mask: `blending_inputs` only requires one size of all
        # examples. With sources and masks, `predict` keeps the latents of the first source.
        if not sources[0]:
            _, mask, size = blending_inputs(self, examples)
            return Condition(tensors, mask, size, self.on_host)
        tensors |= picture_tensors([[self._latents(source) for source in row] for row in sources])
        mask = optional_masks(examples, self.spec, self.device)
        if mask is not None:
            tensors["mask_cells"] = mask_cells(mask, self.spec.downsampling)
        return Condition(tensors, mask, (sources[0][0].height, sources[0][0].width), self.on_host)

    def predict(self, network: nn.Module, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        """Velocity [B, C, h, w] at sigma `t` [B], by classifier-free guidance; outside a mask the one that leads to the
        source."""
        c = condition.tensors
        velocity = self._velocity(network, x, t, c, "text")
        if "negative_text" in c:
            without = self._velocity(network, x, t, c, "negative_text")
            velocity = without + c["guidance"].view(-1, 1, 1, 1) * (velocity - without)
        if "mask_cells" not in c:
            return velocity
        return blended(velocity, x, t, {"source_latents": c["picture_0"], "mask_cells": c["mask_cells"]})

    def _velocity(self, network: nn.Module, x: Tensor, t: Tensor, tensors: Mapping[str, Tensor], name: str) -> Tensor:
        """Without guidance, on the text `name`: samples of one length in one forward."""
        kinds = tensors[f"{name}_kinds"]
        rows_of: defaultdict[int, list[int]] = defaultdict(list)
        for row, length in enumerate((kinds != PADDING).sum(1).tolist()):
            rows_of[length].append(row)
        images = [*pictures_in(tensors), x]
        found: dict[int, Tensor] = {}
        for length, rows in sorted(rows_of.items()):
            of_length = [_picked(image, rows) for image in images]
            text = _picked(tensors[name], rows)[:, :length].to(self.dtype)
            slots = (kinds[rows[0], :length] == SLOT).tolist()
            made = self._forward(network, of_length, _picked(t, rows), text, slots)
            found |= zip(rows, made.split(1), strict=True)
        return torch.cat([found[row] for row in range(len(x))])

    def _forward(
        self, network: nn.Module, images: Sequence[Tensor], t: Tensor, text: Tensor, slots: list[bool]
    ) -> Tensor:
        """Velocity [B, C, h, w] of the last of `images` [B, C, h, w]; `slots` [S] are those of the others in `text`
        [B, S, D], which has no padding."""
        x = images[-1]
        h, w = x.shape[2:]
        tokens = torch.cat([image.flatten(2).transpose(1, 2) for image in images], dim=1).to(self.dtype)
        output = network(
            hidden_states=tokens,
            encoder_hidden_states=text,
            # the pipeline rounds 1000 sigma to the network's dtype before it divides
            timestep=(t * 1000).to(self.dtype) / 1000,
            img_shapes=[[(1, image.shape[2], image.shape[3]) for image in images]] * len(x),
            img_mask=[*slots, *[True] * (h * w // SLOT_TOKENS)],
            return_dict=False,
        )[0][:, -h * w :]
        return output.float().transpose(1, 2).unflatten(2, (h, w))

    def _latents(self, source: Image) -> Tensor:
        """[1, C, h, w], kept for the next time."""
        return self.autoencoder.encode_once(image_pixels(source, self.device)[None])


def _sources(example: Example) -> list[Image]:
    """RGB source images, first the one that is edited, with the strip of an in-context reference above it."""
    if example.source is None:
        return []
    edited = stack_above(example.strip, example.source.convert("RGB"))
    return [edited, *(image.convert("RGB") for image in example.more_images)]


def _picked(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """Rows of a tensor. Not by an index: one that is made of a list is copied to the device, which the CPU awaits."""
    return tensor if len(rows) == len(tensor) else torch.cat([tensor[row : row + 1] for row in rows])


def _text(prompt: str, sources: Sequence[Image]) -> str | Shown:
    """A prompt alone is a string, by which embeddings are stored."""
    return Shown.of(prompt, sources) if sources else prompt


def _encoders(states: PromptStates) -> Mapping[str, Any]:
    return {"text": states, "text_kinds": Encoding(states, states.kinds)}


def _tiny_qwen3_vl(width: int) -> Qwen3VLForConditionalGeneration:
    """A four-layer Qwen3-VL over bytes and image patches, with heads of 16."""
    tokenizer = byte_qwen_tokenizer()
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": width,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    config = Qwen3VLConfig(text_config=text, vision_config=vision, **special_tokens(tokenizer))
    return Qwen3VLForConditionalGeneration(config).eval()
