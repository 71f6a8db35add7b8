"""Model families: one file each, loaded on first use so that importing the package stays cheap."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from retouch.families.facts import FACTS
from retouch.families.vae import save_memory

if TYPE_CHECKING:
    from retouch.families.sections import Model
    from retouch.types import DiffusionModel

FAMILIES = {
    "flux_fill": "retouch.families.flux_fill.model:FluxFill",
    "sd_inpaint": "retouch.families.sd_inpaint.model:SdInpaint",
    "qwen_image": "retouch.families.qwen_image.model:QwenImage",
    "qwen_image_edit": "retouch.families.qwen_image_edit.model:QwenImageEdit",
}
"""Family name of the run file -> module:class. The class loads itself with `from_config`, takes the networks of a
diffusers pipeline with `from_pipeline`, and builds its network without weights with `released_network`."""


def family_class(family: str) -> Any:
    """The class of a family."""
    module, _, name = FAMILIES[family].partition(":")
    return getattr(importlib.import_module(module), name)


def load_model(config: Model, device: Any = "cpu", *, embedded: bool = False) -> DiffusionModel:
    """Load what `model:` of a run file names; the network stays on the CPU until the engine places it.

    Args:
        embedded: whether every example that it will see names a file with its text embeddings. The encoder that makes
            them is then not loaded by a family that reads such files.
    """
    keywords = {"embedded": True} if embedded and FACTS[config.family].reads_embeddings else {}
    model = family_class(config.family).from_config(config, device, **keywords)
    save_memory(model.vae, config, model.device)
    if config.embeddings is not None:
        from retouch.families.embeddings import (
            open_cache,
            through_cache,
        )

        cache = open_cache(config)
        assert cache is not None
        model.encode_images = through_cache(cache, model.encode_images, model.device)
    return model
