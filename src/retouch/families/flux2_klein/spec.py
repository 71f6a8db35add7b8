"""FLUX.2 klein in a run file, and its facts."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from retouch.families.base import FamilySpec, ModelSection
from retouch.families.qwen3.spec import QWEN3_4B

KleinVariant = Literal["base", "distilled"]

RELEASED: dict[KleinVariant, tuple[str, ...]] = {
    "base": ("black-forest-labs/FLUX.2-klein-base-4B", "black-forest-labs/FLUX.2-klein-base-9B"),
    "distilled": ("black-forest-labs/FLUX.2-klein-4B", "black-forest-labs/FLUX.2-klein-9B"),
}
"""Variant -> hub ids."""

DISTILLED_STEPS = 4
"""Sampling steps of the distilled models."""


class Flux2KleinModel(ModelSection):
    """FLUX.2 klein (`Flux2Transformer2DModel`, flow model): text to image, edits of a source, and inpainting by
    blending latents where examples have a source and a mask."""

    spec: ClassVar[FamilySpec] = FamilySpec(
        family="flux2_klein",
        unmasked_attention=True,
        prediction="flow",
        latent_channels=128,
        downsampling=16,
        size_multiple=16,
        guidance_scale=4.0,
        needs=frozenset(),
        lora_targets=(
            *(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")),
            *(f"attn.{name}" for name in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")),
            *(f"{name}.{layer}" for name in ("ff", "ff_context") for layer in ("linear_in", "linear_out")),
            *(f"attn.{name}" for name in ("to_qkv_mlp_proj", "to_out")),  # of the single blocks
        ),
        network_name="transformer",
        model="retouch.families.flux2_klein.model:Flux2Klein",
        pipeline="Flux2KleinPipeline",
        networks={
            "transformer": "Flux2Transformer2DModel",
            "vae": "AutoencoderKLFlux2",
            "text_encoder": "Qwen3ForCausalLM",
        },
        released={
            "transformer": {  # of the 4B, 3.88 B parameters
                "patch_size": 1,
                "in_channels": 128,
                "num_layers": 5,
                "num_single_layers": 20,
                "attention_head_dim": 128,
                "num_attention_heads": 24,
                "joint_attention_dim": 7680,
                "timestep_guidance_channels": 256,
                "mlp_ratio": 3.0,
                "axes_dims_rope": (32, 32, 32, 32),
                "rope_theta": 2000,
                "guidance_embeds": False,
            },
            "vae": {},
            "text_encoder": QWEN3_4B,
        },
        hub_ids=(RELEASED["base"][0], RELEASED["distilled"][0]),
        doubles_for_guidance=True,
        edits_without_mask=True,
    )

    family: Literal["flux2_klein"] = "flux2_klein"  # pyright: ignore[reportIncompatibleVariableOverride]
    path: str = RELEASED["base"][0]
    """A hub id or a folder in the diffusers layout."""
    variant: KleinVariant = "base"
    """"base" is klein-base; "distilled" is klein, which was distilled to sample in 4 steps without guidance."""
    max_sequence_length: Annotated[int, Field(ge=1, le=512)] = 512
    """Tokens that a prompt is padded or cut to, its chat template included. The network attends to the padding: another
    length than the released 512 changes its input, and needs less memory."""
    reference_images: bool = False
    """Give the network the reference of each example as a further image, behind the source. References are scaled and
    cropped to the size of the run; every example then needs one."""

    @model_validator(mode="after")
    def _path_is_of_the_variant(self) -> Self:
        for variant, released in RELEASED.items():
            if self.path in released and variant != self.variant:
                other = RELEASED[self.variant][released.index(self.path)]
                raise ValueError(
                    f"path: given {self.path!r}, but model.variant is {self.variant!r}; set model.variant={variant}, "
                    f"or model.path={other}"
                )
        return self

    @property
    def distilled_steps(self) -> int | None:
        return DISTILLED_STEPS if self.variant == "distilled" else None

    @property
    def takes_reference_images(self) -> bool:
        return self.reference_images
