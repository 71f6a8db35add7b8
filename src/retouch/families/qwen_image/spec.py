"""Qwen-Image in a run file, and its facts."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from retouch.families.base import FamilySpec
from retouch.families.facts import AdapterFacts
from retouch.families.qwen.spec import FACTS, QwenSection
from retouch.families.released import SIGLIP_SO400M


class QwenImageModel(QwenSection):
    """Qwen-Image (`QwenImageTransformer2DModel`, flow model): text to image, and inpainting by blending latents where
    examples have a source and a mask."""

    spec: ClassVar[FamilySpec] = FamilySpec(
        **FACTS,
        family="qwen_image",
        needs=frozenset(),
        model="retouch.families.qwen_image.model:QwenImage",
        pipeline="QwenImagePipeline",
        hub_ids=("Qwen/Qwen-Image", "Qwen/Qwen-Image-2512"),
        adapter=AdapterFacts(
            network="QwenImageTransformer2DModel",
            host="retouch.families.qwen_image.host:QwenHost",
            head="mlp",
            tokens=128,
            image_encoder="google/siglip-so400m-patch14-384",
            width=1152,
            encoder=SIGLIP_SO400M,
        ),
    )

    family: Literal["qwen_image"] = "qwen_image"  # pyright: ignore[reportIncompatibleVariableOverride]
    path: str = spec.hub_ids[0]
    """A hub id or a folder in the diffusers layout."""
    max_sequence_length: Annotated[int, Field(ge=1, le=1024)] = 512
    """Tokens that a prompt is padded or cut to, the end of its chat template included."""

    @property
    def chat_task(self) -> Literal["draw"]:
        return "draw"
