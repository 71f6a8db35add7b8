"""FLUX.1-Kontext in a run file, and its facts."""

from __future__ import annotations

from collections.abc import Set
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
    reference_images: bool = False
    """Repaint masks by a second image: the tokens of each example's reference take the place of those of the source,
    which is only blended (`image_reference` of the diffusers pipeline). References are scaled and cropped to the size
    of the run; every example then needs a mask and a reference."""

    @property
    def needs(self) -> frozenset[str]:
        return self.spec.needs | {"mask"} if self.reference_images else self.spec.needs

    @property
    def takes_reference_images(self) -> bool:
        return self.reference_images

    def images_read(self, has_images: Set[str]) -> int:
        return 1
