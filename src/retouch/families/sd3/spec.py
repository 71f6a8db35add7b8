"""Stable Diffusion 3.5 in a run file, and its facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from retouch.families.base import FamilySpec, ModelSection
from retouch.families.released import CLIP_BIGG, CLIP_L, T5_XXL, autoencoder

Sd3Variant = Literal["medium", "large", "large_turbo"]

RELEASED: dict[Sd3Variant, str] = {
    "medium": "stabilityai/stable-diffusion-3.5-medium",
    "large": "stabilityai/stable-diffusion-3.5-large",
    "large_turbo": "stabilityai/stable-diffusion-3.5-large-turbo",
}
"""Variant -> hub id."""

TURBO_STEPS = 4
"""Sampling steps of large-turbo."""

LARGE_GUIDANCE = 3.5
"""Released guidance scale of large."""

CLIP_TOKENS = 77


class Sd3Model(ModelSection):
    """Stable Diffusion 3.5 (`SD3Transformer2DModel`, flow model), medium, large and large-turbo: text to image, and
    inpainting by blending latents where examples have a source and a mask.

    LoRA adapts the joint attention of every block by default, as published; the second image attention `attn2` of
    medium's first 13 blocks is not adapted. `model.train.targets` with bare names (`to_q`) adapts it, too."""

    spec: ClassVar[FamilySpec] = FamilySpec(
        family="sd3",
        prediction="flow",
        latent_channels=16,
        downsampling=8,
        size_multiple=16,
        guidance_scale=4.5,  # of medium
        needs=frozenset(),
        lora_targets=(
            *(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")),
            *(f"attn.{name}" for name in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")),
        ),
        network_name="transformer",
        model="retouch.families.sd3.model:Sd3",
        pipeline="StableDiffusion3Pipeline",
        networks={
            "transformer": "SD3Transformer2DModel",
            "vae": "AutoencoderKL",
            "text_encoder": "CLIPTextModelWithProjection",
            "text_encoder_2": "CLIPTextModelWithProjection",
            "text_encoder_3": "T5EncoderModel",
        },
        optional=frozenset({"text_encoder_3"}),
        released={
            "transformer": {  # medium: 2.24 B parameters and a table of positions of 0.23 B
                "sample_size": 128,
                "patch_size": 2,
                "in_channels": 16,
                "out_channels": 16,
                "num_layers": 24,
                "attention_head_dim": 64,
                "num_attention_heads": 24,
                "joint_attention_dim": 4096,
                "caption_projection_dim": 1536,
                "pooled_projection_dim": 2048,
                "pos_embed_max_size": 384,
                "dual_attention_layers": tuple(range(13)),
                "qk_norm": "rms_norm",
            },
            "vae": autoencoder(16, scaling_factor=1.5305, shift_factor=0.0609),
            "text_encoder": CLIP_L,
            "text_encoder_2": CLIP_BIGG,
            "text_encoder_3": T5_XXL,
        },
        hub_ids=(RELEASED["medium"],),  # large and large-turbo have other sizes
        doubles_for_guidance=True,
        drops_text_stream="partly",
    )
    variants: ClassVar[Mapping[Any, Sequence[str]]] = {variant: (hub_id,) for variant, hub_id in RELEASED.items()}

    family: Literal["sd3"] = "sd3"  # pyright: ignore[reportIncompatibleVariableOverride]
    path: str = RELEASED["medium"]
    """A hub id or a folder in the diffusers layout."""
    variant: Sd3Variant = "medium"
    """Model of `path`, with the default guidance scale of 4.5, 3.5 or 1. "large_turbo" was distilled from large to
    sample in 4 steps without guidance."""
    max_sequence_length: Annotated[int, Field(ge=1, le=512)] = 256
    """T5 tokens that a prompt is padded or cut to. The network attends to the padding: the length changes its input.
    Flow-GRPO and DiffusionNFT trained with 128."""

    @property
    def _is_taken_for_released(self) -> bool:
        return self.variant == "medium"

    def text_tokens(self, size: tuple[int, int]) -> int:
        return CLIP_TOKENS + self.max_sequence_length

    @property
    def distilled_steps(self) -> int | None:
        return TURBO_STEPS if self.variant == "large_turbo" else None

    @property
    def guidance_scale(self) -> float:
        return LARGE_GUIDANCE if self.variant == "large" else super().guidance_scale
