"""What of a network is trained, and the files it is saved in: one object for each `model.train.kind`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file
from torch import Tensor, nn

from retouch.adapters.lora import add_lora, load_lora, save_lora

if TYPE_CHECKING:
    from retouch.config.schema import Train
    from retouch.types import ModelSpec


class Trainee(Protocol):
    """How trained weights, keyed by parameter name, become files and back. Both ways are exact."""

    @property
    def kind(self) -> str: ...
    def save(self, state: Mapping[str, Tensor], folder: Path) -> None: ...
    def load(self, folder: Path) -> dict[str, Tensor]: ...


def make_trainable(network: nn.Module, train: Train, spec: ModelSpec) -> Trainee:
    """Set what requires a gradient, adding adapters where the run file asks for them."""
    if train.kind == "full":
        network.requires_grad_(True)
        return FullWeights(network)
    add_lora(network, train.rank, train.alpha, train.targets or spec.lora_targets)
    return LoraWeights(train.rank, train.alpha, spec.network_name)


class FullWeights:
    """Every weight, as a diffusers model folder (`config.json`, safetensors, sharded when large)."""

    kind = "full"

    def __init__(self, network: Any) -> None:
        self._network = network

    def save(self, state: Mapping[str, Tensor], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._network.save_config(folder)
        tensors = {name: t.detach().cpu().contiguous() for name, t in state.items()}
        save_torch_state_dict(tensors, folder, filename_pattern="diffusion_pytorch_model{suffix}.safetensors")

    def load(self, folder: Path) -> dict[str, Tensor]:
        files = sorted(folder.glob("diffusion_pytorch_model*.safetensors"))
        if not files:
            raise ValueError(f"{folder}: no diffusion_pytorch_model*.safetensors")
        return {name: t for file in files for name, t in load_file(file).items()}


class LoraWeights:
    """Adapters, as one safetensors file that `pipe.load_lora_weights` takes."""

    kind = "lora"

    def __init__(self, rank: int, alpha: float, prefix: str) -> None:
        self.rank, self.alpha, self.prefix = rank, alpha, prefix

    def save(self, state: Mapping[str, Tensor], folder: Path) -> None:
        save_lora(state, folder, self.alpha, self.rank, self.prefix)

    def load(self, folder: Path) -> dict[str, Tensor]:
        return load_lora(folder, self.prefix)
