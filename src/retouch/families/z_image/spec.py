"""Z-Image in a run file, and its facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from retouch.config.base import Positive
from retouch.families.base import FamilySpec, ModelSection
from retouch.families.qwen3.spec import QWEN3_4B
from retouch.families.released import autoencoder

ZImageVariant = Literal["base", "turbo"]

RELEASED: dict[ZImageVariant, str] = {"base": "Tongyi-MAI/Z-Image", "turbo": "Tongyi-MAI/Z-Image-Turbo"}
"""Variant -> hub id."""

TURBO_STEPS = 8
"""Network forwards of an image of Z-Image-Turbo."""


class ZImageModel(ModelSection):
    """Z-Image and Z-Image-Turbo (`ZImageTransformer2DModel`, flow model): text to image, and inpainting by blending
    latents where examples have a source and a mask."""

    spec: ClassVar[FamilySpec] = FamilySpec(
        family="z_image",
        prediction="flow",
        latent_channels=16,
        downsampling=8,
        size_multiple=16,
        guidance_scale=5.0,  # diffusers writes c + g (c - u): its 4 is our 5
        needs=frozenset(),
        lora_targets=(
            *(f"attention.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")),
            *(f"feed_forward.{name}" for name in ("w1", "w2", "w3")),
        ),
        network_name="transformer",
        model="retouch.families.z_image.model:ZImage",
        pipeline="ZImagePipeline",
        networks={"transformer": "ZImageTransformer2DModel", "vae": "AutoencoderKL", "text_encoder": "Qwen3Model"},
        released={
            "transformer": {  # 6.15 B parameters
                "in_channels": 16,
                "dim": 3840,
                "n_layers": 30,
                "n_refiner_layers": 2,
                "n_heads": 30,
                "n_kv_heads": 30,
                "cap_feat_dim": 2560,
                "axes_dims": [32, 48, 48],
                "axes_lens": [1536, 512, 512],
            },
            "vae": autoencoder(16),  # of FLUX.1
            "text_encoder": QWEN3_4B,
        },
        hub_ids=tuple(RELEASED.values()),
        doubles_for_guidance=True,
    )
    variants: ClassVar[Mapping[Any, Sequence[str]]] = {variant: (hub_id,) for variant, hub_id in RELEASED.items()}

    family: Literal["z_image"] = "z_image"  # pyright: ignore[reportIncompatibleVariableOverride]
    path: str = RELEASED["base"]
    """A hub id or a folder in the diffusers layout."""
    variant: ZImageVariant = "base"
    """"base" is Z-Image; "turbo" is Z-Image-Turbo, which was distilled to sample in 8 steps without guidance."""
    max_sequence_length: Annotated[int, Field(ge=1, le=512)] = 512
    """Tokens that a prompt is cut to, its chat template included."""
    cfg_normalization: Positive | None = None
    """Largest norm of a guided prediction, as a multiple of the norm of the prediction with the prompt; null sets no
    limit. `cfg_normalization=True` of the diffusers pipeline is 1."""

    @property
    def distilled_steps(self) -> int | None:
        return TURBO_STEPS if self.variant == "turbo" else None
