"""The LoRA of a few-step model, merged into a Qwen-Image network as it is loaded.

diffusers reads the file and merges it, as `load_lora_weights` with `fuse_lora` does; names that the network does not
have are an error here, where diffusers logs them and goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffusers.loaders.lora_base import _best_guess_weight_name  # pyright: ignore[reportPrivateUsage]
from diffusers.loaders.lora_pipeline import QwenImageLoraLoaderMixin
from huggingface_hub import try_to_load_from_cache
from safetensors import safe_open
from torch import Tensor, nn

from retouch.errors import first_line
from retouch.families.loading import ModelFilesError

if TYPE_CHECKING:
    from retouch.families.base import DistillationLora

logger = logging.getLogger(__name__)

_PREFIX = "transformer."


def merge_distillation_lora(network: Any, lora: DistillationLora | None) -> None:
    """Add the LoRA to the weights of a `QwenImageTransformer2DModel`, in their dtype; None adds nothing.

    Raises:
        ModelFilesError: no such file, a LoRA of another network, or a DoRA.
    """
    if lora is None:
        return
    tensors, metadata = _read(lora)
    _require_modules(network, tensors, lora)
    QwenImageLoraLoaderMixin.load_lora_into_transformer(tensors, network, "distillation", metadata=metadata)
    network.fuse_lora(lora_scale=lora.scale)
    network.unload_lora()
    logger.info("merged %s into the diffusion network, scale %g", lora.weight_name or lora.path, lora.scale)


def _read(lora: DistillationLora) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """Tensors by diffusers' names, and the scale that the file's metadata records."""
    local = Path(lora.path).expanduser()
    path = str(local) if local.exists() else lora.path
    loader: Any = QwenImageLoraLoaderMixin
    try:
        name = lora.weight_name or _best_guess_weight_name(path)
        found = loader.lora_state_dict(path, weight_name=name, return_lora_metadata=True)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelFilesError(
            f"model.distillation_lora.path: given {lora.path!r}, which cannot be read as a LoRA of Qwen-Image: "
            f"{first_line(error)}; give a hub id, folder or file, and set weight_name where there are several files"
        ) from None
    file = local
    if name and not local.is_file():
        file = local / name if local.is_dir() else try_to_load_from_cache(path, name)
    _refuse_dora(file)
    return found


def _refuse_dora(file: object) -> None:
    """Refuse magnitudes of DoRA, which diffusers leaves out: the rest merges into other weights than were distilled.

    Args:
        file: of the LoRA; no check where it is not a path of safetensors.
    """
    if not str(file).endswith(".safetensors"):
        return
    with safe_open(str(file), "pt") as opened:
        if scale := next((name for name in opened.keys() if "dora_scale" in name), None):  # noqa: SIM118
            raise ModelFilesError(
                f"model.distillation_lora.path: {file} holds {scale}, of a DoRA, which is not supported; give a LoRA"
            )


def _require_modules(network: nn.Module, tensors: Mapping[str, Tensor], lora: DistillationLora) -> None:
    """Every tensor is a factor of a weight that the network has, of its shape."""
    modules = dict(network.named_modules())
    for name, tensor in tensors.items():
        module, _, factor = name.removeprefix(_PREFIX).partition(".lora_")
        weight = getattr(modules.get(module), "weight", None)
        if not name.startswith(_PREFIX) or weight is None or factor not in ("A.weight", "B.weight"):
            raise ModelFilesError(
                f"model.distillation_lora.path: {lora.path} holds {name}, which is no LoRA factor of this network; "
                "give a LoRA that was distilled from this model"
            )
        side = weight.shape[1] if factor == "A.weight" else weight.shape[0]
        if tensor.shape[1 if factor == "A.weight" else 0] != side:
            raise ModelFilesError(
                f"model.distillation_lora.path: {name} of {lora.path} is {list(tensor.shape)}, which does not fit the "
                f"weight {list(weight.shape)}; give a LoRA that was distilled from this model"
            )
    if not tensors:
        raise ModelFilesError(f"model.distillation_lora.path: {lora.path} holds no LoRA; give another file")
