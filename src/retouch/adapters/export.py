"""Trained weights in the files of other programs."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.utils import logging as library
from safetensors.torch import load_file, save_file

from retouch.adapters import FORMATS_OF, comfyui
from retouch.adapters.formats import NAME, AdapterFile, folded, read_adapter, write_bin, write_safetensors
from retouch.adapters.lora import FILE as LORA_FILE
from retouch.adapters.lora import file_tensors, folded_lora, save_lora
from retouch.adapters.tensor_file import write_tensors
from retouch.config.errors import ConfigError
from retouch.errors import ModelFilesError, why_unreadable
from retouch.families import FAMILIES
from retouch.families.loading import load_component

logger = logging.getLogger(__name__)

DIFFUSERS_TOKENS = 4
"""Number of tokens that diffusers splits the one layer of an SD1.5 adapter into, independent of the file."""

WEIGHTS_FILE = "model.safetensors"

FLUX_NETWORK = "FluxTransformer2DModel"
"""The network that ComfyUI-IPAdapter-Flux is for."""

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
        transformer: (hub id or folder, subfolder) of the network where it is not that of `path`.
    """

    path: str
    network_name: str
    kind: str
    dtype: torch.dtype
    transformer: tuple[str, str | None] | None = None


def export(base: Base, weights: Path, to: str, out: Path) -> Path:
    """Write the weights of a folder as `to` -> the path written.

    - `diffusers`: a whole pipeline folder with the trained network (LoRA fused into it).
    - `diffusers-lora`: the file that `pipe.load_lora_weights(out)` takes.
    - `safetensors`: one file with the trained tensors by parameter name (of a style adapter: by the keys of its file).
    - `ip-adapter`: a style adapter as ip-adapter.safetensors, which `retouch.adapters.load` takes, and as .bin.
    - `comfyui`: LoRA by the names that ComfyUI reads; a style adapter as the .bin of ComfyUI-IPAdapter-Flux.
    - `diffusers-ip-adapter`: the file that `pipe.load_ip_adapter` of Stable Diffusion takes.

    Every file of a LoRA has alpha / rank in its weights: programs that do not read alpha apply the same update.

    Raises:
        ConfigError: a format that does not fit what was trained.
        OSError, ValueError: weights that are missing, damaged or incomplete.
    """
    if to not in FORMATS_OF[base.kind]:
        raise ConfigError(
            f"--to: given {to!r}, but the run trained {base.kind} weights; use --to {', '.join(FORMATS_OF[base.kind])}"
        )
    if base.kind == "ip_adapter":
        return _export_adapter(weights, to, out)
    out.mkdir(parents=True, exist_ok=True)
    if to == "diffusers":
        save_pipeline(base, weights, out)
        return out
    if base.kind == "lora":
        return _export_lora(weights, base.network_name, to, out)
    tensors = {name: t for file in sorted(weights.glob("*.safetensors")) for name, t in load_file(file).items()}
    save_file(tensors, out / WEIGHTS_FILE, metadata={"format": "pt"})
    return out / WEIGHTS_FILE


def _export_lora(weights: Path, prefix: str, to: str, out: Path) -> Path:
    state, rank = folded_lora(weights, prefix)
    if to == "diffusers-lora":
        save_lora(state, out, rank, rank, prefix)
        return out / LORA_FILE
    named = to == "comfyui"
    tensors = comfyui.comfyui_tensors(state, rank, prefix) if named else file_tensors(state, prefix)
    path = out / (comfyui.FILE if named else WEIGHTS_FILE)
    write_tensors(tensors, path, {"format": "pt"})
    return path


