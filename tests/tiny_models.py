"""A tiny model of every family: the trained base of the package, or random weights of the same classes."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

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


def attentive(pipeline: Any) -> Any:
    """Random weights hardly look at what they are shown. Larger ones do: another picture moves a pixel by some
    thousandths, and states of the text by more when their places change."""
    with torch.no_grad():
        for name, weight in pipeline.transformer.named_parameters():
            if weight.ndim > 1 and ("_mod." in name or "attn" in name or "time_text" in name):
                weight.mul_(2)
        for name, weight in pipeline.text_encoder.model.language_model.named_parameters():
            if weight.ndim > 1 and "self_attn" in name:
                weight.mul_(10)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
