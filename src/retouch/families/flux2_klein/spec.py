"""FLUX.2 klein in a run file, and its facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from retouch.families.base import FamilySpec
from retouch.families.flux2.spec import FACTS, Flux2Section, networks, released
from retouch.families.qwen3.spec import QWEN3_4B

KleinVariant = Literal["base", "distilled"]

RELEASED: dict[KleinVariant, tuple[str, ...]] = {
    "base": ("black-forest-labs/FLUX.2-klein-base-4B", "black-forest-labs/FLUX.2-klein-base-9B"),
    "distilled": ("black-forest-labs/FLUX.2-klein-4B", "black-forest-labs/FLUX.2-klein-9B"),
}
"""Variant -> hub ids."""

DISTILLED_STEPS = 4
"""Sampling steps of the distilled models."""


class Flux2KleinModel(Flux2Section):
    """FLUX.2 klein (`Flux2Transformer2DModel`, flow model): text to image, edits of a source, and inpainting by
    blending latents where examples have a source and a mask."""

    spec: ClassVar[FamilySpec] = FamilySpec(
        **FACTS,
        family="flux2_klein",
        guidance_scale=4.0,
        model="retouch.families.flux2_klein.model:Flux2Klein",
        pipeline="Flux2KleinPipeline",
        networks=networks("Qwen3ForCausalLM"),
        released=released(  # of the 4B, 3.88 B parameters
            QWEN3_4B,
            num_layers=5,
            num_single_layers=20,
            num_attention_heads=24,
            joint_attention_dim=7680,
            guidance_embeds=False,
        ),
        hub_ids=(RELEASED["base"][0], RELEASED["distilled"][0]),
        doubles_for_guidance=True,
    )
    variants: ClassVar[Mapping[Any, Sequence[str]]] = RELEASED

    family: Literal["flux2_klein"] = "flux2_klein"  # pyright: ignore[reportIncompatibleVariableOverride]
    path: str = RELEASED["base"][0]
    """A hub id or a folder in the diffusers layout."""
    variant: KleinVariant = "base"
    """"base" is klein-base; "distilled" is klein, which was distilled to sample in 4 steps without guidance."""

    @property
    def _is_taken_for_released(self) -> bool:
        return self.path not in (ids[1] for ids in RELEASED.values())  # of the 9B

    @property
    def distilled_steps(self) -> int | None:
        return DISTILLED_STEPS if self.variant == "distilled" else None
