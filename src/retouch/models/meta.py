"""Components without their weights, on the meta device: for counting and comparing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

from retouch.models.loading import ModelFilesError


def on_meta(make: Callable[[], Any]) -> Any:
    """What `make` gives, with shapes alone."""
    with torch.device("meta"):
        return make()


def component_on_meta(folder: Path, kind: str) -> Any:
    """A network of diffusers or transformers by the config.json in its folder.

    Args:
        kind: name of the class that it must be of.

    Raises:
        ModelFilesError: no config, one of another class, or one that this class cannot be built from.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        found = config.get("_class_name") or next(iter(config.get("architectures") or []), kind)
        if found != kind:
            raise ValueError(f"it is of a {found}")
        if hasattr(diffusers, kind):
            made: Any = getattr(diffusers, kind)
            return on_meta(lambda: made.from_config(config))
        made = getattr(transformers, kind)
        return on_meta(lambda: made(made.config_class.from_pretrained(folder)))
    except (OSError, ValueError, TypeError, RuntimeError, AttributeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(". ")
        raise ModelFilesError(
            f"model.path: {folder}/config.json makes no {kind}: {reason}; copy the model anew"
        ) from None
