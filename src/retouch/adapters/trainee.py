"""The trained part of a network and its weight files: one class for each `model.train.kind`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from retouch.adapters.initial_lora import initial_lora
from retouch.adapters.lora import FILE, add_lora, load_lora, lora_shape, save_lora
from retouch.adapters.train_ip_adapter import IpAdapterWeights, train_ip_adapter

if TYPE_CHECKING:
    from retouch.families.base import FamilySpec, Train


def make_trainable(network: nn.Module, train: Train, spec: FamilySpec, seed: int = 0) -> Trainee:
    """Select the weights that require a gradient, and add the adapters, new or initial ones, of the run file.

    Args:
        seed: of the weights of a new style adapter.

    Raises:
        ConfigError: targets or an initial adapter that do not fit the network.
    """
    if train.kind == "full":
        network.requires_grad_(True)
        return FullWeights(network)
    if train.kind == "ip_adapter":
        return train_ip_adapter(network, train, spec, seed)
    initial = initial_lora(network, train, spec)
    add_lora(network, train.rank, train.alpha, train.targets or spec.lora_targets, train.init)
    with torch.no_grad():
        for name, factor in initial.items():
            network.get_parameter(name).copy_(factor)
    return LoraWeights(train.rank, train.alpha, spec.network_name)


class FullWeights:
    """Every weight, as a diffusers model folder (`config.json`, safetensors, sharded when large). Buffers that belong
    to it (the table of positions of SD3) are saved too, and are the network's own when weights are loaded."""

    def __init__(self, network: Any) -> None:
        self._network = network
        self._class = type(network).__name__  # sharding gives it another

    def save(self, state: Mapping[str, Tensor], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        config = {**json.loads(self._network.to_json_string()), "_class_name": self._class}
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        tensors = {name: t.detach().cpu().contiguous() for name, t in {**self._buffers(), **state}.items()}
        save_torch_state_dict(tensors, folder, filename_pattern="diffusion_pytorch_model{suffix}.safetensors")

    def load(self, folder: Path) -> dict[str, Tensor]:
        files = sorted(folder.glob("diffusion_pytorch_model*.safetensors"))
        if not files:
            raise ValueError("no diffusion_pytorch_model*.safetensors in it, which model.train.kind=full needs")
        try:
            tensors = {name: t for file in files for name, t in load_file(file).items()}
        except SafetensorError as error:
            raise ValueError(f"damaged weights ({error})") from None
        own = self._buffers()
        return {name: t for name, t in tensors.items() if name not in own}

    def _buffers(self) -> dict[str, Tensor]:
        """The tensors in the files of the network that are no parameters."""
        trained = {name for name, _ in self._network.named_parameters()}
        return {name: t for name, t in self._network.state_dict().items() if name not in trained}


class LoraWeights:
    """Adapters, as one safetensors file that `pipe.load_lora_weights` takes."""

    def __init__(self, rank: int, alpha: float, prefix: str) -> None:
        self.rank, self.alpha, self.prefix = rank, alpha, prefix

    def save(self, state: Mapping[str, Tensor], folder: Path) -> None:
        save_lora(state, folder, self.alpha, self.rank, self.prefix)

    def load(self, folder: Path) -> dict[str, Tensor]:
        if not (folder / FILE).is_file():
            raise ValueError(f"no {FILE} in it, which model.train.kind=lora needs")
        try:
            state = load_lora(folder, self.prefix)
            rank, alpha, _ = lora_shape(folder, self.prefix)
        except SafetensorError as error:
            raise ValueError(f"damaged weights ({error})") from None
        if (rank, alpha) != (self.rank, self.alpha):  # another alpha would fit, and scale every update differently
            raise ValueError(
                f"rank {rank} and alpha {alpha:g} were trained, but model.train has {self.rank} and {self.alpha:g}; "
                f"set model.train.rank={rank} model.train.alpha={alpha:g}"
            )
        return state


Trainee = FullWeights | LoraWeights | IpAdapterWeights
"""Saves and loads trained weights by parameter name. Both are exact; `load` raises ValueError where a folder has no
such files, damaged ones, or ones of another kind."""
