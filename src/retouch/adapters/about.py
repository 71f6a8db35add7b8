"""Metadata of exported files, as ComfyUI, Civitai and kohya's tools show it: Stability AI's ModelSpec (`modelspec.*`)
and the keys of sd-scripts (`ss_*`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from retouch.files.hub import is_hub_id

if TYPE_CHECKING:
    from retouch.families.base import ModelSection

_ARCHITECTURES = {
    **dict.fromkeys(("flux_dev", "flux_fill", "flux_kontext"), ("flux-1-dev", "flux1")),
    "sd_inpaint": ("stable-diffusion-v1-inpainting", "sd_v1"),
    "sdxl_inpaint": ("stable-diffusion-xl-v1-base", "sdxl_base_v1-0"),
    "sd3": ("stable-diffusion-3", None),
}
"""Family -> architecture in ModelSpec, and in sd-scripts; another family has its own name."""


@dataclass(frozen=True)
class About:
    """Facts of a run for the metadata of its exported files.

    Attributes:
        name: of the run and the checkpoint, and of the exported file.
        trained: how, in a few words.
        trigger: template of the prompts; None where the data have their own.
    """

    name: str
    trained: str = ""
    trigger: str | None = None


def metadata(about: About, model: ModelSection, rank: int | None = None) -> dict[str, str]:
    """Metadata of a safetensors file.

    Args:
        rank: of a LoRA, whose alpha is the same in every exported file; None for other weights.
    """
    architecture, version = _ARCHITECTURES.get(model.family, (model.family.replace("_", "-"), None))
    base = base_name(model)
    found: dict[str, str | None] = {
        "format": "pt",
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.architecture": architecture if rank is None else f"{architecture}/lora",
        "modelspec.implementation": "diffusers",
        "modelspec.title": about.name,
        "modelspec.description": f"{about.trained}, on {base}".removeprefix(", "),
        "modelspec.trigger_phrase": about.trigger,
        "modelspec.prediction_type": "epsilon" if model.spec.prediction == "epsilon" else None,
        "ss_output_name": about.name,
        "ss_sd_model_name": base,
        "ss_base_model_version": version,
    }
    if rank is not None:
        found |= {"ss_network_module": "networks.lora", "ss_network_dim": str(rank), "ss_network_alpha": str(rank)}
    return {name: value for name, value in found.items() if value is not None}


def base_name(model: ModelSection) -> str:
    """The hub id of the network that was trained, or the name of its folder; never a path of this machine."""
    other = model.transformer.path if model.transformer is not None else model.path
    below = model.merged_lora
    parts = [other, *([] if below is None else [below.weight_name or below.path])]
    return " with ".join(part if is_hub_id(part) else Path(part).name for part in parts)
