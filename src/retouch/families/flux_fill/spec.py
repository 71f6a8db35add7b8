"""FLUX.1-Fill in a run file, and its facts."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from retouch.families.base import AdapterFacts, FamilySpec, ModelSection


class FluxFillModel(ModelSection):
    """FLUX.1-Fill (`FluxTransformer2DModel`, mask-conditioned flow model)."""

    spec: ClassVar[FamilySpec] = FamilySpec(
        family="flux_fill",
        prediction="flow",
        latent_channels=16,
        downsampling=8,
        size_multiple=16,
        guidance_scale=30.0,  # FLUX.1-dev uses 3.5
        needs=frozenset({"source", "mask"}),
        lora_targets=(
            *(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")),
            *(f"attn.{name}" for name in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")),
            *(f"{name}.net.{layer}" for name in ("ff", "ff_context") for layer in ("0.proj", "2")),
        ),
        network_name="transformer",
        model="retouch.families.flux_fill.model:FluxFill",
        pipeline="FluxFillPipeline",
        networks={
            "transformer": "FluxTransformer2DModel",
            "vae": "AutoencoderKL",
            "text_encoder": "CLIPTextModel",
            "text_encoder_2": "T5EncoderModel",
        },
        released={
            "transformer": {  # 11.9 B parameters
                "patch_size": 1,
                "in_channels": 384,
                "out_channels": 64,
                "num_layers": 19,
                "num_single_layers": 38,
                "attention_head_dim": 128,
                "num_attention_heads": 24,
                "joint_attention_dim": 4096,
                "pooled_projection_dim": 768,
                "guidance_embeds": True,
                "axes_dims_rope": (16, 56, 56),
            }
        },
        hub_ids=("black-forest-labs/FLUX.1-Fill-dev",),
        embedded_encoder="text_encoder_2",
        adapter=AdapterFacts(
            network="FluxTransformer2DModel",
            host="retouch.families.flux_fill.host:FluxHost",
            head="mlp",
            tokens=128,
            image_encoder="google/siglip-so400m-patch14-384",
            width=1152,
        ),
    )

    family: Literal["flux_fill"] = "flux_fill"  # pyright: ignore[reportIncompatibleVariableOverride]
    path: str = spec.hub_ids[0]
    """A hub id or a folder in the diffusers layout; "tiny" is the base that comes with the package."""
    max_sequence_length: Annotated[int, Field(ge=1, le=512)] = 512
    """T5 tokens that a prompt is padded or cut to."""
