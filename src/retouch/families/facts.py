"""What `retouch check` must know of a family without importing torch. The family's own file has the last word."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class FamilyFacts:
    """Facts of a released model.

    Attributes:
        prediction: what its network predicts; step rules are for one or the other.
        size_multiple: pixels that image sides must be multiples of.
        guidance_scale: default of the released model.
        doubles_for_guidance: whether a guidance_scale above 1 runs the network twice (classifier-free guidance); false
            where the scale is embedded.
        needs: pictures that every example must have.
        drops_text_stream: whether what the last block makes of the text goes nowhere, so that some weights never have
            a gradient.
        reads_embeddings: whether it takes text embeddings from the files that examples name (t5_embedding_path).
    """

    prediction: Literal["flow", "epsilon"]
    size_multiple: int
    guidance_scale: float
    doubles_for_guidance: bool
    needs: frozenset[str]
    drops_text_stream: bool = False
    reads_embeddings: bool = False

    @property
    def edits(self) -> bool:
        """Whether it changes a whole picture, and so takes one without a mask."""
        return "source" in self.needs and "mask" not in self.needs


EditVariant = Literal["edit", "edit_plus"]

EDIT_PIPELINES: dict[EditVariant, str] = {"edit": "QwenImageEditPipeline", "edit_plus": "QwenImageEditPlusPipeline"}
"""Class in diffusers of each variant of Qwen-Image-Edit."""

EDIT_CHAT_TOKENS = 11
"""What the chat puts around a picture and a prompt at most: "Picture 1: ", two marks, and the end of the turn."""

EDIT_PLUS_VISION_PIXELS = 384 * 384
"""Area of the picture that Edit-Plus shows its text encoder."""


def shown_size(size: tuple[int, int], variant: EditVariant, vision_pixels: int | None) -> tuple[int, int]:
    """(height, width) that Qwen-Image-Edit shows its text encoder of a picture of `size`: the same, or `vision_pixels`
    at its aspect ratio in multiples of 32."""
    area = vision_pixels or (EDIT_PLUS_VISION_PIXELS if variant == "edit_plus" else None)
    if area is None:
        return size
    width = math.sqrt(area * size[1] / size[0])
    height = width / (size[1] / size[0])
    return max(32, round(height / 32) * 32), max(32, round(width / 32) * 32)


def vision_tokens(shown: tuple[int, int]) -> int:
    """Tokens that a picture of (height, width) takes in Qwen2.5-VL: one for 28 x 28 pixels, of sides rounded to it."""
    return max(1, round(shown[0] / 28)) * max(1, round(shown[1] / 28))


_INPAINTING = frozenset({"source", "mask"})

FACTS = {
    "flux_fill": FamilyFacts("flow", 16, 30.0, doubles_for_guidance=False, needs=_INPAINTING, reads_embeddings=True),
    "sd_inpaint": FamilyFacts("epsilon", 8, 7.5, doubles_for_guidance=True, needs=_INPAINTING),
    "qwen_image": FamilyFacts("flow", 16, 4.0, doubles_for_guidance=True, needs=frozenset(), drops_text_stream=True),
    "qwen_image_edit": FamilyFacts(
        "flow", 16, 4.0, doubles_for_guidance=True, needs=frozenset({"source"}), drops_text_stream=True
    ),
}

DEFAULT_FAMILY = "flux_fill"
"""Of a model section that names none."""


@dataclass(frozen=True)
class AdapterFacts:
    """The style adapter that a family has where `model.train` says nothing else.

    Attributes:
        head: how a reference becomes tokens; see retouch.adapters.formats.
        tokens: how many.
        image_encoder: hub id of the encoder of references.
        width: of the vectors that this encoder makes.
    """

    head: Literal["mlp", "linear"]
    tokens: int
    image_encoder: str
    width: int


ADAPTERS = {
    "flux_fill": AdapterFacts("mlp", 128, "google/siglip-so400m-patch14-384", 1152),
    "sd_inpaint": AdapterFacts("linear", 4, "laion/CLIP-ViT-H-14-laion2B-s32B-b79K", 1024),
    "qwen_image": AdapterFacts("mlp", 128, "google/siglip-so400m-patch14-384", 1152),
}

TINY_SIZE_MULTIPLE = 8
"""Of the tiny bases, whose autoencoder shrinks 4 x."""
