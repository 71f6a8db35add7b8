"""FLUX.2 [dev] in a run file, and its facts."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from retouch.families.base import FamilySpec
from retouch.families.flux2.spec import FACTS, Flux2Section, networks, released

MISTRAL_SMALL: dict[str, Any] = {  # 24.0 B parameters
    "text_config": {
        "model_type": "mistral",
        "vocab_size": 131072,
        "hidden_size": 5120,
        "intermediate_size": 32768,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e9},
        "sliding_window": None,
    },
    "vision_config": {
        "model_type": "pixtral",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "head_dim": 64,
        "image_size": 1540,
        "patch_size": 14,
    },
    "tie_word_embeddings": False,
}
"""Config of Mistral Small 3.1."""


class Flux2DevModel(Flux2Section):
    """FLUX.2 [dev] (`Flux2Transformer2DModel`, flow model): text to image, edits of a source, and inpainting by
    blending latents where examples have a source and a mask."""

    spec: ClassVar[FamilySpec] = FamilySpec(
        **FACTS,
        family="flux2_dev",
        guidance_scale=4.0,  # embedded
        model="retouch.families.flux2_dev.model:Flux2Dev",
        pipeline="Flux2Pipeline",
        networks=networks("Mistral3ForConditionalGeneration"),
        released=released(  # 32.2 B parameters
            MISTRAL_SMALL,
            num_layers=8,
            num_single_layers=48,
            num_attention_heads=48,
            joint_attention_dim=15360,
            guidance_embeds=True,
        ),
        hub_ids=("black-forest-labs/FLUX.2-dev",),
    )

    family: Literal["flux2_dev"] = "flux2_dev"  # pyright: ignore[reportIncompatibleVariableOverride]
    path: str = spec.hub_ids[0]
    """A hub id or a folder in the diffusers layout."""
