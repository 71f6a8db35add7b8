"""Trained weights in the files of other programs."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from safetensors.torch import load_file, save_file

from retouch.adapters.formats import NAME, folded, read_adapter, write_bin, write_safetensors
from retouch.adapters.lora import FILE as LORA_FILE
from retouch.config.errors import ConfigError

FORMATS = ("comfyui", "diffusers", "diffusers-ip-adapter", "diffusers-lora", "ip-adapter", "safetensors")

COMFYUI_TOKENS = 128
"""What ComfyUI-IPAdapter-Flux builds its modules for, whatever the file holds."""

DIFFUSERS_TOKENS = 4
"""What diffusers splits the one layer of an SD1.5 adapter into, whatever the file holds."""


_OF_ADAPTERS: dict[str, tuple[str, ...]] = {
    "ip-adapter": ("mlp", "mlp+query_former", "linear"),
    "comfyui": ("mlp",),
    "diffusers-ip-adapter": ("linear",),
}
"""Format of a style adapter -> the heads it has a place for."""


@dataclass(frozen=True)
class Base:
    """The model that was trained.

    Attributes:
        path: hub id or folder of the whole pipeline.
        network_name: the component that was trained.
        kind: `model.train.kind`.
    """

    path: str
    network_name: str
    kind: str
    dtype: torch.dtype


def export(base: Base, weights: Path, to: str, out: Path) -> Path:
    """Write the weights of a folder as `to` -> the path written.

    - `diffusers`: a whole pipeline folder with the trained network (LoRA fused into it).
    - `diffusers-lora`: the file that `pipe.load_lora_weights(out)` takes.
    - `safetensors`: one file with the trained tensors by parameter name (of a style adapter: by the keys of its file).
    - `ip-adapter`: a style adapter as ip-adapter.safetensors, which `retouch.adapters.load` takes, and as .bin.
    - `comfyui`: ip-adapter.bin as ComfyUI-IPAdapter-Flux reads it.
    - `diffusers-ip-adapter`: the file that `pipe.load_ip_adapter` of Stable Diffusion takes.

    Raises:
        ConfigError: a format that does not fit what was trained.
        OSError, ValueError: weights that are missing, damaged or incomplete.
    """
    if (base.kind == "ip_adapter") != (to in _OF_ADAPTERS) and to != "safetensors":
        other = ", ".join([*_OF_ADAPTERS, "safetensors"]) if base.kind == "ip_adapter" else "diffusers"
        other = f"diffusers-lora or {other}" if base.kind == "lora" else other
        raise ConfigError(f"--to: given {to!r}, but the run trained {base.kind} weights; use --to {other}")
    if base.kind == "ip_adapter":
        return _export_adapter(weights, to, out)
    if to == "diffusers-lora" and base.kind != "lora":
        raise ConfigError(f"--to: given 'diffusers-lora', but the run trained {base.kind} weights; use --to diffusers")
    out.mkdir(parents=True, exist_ok=True)
    if to == "diffusers-lora":
        return Path(shutil.copy2(weights / LORA_FILE, out / LORA_FILE))
    if to == "safetensors":
        tensors = {name: t for file in sorted(weights.glob("*.safetensors")) for name, t in load_file(file).items()}
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
        return out / "model.safetensors"
    save_pipeline(base, weights, out)
    return out


def _export_adapter(weights: Path, to: str, out: Path) -> Path:
    file = read_adapter(weights)
    shape, needed = file.shape, _OF_ADAPTERS.get(to)
    if needed is not None and shape.head not in needed:
        raise ConfigError(f"--to: given {to!r}, which has no place for a {shape.head} adapter; use --to ip-adapter")
    family = file.metadata.get("family", "flux_fill")
    if to == "comfyui" and family != "flux_fill":
        raise ConfigError(
            f"--to: given 'comfyui', which reads adapters of FLUX; this one is of {family}; use --to ip-adapter"
        )
    if to == "comfyui" and shape.tokens != COMFYUI_TOKENS:
        raise ConfigError(
            f"--to: given 'comfyui', which reads {COMFYUI_TOKENS} tokens; this adapter has {shape.tokens}: train with "
            f"model.train.tokens={COMFYUI_TOKENS}, or use --to ip-adapter"
        )
    if to == "diffusers-ip-adapter" and shape.tokens != DIFFUSERS_TOKENS:
        raise ConfigError(
            f"--to: given 'diffusers-ip-adapter', which reads {DIFFUSERS_TOKENS} tokens; this adapter has "
            f"{shape.tokens}; use --to ip-adapter"
        )
    out.mkdir(parents=True, exist_ok=True)
    foreign = folded(file)
    if to != "comfyui":
        written = foreign if to == "diffusers-ip-adapter" else file
        write_safetensors(out / f"{NAME}.safetensors", written.tensors, written.metadata)
    if to in ("comfyui", "ip-adapter"):
        write_bin(out / f"{NAME}.bin", foreign.tensors)
    return out / f"{NAME}.{'bin' if to == 'comfyui' else 'safetensors'}"


def save_pipeline(base: Base, weights: Path, out: Path) -> None:
    """The base pipeline with the trained network in its place."""
    trained: dict[str, Any] = {}
    if base.kind == "full":
        kind = getattr(diffusers, json.loads((weights / "config.json").read_text(encoding="utf-8"))["_class_name"])
        network, info = kind.from_pretrained(str(weights), torch_dtype=base.dtype, output_loading_info=True)
        if info["missing_keys"]:  # diffusers draws them at random and goes on
            raise ValueError(f"{weights}: {len(info['missing_keys'])} weights are missing")
        trained[base.network_name] = network
    pipeline: Any = diffusers.DiffusionPipeline.from_pretrained(base.path, torch_dtype=base.dtype, **trained)
    if base.kind == "lora":
        pipeline.load_lora_weights(str(weights), weight_name=LORA_FILE)
        pipeline.fuse_lora()
        pipeline.unload_lora_weights()
    pipeline.save_pretrained(str(out), safe_serialization=True)
