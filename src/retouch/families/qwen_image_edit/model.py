"""Qwen-Image-Edit and Edit-Plus: flow models that change a picture as a sentence says, on diffusers' own networks.

The picture is shown twice: to the text encoder, in front of the prompt, and as clean latents whose tokens follow the
noisy ones. `edit` shows both the same pixels; `edit_plus` (2509) numbers its pictures and shows the text encoder a
small one. The released pipelines scale every picture to a megapixel; here sizes are those of the examples. Everything
equals diffusers' pipelines on the same text states, noise and sizes (tests/families/test_qwen_image_edit.py). The
states themselves differ where the pipelines forget to tell the text encoder where the pictures are (diffusers issue
14194: `mm_token_type_ids`): everything that the processor makes goes to the model here.

Legend: B rows, C latent channels, h w latent sides.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel
from PIL.Image import Image, Resampling
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

from retouch.families.facts import (
    EDIT_PIPELINES,
    EditVariant,
    shown_size,
)
from retouch.families.inputs import optional_masks
from retouch.families.loading import (
    load_component,
    open_pipeline,
)
from retouch.families.qwen.base import (
    LORA_TARGETS,
    NEGATIVE,
    QwenModel,
    picture_tensors,
)
from retouch.families.qwen.distillation import merge_distillation_lora
from retouch.families.qwen.text import (
    ChatStates,
    ImageTextProcessor,
    chat_encoders,
)
from retouch.families.text import TextEncoders
from retouch.types import Condition, Example

if TYPE_CHECKING:
    from retouch.families.sections import QwenImageEditModel

__all__ = ["LORA_TARGETS", "QwenImageEdit"]

KEPT_TEXTS = 64
"""Pictures with a prompt whose states are kept; the next use of an example is usually soon, or in another cache."""


class QwenImageEdit(QwenModel):
    """The family protocol (`retouch.types.DiffusionModel`) for editing: a source, and no mask needed."""

    def __init__(
        self,
        network: Any,  # QwenImageTransformer2DModel; diffusers' configs are untyped
        vae: Any,  # AutoencoderKLQwenImage
        text: TextEncoders | None,
        scheduler: Any,  # FlowMatchEulerDiscreteScheduler
        device: torch.device | str = "cpu",
        *,
        variant: EditVariant = "edit",
        vision_pixels: int | None = None,
        shift: float | None = None,
    ) -> None:
        super().__init__(
            network,
            vae,
            text,
            scheduler,
            device,
            family="qwen_image_edit",
            released="Qwen/Qwen-Image-Edit",
            needs=frozenset({"source"}),
            shift=shift,
        )
        self.variant: EditVariant = variant
        self.vision_pixels = vision_pixels

    @classmethod
    def from_config(
        cls, config: QwenImageEditModel, device: torch.device | str = "cpu", *, with_text: bool = True
    ) -> QwenImageEdit:
        """Load a hub id or a local folder in the diffusers layout; without its text encoder only to draw from states.

        Raises:
            ModelFilesError: a component is missing or of another class.
        """
        path, trained, frozen = open_pipeline(config, EDIT_PIPELINES[config.variant])
        text = None
        if with_text:
            chat = ChatStates(
                load_component(Qwen2_5_VLForConditionalGeneration, path, "text_encoder", frozen),
                load_component(AutoTokenizer, path, "tokenizer", None),
                load_component(ImageTextProcessor, path, "processor", None),
                config.variant,
                config.max_sequence_length,
            )
            text = chat_encoders(chat, _words_and_picture, device, config.offload_text_encoders, KEPT_TEXTS)
        network = load_component(QwenImageTransformer2DModel, path, "transformer", trained)
        merge_distillation_lora(network, config.distillation_lora)
        return cls(
            network=network,
            vae=load_component(AutoencoderKLQwenImage, path, "vae", frozen),
            text=text,
            scheduler=load_component(FlowMatchEulerDiscreteScheduler, path, "scheduler", None),
            device=device,
            variant=config.variant,
            vision_pixels=config.vision_pixels,
            shift=config.distillation_lora.shift if config.distillation_lora else None,
        )

    @classmethod
    def from_pipeline(cls, pipeline: Any, length: int = 128, vision_pixels: int | None = None) -> QwenImageEdit:
        """The networks of a `QwenImageEditPipeline` or `QwenImageEditPlusPipeline` in memory, pictures and prompts of
        up to `length` tokens; no text encoder where the pipeline has none."""
        variant: EditVariant = "edit_plus" if type(pipeline).__name__ == EDIT_PIPELINES["edit_plus"] else "edit"
        text = None
        if pipeline.text_encoder is not None:
            chat = ChatStates(pipeline.text_encoder, pipeline.tokenizer, pipeline.processor, variant, length)
            text = chat_encoders(chat, _words_and_picture, capacity=KEPT_TEXTS)
        return cls(
            pipeline.transformer,
            pipeline.vae,
            text,
            pipeline.scheduler,
            variant=variant,
            vision_pixels=vision_pixels,
        )

    def shown(self, picture: Image) -> Image:
        """What the text encoder sees of a picture, before its processor rounds the sides to its patches."""
        height, width = shown_size((picture.height, picture.width), self.variant, self.vision_pixels)
        return picture if picture.size == (width, height) else picture.resize((width, height), Resampling.LANCZOS)

    @torch.no_grad()
    def encode(self, examples: Sequence[Example], guidance_scale: float) -> Condition:
        """Sources, as latents and with the text, of examples of one size; a `guidance_scale` above 1 adds the negative
        prompt with the same picture, and `predict` then runs twice the rows. A mask is kept for losses that are taken
        in it alone; the network sees none.

        Raises:
            ValueError: an example without a source, or a size that the network does not take.
        """
        text = self.texts()
        sources = [_source(example) for example in examples]
        pictures = [self.shown(source) for source in sources]
        tensors = {
            **text.encode([Shown.of(e.prompt, p) for e, p in zip(examples, pictures, strict=True)]),
            "guidance": torch.full((len(examples),), guidance_scale, device=self.device),
            **picture_tensors([[self.encode_picture(source)] for source in sources]),
        }
        if guidance_scale > 1:
            negative = text.encode([Shown.of(NEGATIVE, picture) for picture in pictures])
            tensors |= {f"negative_{name}": t for name, t in negative.items()}
        size = (sources[0].height, sources[0].width)
        return Condition(tensors, optional_masks(examples, self.spec, self.device), size)

    def cache_prompts(self, prompts: Sequence[str]) -> None:
        """Raises: RuntimeError: a prompt alone is not what the text encoder reads."""
        raise RuntimeError(_NO_PROMPTS)

    def release_text_encoders(self) -> None:
        """Raises: RuntimeError: they are needed for every picture."""
        raise RuntimeError(_NO_PROMPTS)


_NO_PROMPTS = (
    "the text encoder of qwen_image_edit reads the picture with the prompt, so that prompts alone cannot be encoded "
    "first; set model.free_text_encoders=false"
)


@dataclass(frozen=True)
class Shown:
    """A prompt and the picture that the text encoder sees with it; equal where both are."""

    prompt: str
    digest: bytes
    picture: Image = field(compare=False, repr=False)

    @classmethod
    def of(cls, prompt: str, picture: Image) -> Shown:
        pixels = picture.convert("RGB")
        return cls(prompt, hashlib.sha256(repr(pixels.size).encode() + pixels.tobytes()).digest(), pixels)


def _words_and_picture(shown: Shown) -> tuple[str, list[Image]]:
    return shown.prompt, [shown.picture]


def _source(example: Example) -> Image:
    if example.source is None:
        raise ValueError(f"example {example.id} has no source image; qwen_image_edit changes one")
    return example.source
