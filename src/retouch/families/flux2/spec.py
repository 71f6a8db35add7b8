"""Keys of the FLUX.2 families in a run file, and facts of their networks."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Annotated, Any

from pydantic import Field

from retouch.families.base import ModelSection


class Flux2Section(ModelSection):
    """A model on the network of FLUX.2."""

    max_sequence_length: Annotated[int, Field(ge=1, le=512)] = 512
    """Tokens that a prompt is padded or cut to, its chat template included. The network attends to the padding: another
    length than the released 512 changes its input, and needs less memory."""
    reference_images: bool = False
    """Give the network the reference of each example as a further image, behind the source. References are scaled and
    cropped to the size of the run; every example then needs one."""

    @property
    def takes_reference_images(self) -> bool:
        return self.reference_images

    def text_tokens(self, size: tuple[int, int]) -> int:
        return self.max_sequence_length

    def images_read(self, has_images: Set[str]) -> int:
        return ("source" in has_images) + self.reference_images


FACTS: dict[str, Any] = {
    "unmasked_attention": True,
    "prediction": "flow",
    "latent_channels": 128,
    "downsampling": 16,
    "size_multiple": 16,
    "needs": frozenset(),
    "lora_targets": (
        *(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")),
        *(f"attn.{name}" for name in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")),
        *(f"{name}.{layer}" for name in ("ff", "ff_context") for layer in ("linear_in", "linear_out")),
        *(f"attn.{name}" for name in ("to_qkv_mlp_proj", "to_out")),  # of the single blocks
    ),
    "network_name": "transformer",
    "edits_without_mask": True,
}
"""Arguments of `FamilySpec` that the families have in common."""


def networks(text_encoder: str) -> dict[str, str]:
    """`FamilySpec.networks` with a text encoder of this class."""
    return {"transformer": "Flux2Transformer2DModel", "vae": "AutoencoderKLFlux2", "text_encoder": text_encoder}


def released(text_encoder: Mapping[str, Any], **transformer: Any) -> dict[str, Mapping[str, Any]]:
    """`FamilySpec.released` of a transformer with these sizes, on a text encoder with this config."""
    sizes = {
        "patch_size": 1,
        "in_channels": 128,
        "attention_head_dim": 128,
        "timestep_guidance_channels": 256,
        "mlp_ratio": 3.0,
        "axes_dims_rope": (32, 32, 32, 32),
        "rope_theta": 2000,
    }
    return {"transformer": sizes | transformer, "vae": {}, "text_encoder": text_encoder}
