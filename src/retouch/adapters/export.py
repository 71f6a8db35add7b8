"""Trained weights in the files of other programs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import load_file, save_file

from retouch.adapters import comfyui
from retouch.adapters.about import About, metadata
from retouch.adapters.formats import NAME, AdapterFile, folded, read_adapter, write_bin, write_safetensors
from retouch.adapters.lora import FILE as LORA_FILE
from retouch.adapters.lora import file_tensors, folded_lora, lora_metadata
from retouch.adapters.pipeline import save_pipeline
from retouch.adapters.tensor_file import write_tensors
from retouch.config.errors import ConfigError
from retouch.families import FAMILIES

if TYPE_CHECKING:
    from retouch.families.base import ModelSection

logger = logging.getLogger(__name__)

DIFFUSERS_TOKENS = 4
"""Number of tokens that diffusers splits the one layer of an SD1.5 adapter into, independent of the file."""

FLUX_NETWORK = "FluxTransformer2DModel"
"""The network that ComfyUI-IPAdapter-Flux is for."""

_OF_ADAPTERS: dict[str, tuple[str, ...]] = {
    "ip-adapter": ("mlp", "mlp+query_former", "linear"),
    "comfyui": ("mlp",),
    "diffusers-ip-adapter": ("linear",),
}
"""Format of a style adapter -> the heads it has a place for."""


def export(model: ModelSection, weights: Path, to: str, out: Path, about: About) -> Path:
    """Write the weights of a folder, which were trained in `model`, as `to`, one of `FORMATS_OF` their kind -> the path
    written.

    - `diffusers`: a whole pipeline folder with the trained network (LoRA fused into it).
    - `diffusers-lora`: the file that `pipe.load_lora_weights(out)` takes.
    - `safetensors`: one file with the trained tensors by parameter name (of a style adapter: by the keys of its file).
    - `ip-adapter`: a style adapter as ip-adapter.safetensors, which `retouch.adapters.load` takes, and as .bin.
    - `comfyui`: LoRA by the names that ComfyUI reads; a style adapter as the .bin of ComfyUI-IPAdapter-Flux.
    - `diffusers-ip-adapter`: the file that `pipe.load_ip_adapter` of Stable Diffusion takes.

    Every file of a LoRA has alpha / rank in its weights: programs that do not read alpha apply the same update. Files
    are named after their run, but for style adapters, whose names other programs know.

    Raises:
        ConfigError: a format that does not fit the adapter.
        ModelFilesError: a base that is missing or incomplete, of `diffusers`.
        OSError, ValueError: weights that are missing, damaged or incomplete.
    """
    kind = model.train.kind
    if kind == "ip_adapter":
        return _export_adapter(weights, to, out)
    out.mkdir(parents=True, exist_ok=True)
    if to == "diffusers":
        save_pipeline(model, weights, out)
        return out
    if kind == "lora":
        return _export_lora(model, weights, to, out, about)
    tensors = {name: t for file in sorted(weights.glob("*.safetensors")) for name, t in load_file(file).items()}
    path = out / _file_name(about, to)
    save_file(tensors, path, metadata=metadata(about, model))
    return path


def _export_lora(model: ModelSection, weights: Path, to: str, out: Path, about: About) -> Path:
    prefix, below = model.spec.network_name, model.merged_lora
    if below is not None:
        logger.warning(
            "model.distillation_lora: given %s, which is not part of this file; load it as well, with strength %g, or "
            "use --to diffusers",
            below.path if below.weight_name is None else f"{below.path}, {below.weight_name}",
            below.scale,
        )
    state, rank = folded_lora(weights, prefix)
    facts = metadata(about, model, rank)
    if to == "diffusers-lora":
        facts |= lora_metadata(state, rank, rank, prefix)
    named = to == "comfyui"
    tensors = comfyui.comfyui_tensors(state, rank, prefix) if named else file_tensors(state, prefix)
    path = out / _file_name(about, to)
    write_tensors(tensors, path, facts)
    return path


_UNREAD = ("scheduler", "optimizer", "checkpoint")
"""Parts of the names that `pipe.load_lora_weights(folder)` does not look at."""


def _file_name(about: About, to: str) -> str:
    unread = to == "diffusers-lora" and any(part in about.name for part in _UNREAD)
    return LORA_FILE if unread else f"{about.name}.safetensors"


def _export_adapter(weights: Path, to: str, out: Path) -> Path:
    file = read_adapter(weights)
    shape, needed = file.shape, _OF_ADAPTERS.get(to)
    if needed is not None and shape.head not in needed:
        raise ConfigError(f"--to: given {to!r}, which has no place for a {shape.head} adapter; use --to ip-adapter")
    family = file.metadata.get("family", "flux_fill")
    # The other programs have family and number of tokens in their code and read neither from the file. This check
    # rejects other adapters, because it can name the remedy.
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
