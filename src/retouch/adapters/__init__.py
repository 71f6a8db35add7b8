"""LoRA and style adapters, and their files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from retouch.adapters.ip_adapter import StyleAdapter

FORMATS_OF: dict[str, tuple[str, ...]] = {
    "full": ("diffusers", "safetensors"),
    "lora": ("diffusers-lora", "comfyui", "diffusers", "safetensors"),
    "ip_adapter": ("ip-adapter", "comfyui", "diffusers-ip-adapter", "safetensors"),
}
"""`model.train.kind` -> the formats that `retouch export` writes its weights in."""

FORMATS = sorted({name for names in FORMATS_OF.values() for name in names})


def load(path: str | Path) -> StyleAdapter:
    """A style adapter from a file of any of the layouts: `load(path).attach(pipe)`; see `retouch.adapters.ip_adapter`.

    Raises:
        AdapterFileError: not a whole adapter, or a pickle that holds more than tensors.
    """
    from retouch.adapters.ip_adapter import load as read

    return read(path)
