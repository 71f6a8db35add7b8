"""LoRA through peft, in the files that `pipe.load_lora_weights` takes (contract 4.6)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from peft import LoraConfig
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from retouch.adapters.fused_lora import fuse_lora
from retouch.adapters.tensor_file import write_tensors
from retouch.config.errors import ConfigError
from retouch.errors import first_line
from retouch.files import plain_json

FILE = "pytorch_lora_weights.safetensors"
ADAPTER = "default"


def add_lora(
    network: nn.Module,
    rank: int,
    alpha: float,
    targets: Sequence[str],
    init: Literal["uniform", "gaussian"] = "uniform",
) -> None:
    """Freeze the network and add trainable low-rank adapters, in fp32, that start as a no-op.

    There is no dropout option: it would make rollout and training two different policies.

    Raises:
        ConfigError: `targets` match no module, or an installed package that peft looks for is too old for it.
    """
    network.requires_grad_(False)
    names = adapted_modules(network, targets)
    if not names:
        raise ConfigError(
            f"model.train.targets: given {', '.join(targets)}; no module of {type(network).__name__} ends like that; "
            "leave targets out to take those of the family"
        )
    start = True if init == "uniform" else init
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=names, init_lora_weights=start)  # type: ignore[arg-type]
    try:
        network.add_adapter(config)  # type: ignore[operator]
    except ImportError as error:  # of torchao, which nothing here uses
        raise ConfigError(
            f"model.train: peft cannot add LoRA: {first_line(error)}; upgrade that package, or uninstall it"
        ) from None
    fuse_lora(network)
    for parameter in network.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def adapted_modules(network: nn.Module, targets: Sequence[str]) -> list[str]:
    """Names of the modules that LoRA with these targets (module-name suffixes) adapts."""
    weighted = [name for name, module in network.named_modules() if hasattr(module, "weight")]  # no container of layers
    return [name for name in weighted if any(name == t or name.endswith("." + t) for t in targets)]


def is_update(parameter: str) -> bool:
    """Whether a LoRA parameter is a factor B: with these at 0 the network is the base, bitwise."""
    return ".lora_B." in parameter


def save_lora(state: Mapping[str, Tensor], folder: Path, alpha: float, rank: int, prefix: str = "transformer") -> None:
    """Write trained LoRA parameters (by parameter name) as diffusers reads them: `prefix.module.lora_A.weight`, with
    alpha and rank in the metadata."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {"format": "pt", **lora_metadata(state, alpha, rank, prefix)}
    write_tensors(file_tensors(state, prefix), folder / FILE, about)


def lora_metadata(state: Mapping[str, Tensor], alpha: float, rank: int, prefix: str) -> dict[str, str]:
    """The metadata that diffusers reads: rank, alpha and modules."""
    modules = sorted({name.rsplit(".lora_", 1)[0] for name in state})
    adapter = {f"{prefix}.r": rank, f"{prefix}.lora_alpha": alpha, f"{prefix}.target_modules": modules}
    return {"lora_adapter_metadata": json.dumps(adapter, indent=2, sort_keys=True)}


def file_tensors(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Copies on the CPU of LoRA parameters (by parameter name), by their keys in a file."""
    return {f"{prefix}.{_file_name(name)}": t.detach().cpu().clone().contiguous() for name, t in state.items()}


def load_lora(folder: Path, prefix: str = "transformer") -> dict[str, Tensor]:
    """The inverse of `save_lora`, exact.

    Raises:
        ValueError: keys of another layout.
    """
    tensors = load_file(folder / FILE)
    wrong = [key for key in tensors if not key.startswith(f"{prefix}.") or ".lora_" not in key]
    if wrong:
        raise ValueError(f"{FILE}: unexpected key {wrong[0]!r}; LoRA of {prefix!r} is expected")
    names = {key: key.removeprefix(f"{prefix}.").removesuffix(".weight") for key in tensors}
    return {f"{names[key]}.{ADAPTER}.weight": t for key, t in tensors.items()}


def folded_lora(folder: Path, prefix: str) -> tuple[dict[str, Tensor], int]:
    """(LoRA parameters by parameter name, rank) of a file, with alpha / rank multiplied into B.

    The update is then B A, which is what programs apply that read neither metadata nor `.alpha` tensors.

    Raises:
        ValueError: keys of another layout, or no metadata.
    """
    rank, alpha, _ = lora_shape(folder, prefix)
    state = load_lora(folder, prefix)
    return {name: t * (alpha / rank) if ".lora_B." in name else t for name, t in state.items()}, rank


def lora_shape(folder: Path, prefix: str = "transformer") -> tuple[int, float, list[str]]:
    """(rank, alpha, module names) of a file, from its metadata.

    Raises:
        ValueError: it has none.
    """
    with safe_open(folder / FILE, "pt") as file:
        metadata = file.metadata() or {}
    adapter = plain_json.loads(metadata.get("lora_adapter_metadata", "{}"))
    try:
        return (
            int(adapter[f"{prefix}.r"]),
            float(adapter[f"{prefix}.lora_alpha"]),
            list(adapter[f"{prefix}.target_modules"]),
        )
    except KeyError as error:
        raise ValueError(f"{FILE}: no {error} in its metadata; it was not written by retouch or diffusers") from None


def _file_name(parameter: str) -> str:
    return parameter.replace(f".{ADAPTER}.weight", ".weight")
