"""Tiny bases trained from random weights on a CPU, and the synthetic data they learn from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from retouch.registry import Registry

BUILDERS: Registry[Callable[[Path, int], dict[str, Any]]] = Registry(
    "tiny network",
    "retouch.tiny",
    {
        "flux2_klein": "retouch.tiny.writing:build_flux2_klein",
        "flux_fill": "retouch.tiny.writing:build_flux_fill",
        "image_encoder": "retouch.tiny.image_encoder:build_encoder",
        "qwen_image_edit": "retouch.tiny.editing:build_edit",
        "sd3": "retouch.tiny.writing:build_sd3",
        "sd_inpaint": "retouch.tiny.writing:build_sd_inpaint",
    },
)
"""Name after `retouch tiny build` -> a function of the folder to write and the seed, which returns what to print."""
