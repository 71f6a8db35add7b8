"""FLUX.1-Fill in a run file, and its facts."""

from __future__ import annotations

from typing import ClassVar, Literal

from retouch.families.base import FamilySpec
from retouch.families.flux.spec import FACTS, FluxSection, released


class FluxFillModel(FluxSection):
    """FLUX.1-Fill (`FluxTransformer2DModel`, mask-conditioned flow model)."""

    spec: ClassVar[FamilySpec] = FamilySpec(
        **FACTS,
        family="flux_fill",
        guidance_scale=30.0,  # embedded; FLUX.1-dev uses 3.5
        needs=frozenset({"source", "mask"}),
        model="retouch.families.flux_fill.model:FluxFill",
        pipeline="FluxFillPipeline",
        released=released(384),
        hub_ids=("black-forest-labs/FLUX.1-Fill-dev",),
    )

    family: Literal["flux_fill"] = "flux_fill"  # pyright: ignore[reportIncompatibleVariableOverride]
    path: str = spec.hub_ids[0]
    """A hub id or a folder in the diffusers layout; "tiny" is the base that comes with the package."""
