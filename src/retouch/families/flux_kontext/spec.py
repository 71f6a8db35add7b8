"""FLUX.1-Kontext in a run file, and its facts."""

from __future__ import annotations

from typing import ClassVar, Literal

from retouch.families.base import FamilySpec
from retouch.families.flux.spec import FACTS, FluxSection, released


class FluxKontextModel(FluxSection):
    """FLUX.1-Kontext (`FluxTransformer2DModel`, flow model): change an image by a prompt; where examples have a mask,
    inside it alone, by blending latents."""

    spec: ClassVar[FamilySpec] = FamilySpec(
        **FACTS,
        family="flux_kontext",
        guidance_scale=2.5,  # embedded
        needs=frozenset({"source"}),
        model="retouch.families.flux_kontext.model:FluxKontext",
        pipeline="FluxKontextPipeline",
        released=released(64),
        hub_ids=("black-forest-labs/FLUX.1-Kontext-dev",),
    )

    family: Literal["flux_kontext"] = "flux_kontext"  # pyright: ignore[reportIncompatibleVariableOverride]
    path: str = spec.hub_ids[0]
    """A hub id or a folder in the diffusers layout."""