def _export_adapter(weights: Path, to: str, out: Path) -> Path:
    file = read_adapter(weights)
    shape, needed = file.shape, _OF_ADAPTERS.get(to)
    if needed is not None and shape.head not in needed:
        raise ConfigError(f"--to: given {to!r}, which has no place for a {shape.head} adapter; use --to ip-adapter")
    family = file.metadata.get("family", "flux_fill")
    if to == "comfyui" and not _is_for_flux(family):
        raise ConfigError(
            f"--to: given 'comfyui', which reads adapters of FLUX; this one is of {family}; use --to ip-adapter"
        )
    if to == "comfyui" and shape.tokens != comfyui.TOKENS:
        raise ConfigError(
            f"--to: given 'comfyui', which reads {comfyui.TOKENS} tokens; this adapter has {shape.tokens}: train with "
            f"model.train.tokens={comfyui.TOKENS}, or use --to ip-adapter"
        )
    if to == "diffusers-ip-adapter" and shape.tokens != DIFFUSERS_TOKENS:
        raise ConfigError(
            f"--to: given 'diffusers-ip-adapter', which reads {DIFFUSERS_TOKENS} tokens; this adapter has "
            f"{shape.tokens}; use --to ip-adapter"
        )
    out.mkdir(parents=True, exist_ok=True)
    foreign = folded(file)
    if to == "comfyui":
        _report_weight(file)
    elif to == "ip-adapter" and file.value_norm:
        logger.warning(
            "%s.bin does not record value_norm and scale; give both to attach(), or use the other file", NAME
        )
    if to != "comfyui":
        written = foreign if to == "diffusers-ip-adapter" else file
        write_safetensors(out / f"{NAME}.safetensors", written.tensors, written.metadata)
    if to in ("comfyui", "ip-adapter"):
        write_bin(out / f"{NAME}.bin", foreign.tensors)
    return out / f"{NAME}.{'bin' if to == 'comfyui' else 'safetensors'}"


def _is_for_flux(family: str) -> bool:
    """Whether adapters of a family go into the network of FLUX.1; False for a family that is not installed."""
    section = FAMILIES.available().get(family)
    facts = None if section is None else section.spec.adapter
    return facts is not None and facts.network == FLUX_NETWORK


def _report_weight(file: AdapterFile) -> None:
    """Log the weight to set in ComfyUI's node, and when its images differ from retouch's."""
    weight = comfyui.node_weight(file)
    if comfyui.same_in_node(file):
        logger.info("in ComfyUI, set weight=%.4g in the node Apply IPAdapter Flux Model", weight)
    elif file.value_norm:
        logger.warning(
            "model.train.scale: given a factor for each block; the node of ComfyUI-IPAdapter-Flux has one weight for "
            "all, so its images differ from retouch's; set weight=%.4g in the node, or train with one scale",
            weight,
        )
    else:
        logger.warning(
            "model.train.value_norm: false in training; the node of ComfyUI-IPAdapter-Flux normalizes the values, so "
            "its images differ from retouch's and a scale in the file has no effect; set weight=%.2g in the node as a "
            "start, or train with model.train.value_norm=true for equal images",
            weight,
        )


def save_pipeline(base: Base, weights: Path, out: Path) -> None:
    """The base pipeline with the trained network in its place."""
    trained: dict[str, Any] = {}
    if base.kind == "full":
        kind = getattr(diffusers, json.loads((weights / "config.json").read_text(encoding="utf-8"))["_class_name"])
        network, info = kind.from_pretrained(str(weights), dtype=base.dtype, output_loading_info=True)
        if info["missing_keys"]:  # diffusers initializes them at random without an error
            raise ValueError(f"{weights}: {len(info['missing_keys'])} weights are missing")
        trained[base.network_name] = network
    elif base.transformer is not None:
        trained[base.network_name] = _other_network(base, *base.transformer)
    with _quietly():
        pipeline = _base_pipeline(base, trained)
        if base.kind == "lora":
            pipeline.load_lora_weights(str(weights), weight_name=LORA_FILE)
            pipeline.fuse_lora()
            pipeline.unload_lora_weights()
    pipeline.save_pretrained(str(out), safe_serialization=True)


def _base_pipeline(base: Base, trained: dict[str, Any]) -> Any:
    try:
        return diffusers.DiffusionPipeline.from_pretrained(base.path, dtype=base.dtype, **trained)
    except Exception as error:
        if (problem := why_unreadable(error)) is None:
            raise
        raise ModelFilesError(f"model.path: cannot load the pipeline of {base.path}: {problem}") from None


@contextmanager
def _quietly() -> Iterator[None]:
    """Without diffusers' progress bars, which it shows terminal or not, and its warning of a text encoder without
    LoRA."""
    shown, level = library.is_progress_bar_enabled(), library.get_verbosity()
    library.disable_progress_bar()
    library.set_verbosity_error()
    try:
        yield
    finally:
        library.set_verbosity(level)
        if shown:
            library.enable_progress_bar()


def _other_network(base: Base, path: str, subfolder: str | None) -> Any:
    """The network of `model.transformer`, of the class that the pipeline of the base has."""
    index: Any = diffusers.DiffusionPipeline.load_config(base.path)
    kind = getattr(diffusers, index[base.network_name][1])
    return load_component(kind, path, subfolder, base.dtype, key="model.transformer")
