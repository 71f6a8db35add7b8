"""FLUX.2 klein: a flow model for text to image, edits and inpainting, on diffusers' own network.

A Qwen3 reads the prompt, and guidance is classifier-free. `retouch.families.flux2.base` has the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from diffusers import Flux2KleinPipeline
from transformers import Qwen3ForCausalLM

from retouch.families.flux2.base import Flux2Model, quarters, tiny_parts
from retouch.families.flux2_klein.spec import Flux2KleinModel
from retouch.families.loading import ModelFilesError
from retouch.families.qwen3.text import Qwen3States
from retouch.families.qwen3.tiny import chat_tokenizer, qwen3


class Flux2Klein(Flux2Model):
    """The family protocol (`retouch.types.DiffusionModel`) for FLUX.2 klein: a prompt, with a source or without, and a
    mask where there is a source."""

    section = Flux2KleinModel
    embeds_guidance = False

    @staticmethod
    def language_model(encoder: Qwen3ForCausalLM) -> Any:
        return encoder.model

    @staticmethod
    def states(model: Any, tokenizer: Any, length: int) -> Qwen3States:
        """After the layers 9, 18 and 27 of the released encoders."""
        return Qwen3States(model, tokenizer, length, quarters(model), thinking=False, encodes_padding=True)

    @classmethod
    def require_index(cls, config: Flux2KleinModel, index: Mapping[str, Any]) -> None:
        super().require_index(config, index)
        found = _variant(index)
        if found != config.variant:
            raise ModelFilesError(
                f"model.variant: given {config.variant!r}, but {config.path} is a {found} model; set "
                f"model.variant={found}"
            )

    @classmethod
    def from_pipeline(cls, pipeline: Any, length: int = 128, **options: Any) -> Self:
        return super().from_pipeline(pipeline, length, variant=_variant(pipeline.config), **options)

    @staticmethod
    def tiny() -> Flux2KleinPipeline:
        """See `tiny_parts`; prompts are bytes."""
        width = 32
        return Flux2KleinPipeline(
            **tiny_parts(width, guidance_embeds=False),
            text_encoder=qwen3(Qwen3ForCausalLM, width),
            tokenizer=chat_tokenizer(),
        )


def _variant(index: Mapping[str, Any]) -> Any:
    return "distilled" if index.get("is_distilled", False) else "base"
