"""Model families: a room for each, and what they share."""

from __future__ import annotations

from retouch.registry import Registry

FAMILIES: Registry[type] = Registry(
    "model family",
    "retouch.families",
    {
        "flux_fill": "retouch.families.sections:FluxFillModel",
        "sd_inpaint": "retouch.families.sections:SdInpaintModel",
        "qwen_image": "retouch.families.sections:QwenImageModel",
        "qwen_image_edit": "retouch.families.sections:QwenImageEditModel",
    },
)
"""`model.family` -> its section of the run file."""
