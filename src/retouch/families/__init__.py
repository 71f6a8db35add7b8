"""Model families: a room for each, and what they share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from retouch.registry import Registry

if TYPE_CHECKING:
    from retouch.families.base import ModelSection

FAMILIES: Registry[type[ModelSection]] = Registry(
    "model family",
    "retouch.families",
    {
        "flux_fill": "retouch.families.flux_fill.spec:FluxFillModel",
        "flux_dev": "retouch.families.flux_dev.spec:FluxDevModel",
        "flux_kontext": "retouch.families.flux_kontext.spec:FluxKontextModel",
        "sd_inpaint": "retouch.families.sd_inpaint.spec:SdInpaintModel",
        "sdxl_inpaint": "retouch.families.sdxl_inpaint.spec:SdxlInpaintModel",
        "sd3": "retouch.families.sd3.spec:Sd3Model",
        "qwen_image": "retouch.families.qwen_image.spec:QwenImageModel",
        "qwen_image_edit": "retouch.families.qwen_image_edit.spec:QwenImageEditModel",
        "z_image": "retouch.families.z_image.spec:ZImageModel",
        "flux2_klein": "retouch.families.flux2_klein.spec:Flux2KleinModel",
        "flux2_dev": "retouch.families.flux2_dev.spec:Flux2DevModel",
        "qwen_image_21": "retouch.families.qwen_image_21.spec:QwenImage21Model",
    },
    key="family",
)
"""`model.family` -> its section of the run file, with the facts of the family as `spec`."""

DEFAULT_FAMILY = "flux_fill"
"""Family of a model section that names none."""
