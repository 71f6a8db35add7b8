"""Qwen-Image-Edit and Edit-Plus in a run file, and their facts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from retouch.config.base import Text
from retouch.families.base import PROMPT_TOKENS, FamilySpec, patches
from retouch.families.qwen.spec import FACTS, QwenSection

if TYPE_CHECKING:
    from retouch.config.run import RunConfig

EditVariant = Literal["edit", "edit_plus"]

RELEASED: dict[EditVariant, tuple[str, ...]] = {
    "edit": ("Qwen/Qwen-Image-Edit",),
    "edit_plus": ("Qwen/Qwen-Image-Edit-2509", "Qwen/Qwen-Image-Edit-2511"),
}
"""Variant -> hub ids."""

CHAT_TOKENS = 11
"""Most tokens that the chat adds around an image and a prompt: `Picture 1: `, two marks, and the end of the turn."""


class QwenImageEditModel(QwenSection):
    """Qwen-Image-Edit and Edit-Plus (`QwenImageTransformer2DModel`, flow model): change an image by a prompt,
    without a mask."""

    spec: ClassVar[FamilySpec] = FamilySpec(
        **FACTS,
        family="qwen_image_edit",
        needs=frozenset({"source"}),
        model="retouch.families.qwen_image_edit.model:QwenImageEdit",
        pipeline="QwenImageEditPipeline",
        has_processor=True,
        hub_ids=(*RELEASED["edit"], *RELEASED["edit_plus"]),
    )
    variants: ClassVar[Mapping[Any, Sequence[str]]] = RELEASED

    family: Literal["qwen_image_edit"] = "qwen_image_edit"  # pyright: ignore[reportIncompatibleVariableOverride]
    path: str = RELEASED["edit"][0]
    """A hub id or a folder in the diffusers layout; for edit_plus Qwen/Qwen-Image-Edit-2511 or -2509; "tiny" is the
    base that comes with the package."""
    free_text_encoders: bool = False
    """Must be false: the states of the text encoder depend on the image."""
    embeddings: Text | None = None
    """Must be null: the states of the text encoder depend on the image."""
    variant: EditVariant = "edit"
    """"edit" is Qwen-Image-Edit; "edit_plus" is Edit-Plus (2509, 2511), which reads several source images and shows
    each at 384 x 384 to its text encoder."""
    max_sequence_length: Annotated[int, Field(ge=1, le=2048)] = 1024
    """Tokens that the image, the prompt and the end of the chat template are padded to. A longer prompt is cut, with a
    warning; the image never is."""
    vision_pixels: Annotated[int, Field(ge=1024)] | None = None
    """Area in pixels of the source in the text encoder, 784 a token; null is the source's own for edit, 147456
    (384 x 384) for edit_plus."""

    @property
    def pipeline(self) -> str:
        return "QwenImageEditPlusPipeline" if self.variant == "edit_plus" else self.spec.pipeline

    @property
    def takes_more_images(self) -> bool:
        return self.variant == "edit_plus"

    @property
    def chat_task(self) -> EditVariant:
        return self.variant

    def shown_size(self, size: tuple[int, int]) -> tuple[int, int]:
        """(height, width) at which the text encoder reads an image of `size`: the same, or `vision_pixels` at its
        aspect ratio in multiples of 32."""
        area = self.vision_pixels or (384 * 384 if self.variant == "edit_plus" else None)
        if area is None:
            return size
        width = math.sqrt(area * size[1] / size[0])
        height = width / (size[1] / size[0])
        return max(32, round(height / 32) * 32), max(32, round(width / 32) * 32)

    def vision_tokens(self, size: tuple[int, int]) -> int:
        return patches(self.shown_size(size), 28)  # Qwen2.5-VL: a token for 28 x 28 pixels

    def text_tokens(self, size: tuple[int, int]) -> int:
        return PROMPT_TOKENS + self.vision_tokens(size)

    def images_read(self, has_images: Set[str]) -> int:
        return 1

    def check(self, run: RunConfig, key: str = "model") -> None:
        super().check(run, key)
        reads = f"but the text encoder of {self.family} reads the source image with the prompt"
        if self.free_text_encoders:
            raise ValueError(
                f"{key}.free_text_encoders: given true, {reads} and is needed during the whole run; set "
                f"{key}.offload_text_encoders=true instead"
            )
        if self.embeddings is not None:
            raise ValueError(
                f"{key}.embeddings: given {self.embeddings!r}, {reads}, and embeddings are stored by the prompt alone; "
                "leave embeddings out"
            )

    def check_size(self, key: str, size: tuple[int, int]) -> None:
        taken = self.vision_tokens(size) + CHAT_TOKENS
        if taken >= self.max_sequence_length:
            raise ValueError(
                f"model.max_sequence_length: given {self.max_sequence_length}, but a source of {size[0]} x "
                f"{size[1]} ({key}.resolution, with reference_strip) takes {taken} tokens with the chat around it, "
                f"which leaves none for a prompt; set model.max_sequence_length to {taken + 256} or more, or a smaller "
                "model.vision_pixels"
            )
