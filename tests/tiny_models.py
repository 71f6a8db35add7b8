"""A tiny model of every family: the trained base of the package, or random weights of the same classes."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from retouch.models import FAMILIES
from retouch.models.loading import tiny_path
from retouch.models.tiny import tiny_pipeline

PACKAGED = [family for family in FAMILIES if tiny_path(family).is_dir()]
"""Families whose trained tiny base comes with the package."""

WITH_BASE = [family for family in PACKAGED if family != "qwen_image_edit"]
"""Those of them that write words into masks; the other one recolours shapes."""


@cache
def tiny_model(family: str) -> str:
    """What `model.path` takes."""
    if family in PACKAGED:
        return "tiny"
    folder = Path(tempfile.mkdtemp(prefix=f"retouch-{family}-"))
    tiny_pipeline(family).save_pretrained(folder)
    return str(folder)
