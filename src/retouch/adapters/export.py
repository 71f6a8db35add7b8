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

from retouch.adapters.lora import FILE as LORA_FILE
from retouch.config.errors import ConfigError

FORMATS = ("diffusers", "diffusers-lora", "safetensors")


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
    - `safetensors`: one file with the trained tensors by parameter name.

    Raises:
        ConfigError: a format that does not fit what was trained.
        OSError, ValueError: weights that are missing, damaged or incomplete.
    """
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
