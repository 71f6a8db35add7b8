"""Frozen networks whose matrices are stored in 8 or 4 bits (`model.quantize`).

    int8   symmetric, one fp32 scale per output row                                  1 byte per weight
    fp8    float8 e4m3, one fp32 scale per output row                                1 byte
    nf4    NormalFloat4 (QLoRA, arXiv 2305.14314), one fp32 scale per 64 weights     0.5625 bytes; bitsandbytes

Only storage is quantized: every forward and backward restores the matrix in the precision of its input and multiplies
as usual. torchao and bitsandbytes have layers for this as well; theirs choose another kernel when no gradient is
needed (`bitsandbytes.matmul_4bit`): rollout and training would round differently, and the ratio would not be 1.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from retouch.config.errors import ConfigError
from retouch.families.sizes import BLOCK, Sizes

if TYPE_CHECKING:
    from retouch.families.base import Quantization

_LARGEST = {"int8": 127.0, "fp8": 448.0}


def quantize_blocks(network: nn.Module, scheme: Quantization | None, device: torch.device | str = "cpu") -> None:
    """Store the matrices of the network's repeated blocks in 8 or 4 bits, in place; None changes nothing.

    Convolutions, norms and the layers before and after the blocks keep their precision: less than 1 % of the weights of
    most transformers, 2 to 6 % of those with modulation outside the blocks, 69 % of the U-Net of Stable Diffusion 1.5.

    Args:
        device: where to quantize, one matrix at a time; the network stays where it is.

    Raises:
        ConfigError: nf4 without bitsandbytes.
    """
    if scheme is None:
        return
    if scheme == "nf4" and importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            "model.quantize: given 'nf4', which needs bitsandbytes: pip install \"retouch[quantize]\", or set "
            "model.quantize=int8"
        )
    for name in block_matrices(network):
        parent, _, child = name.rpartition(".")
        holder: Any = network.get_submodule(parent)
        layer = QuantizedLinear(cast(nn.Linear, network.get_submodule(name)), scheme, device)
        if isinstance(holder, nn.Sequential | nn.ModuleList):
            holder[int(child)] = layer
        else:
            setattr(holder, child, layer)


def block_matrices(network: nn.Module) -> list[str]:
    """Names of the linear layers in the repeated blocks (`nn.ModuleList`) of a diffusers network."""
    lists = [f"{name}." for name, module in network.named_modules() if isinstance(module, nn.ModuleList)]
    return [
        name
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) and name.startswith(tuple(lists))
    ]


def sizes_of(network: nn.Module) -> Sizes:
    """Sizes of a network, which may be on the meta device."""
    shapes = {name: tuple(weight.shape) for name, weight in network.named_parameters()}
    matrices = frozenset(f"{name}.weight" for name in block_matrices(network))
    buffers = sum(buffer.numel() for buffer in network.buffers())
    return Sizes(shapes, buffers, matrices, table_bytes(network))


def table_bytes(network: nn.Module) -> int:
    """Bytes of tensors that the modules of a network keep as plain attributes: diffusers' Qwen-Image has its rotary
    frequencies there, and copies them to the device."""
    kept = [value for module in network.modules() for value in vars(module).values()]
    tensors = [one for value in kept for one in (value if isinstance(value, list) else [value])]
    return sum(one.nbytes for one in tensors if isinstance(one, torch.Tensor))


class QuantizedLinear(nn.Linear):
    """A frozen linear layer whose matrix is stored in 8 or 4 bits.

    Attributes:
        weight: the stored matrix: int8 or uint8 [out, in], or of nf4 uint8 [out · in / 2].
        scale: fp32 [out, 1], or of nf4 [out · in / 64].
    """

    def __init__(self, linear: nn.Linear, scheme: Quantization, device: torch.device | str = "cpu") -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.scheme = linear.in_features, linear.out_features, scheme
        whole = linear.weight.detach()
        stored, scale = _nf4(whole.to(device)) if scheme == "nf4" else _rows(whole.to(device), scheme)
        # parameters, because DDP sends buffers again in every forward
        self.weight = nn.Parameter(stored.to(whole.device), requires_grad=False)
        self.scale = nn.Parameter(scale.to(whole.device), requires_grad=False)
        self.register_parameter("bias", linear.bias)
        self.requires_grad_(False)

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """The restored matrix [out, in]."""
        if self.scheme == "nf4":
            library: Any = importlib.import_module("bitsandbytes.functional")
            # flat: of a matrix whose rows are no whole blocks, the CPU kernel of bitsandbytes 0.50 mixes up the scales
            shape = torch.Size((1, self.out_features * self.in_features))
            state = library.QuantState(absmax=self.scale, shape=shape, blocksize=BLOCK, quant_type="nf4", dtype=dtype)
            restored: Tensor = library.dequantize_4bit(self.weight.view(-1, 1), state)
            return restored.view(self.out_features, self.in_features)
        stored = self.weight.view(torch.float8_e4m3fn).float() if self.scheme == "fp8" else self.weight
        return (stored * self.scale).to(dtype)

    def forward(self, input: Tensor) -> Tensor:
        device = input.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype
        return cast(Tensor, _Restored.apply(input.to(dtype), self))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, stored as {self.scheme}"


class _Restored(torch.autograd.Function):
    """x Wᵀ + b with W restored for each use: autograd would keep it until the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        bias = None if layer.bias is None else layer.bias.to(x.dtype)
        return F.linear(x, layer.matrix(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return gradient @ ctx.layer.matrix(gradient.dtype), None


def _rows(weight: Tensor, scheme: Quantization) -> tuple[Tensor, Tensor]:
    """(stored [out, in], scale [out, 1]): the largest of a row becomes the largest number of the format."""
    weight = weight.float()
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / _LARGEST[scheme]
    scaled = weight / scale
    if scheme == "int8":
        return scaled.round().to(torch.int8), scale
    # as bytes: peft would give LoRA factors the dtype of a float8 weight
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8), scale


def _nf4(weight: Tensor) -> tuple[Tensor, Tensor]:
    library: Any = importlib.import_module("bitsandbytes.functional")
    stored, state = library.quantize_4bit(weight.float().contiguous(), blocksize=BLOCK, quant_type="nf4")
    return stored.flatten(), state.absmax
