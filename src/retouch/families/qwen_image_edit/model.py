"""Qwen-Image-Edit and Edit-Plus: flow models that change an image by a prompt, on diffusers' own networks.

The source is an input twice: to the text encoder, in front of the prompt, and as clean latents whose tokens follow the
noisy ones. `edit` gives both the same pixels; `edit_plus` (2509, 2511) reads several images, numbers them and gives the
text encoder small ones. The released pipelines scale every image to a megapixel; here sizes are those of the examples.
Everything equals diffusers' pipelines on the same text states, noise and sizes
(tests/families/test_qwen_image_edit.py). The states themselves differ because the pipelines do not pass the positions
of the images to the text encoder (diffusers issue 14194: `mm_token_type_ids`); here the text encoder gets the whole
output of the processor.

Legend: B samples, C latent channels, h w latent sides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from diffusers import QwenImageEditPipeline, QwenImageEditPlusPipeline
from PIL.Image import Image, Resampling
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

from retouch.families.inputs import optional_masks
from retouch.families.loading import load_component
from retouch.families.qwen import tiny
from retouch.families.qwen.base import QwenModel, picture_tensors
from retouch.families.qwen.text import ChatStates, ImageTextProcessor, Shown, chat_encoders
from retouch.families.qwen_image_edit.spec import RELEASED, EditVariant, QwenImageEditModel
from retouch.families.text import Encoding, Networks, TextEncoders
from retouch.imaging.fitting import stack_above
from retouch.types import Condition, Example


class QwenImageEdit(QwenModel):
    """The family protocol (`retouch.types.DiffusionModel`) for editing: a source, and no mask needed."""

    section = QwenImageEditModel
    kept_texts = 64
    """With their images; the next use of an example is usually soon, or in another cache."""

    @classmethod
    def text_encoders(
        cls, config: QwenImageEditModel, path: str, network: Networks, *, embedded: bool
    ) -> Mapping[str, Encoding]:
        chat = ChatStates(
            network(Qwen2_5_VLForConditionalGeneration, "text_encoder"),
            load_component(AutoTokenizer, path, "tokenizer", None),
            load_component(ImageTextProcessor, path, "processor", None),
            config.variant,
            config.max_sequence_length,
        )
        return chat_encoders(chat, _prompt_and_images)

    @classmethod
    def from_pipeline(cls, pipeline: Any, length: int = 128, vision_pixels: int | None = None) -> Self:
        """The networks of a `QwenImageEditPipeline` or `QwenImageEditPlusPipeline` in memory, images and prompts of up
        to `length` tokens; no text encoder if the pipeline has none."""
        variant: EditVariant = "edit_plus" if isinstance(pipeline, QwenImageEditPlusPipeline) else "edit"
        text = None
        if pipeline.text_encoder is not None:
            chat = ChatStates(pipeline.text_encoder, pipeline.tokenizer, pipeline.processor, variant, length)
            text = TextEncoders(chat_encoders(chat, _prompt_and_images), capacity=cls.kept_texts)
        config = QwenImageEditModel(variant=variant, path=RELEASED[variant][0], vision_pixels=vision_pixels)
        return cls(pipeline.transformer, pipeline.vae, text, pipeline.scheduler, config=config)

    @staticmethod
    def tiny(variant: EditVariant = "edit") -> QwenImageEditPipeline | QwenImageEditPlusPipeline:
        """The networks of the tiny Qwen-Image on wider text states; 28 x 28 pixels are a token of the text encoder."""
        kind: Any = QwenImageEditPlusPipeline if variant == "edit_plus" else QwenImageEditPipeline
        processor = tiny.tiny_qwen_processor()
        return kind(tokenizer=tiny.byte_qwen_tokenizer(), processor=processor, **tiny.parts(width=64))

    @property
    def prompts(self) -> None:
        """None: the text encoder reads the source with the prompt."""
        return None

    def shown(self, picture: Image) -> Image:
        """An image at its size in the text encoder, before the processor rounds the sides to its patches."""
        height, width = self.config.shown_size((picture.height, picture.width))
        return picture if picture.size == (width, height) else picture.resize((width, height), Resampling.LANCZOS)

    @torch.no_grad()
    def encode(self, examples: Sequence[Example], guidance_scale: float) -> Condition:
        """Sources, as latents and with the text, of examples of one size; a `guidance_scale` above 1 adds the negative
        prompt with the same images, and `predict` then doubles the batch of the network. A mask is kept only for losses
        that are restricted to it.

        Raises:
            ValueError: an example without a source, several sources of one of which `edit` takes one, not as many
                in each example, or a size that the network does not take.
        """
        sources = [self._sources(example) for example in examples]
        if len({len(row) for row in sources}) > 1:
            raise ValueError(
                f"examples have {[len(row) for row in sources]} source images; a batch needs as many in each"
            )
        images = [[self.shown(source) for source in row] for row in sources]
        tensors = {
            **self.guided_texts(examples, guidance_scale, lambda prompt, place: Shown.of(prompt, images[place])),
            **picture_tensors([[self.encode_picture(source) for source in row] for row in sources]),
        }
        size = (sources[0][0].height, sources[0][0].width)
        return Condition(tensors, optional_masks(examples, self.spec, self.device), size, self.on_host)

    def _sources(self, example: Example) -> list[Image]:
        """The image that is edited, with the strip of its reference above it, then what else `edit_plus` reads."""
        if example.source is None:
            raise ValueError(f"example {example.id} has no source image; qwen_image_edit changes one")
        if example.more_images and not self.config.takes_more_images:
            raise ValueError(
                f"example {example.id} has {1 + len(example.more_images)} source images, but variant=edit reads one; "
                "set model.variant=edit_plus"
            )
        return [stack_above(example.strip, example.source.convert("RGB")), *example.more_images]


def _prompt_and_images(shown: Shown) -> tuple[str, Sequence[Image]]:
    return shown.prompt, shown.images
