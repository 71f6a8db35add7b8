"""FLUX.1-dev in a run file, and its facts."""

from __future__ import annotations

from typing import ClassVar, Literal

from retouch.families.base import FamilySpec
from retouch.families.flux.spec import FACTS, FluxSection, released


class FluxDevModel(FluxSection):
    """FLUX.1-dev (`FluxTransformer2DModel`, flow model): text to image, and inpainting by blending latents where
    examples have a source and a mask."""

    spec: ClassVar[FamilySpec] = FamilySpec(
        **FACTS,
        family="flux_dev",
        guidance_scale=3.5,  # embedded; the inpainting pipeline's default is 7
        needs=frozenset(),
        model="retouch.families.flux_dev.model:FluxDev",
        pipeline="FluxPipeline",
        released=released(64),
        hub_ids=("black-forest-labs/FLUX.1-dev",),
    )

    family: Literal["flux_dev"] = "flux_dev"  # pyright: ignore[reportIncompatibleVariableOverride]
    path: str = spec.hub_ids[0]
    """A hub id or a folder in the diffusers layout."""
