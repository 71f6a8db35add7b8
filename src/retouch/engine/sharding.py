"""Weights in pieces: every process keeps 1/N of each tensor (FSDP2, torch's `fully_shard`), on CPUs and GPUs alike.

The processes are accelerate's; the sharding is not: accelerate leaves its own out on CPUs, so that what tests run there
would not be what runs on GPUs.

A weight is gathered for the forward and the backward of its block and dropped again after each. So between forwards a
parameter is always this process's piece, and what is done to pieces (averages, snapshots, swaps, AdamW) is done to the
weights.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def shard(network: nn.Module, device: torch.device, world_size: int, mixed_precision: str) -> None:
    """Shard in place: each block by itself, then what is outside of them. Block by block, so that no device ever holds
    the whole network.

    Under bf16 weights are gathered in bf16 and gradients summed in fp32. Inputs are not cast: autocast, which is around
    the forward as without sharding, knows better which of them need fp32.
    """
    dtype = torch.bfloat16 if mixed_precision == "bf16" else None
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (world_size,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False),
        # of the root, too: weights left whole after a forward would be stale when pieces are swapped or averaged
        "reshard_after_forward": True,
    }
    for block in reversed(blocks(network)):  # inner ones first
        fully_shard(block, **options)
    fully_shard(network, **options)
    # torch warns of every block that returns a view, in case somebody writes to it in place; diffusers does not
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)


def blocks(network: nn.Module) -> list[nn.Module]:
    """The blocks of a diffusers network, outer ones first: those that it says must stay on one device."""
    names = set(getattr(network, "_no_split_modules", None) or ())
    return [module for module in network.modules() if type(module).__name__ in names]


def piece(tensor: Tensor) -> Tensor:
    """What this process holds of a parameter; all of it where it is not sharded. Shares its memory."""
    if hasattr(tensor, "ds_tensor"):  # ZeRO-3: a part of the flat weight, behind a parameter that is empty
        return tensor.ds_tensor.data  # type: ignore[attr-defined]
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def piece_of(whole: Tensor, parameter: Tensor) -> Tensor:
    """This process's piece of a whole tensor, cut as `parameter` is; no communication."""
    if hasattr(parameter, "ds_tensor"):
        count, rank = piece(parameter).numel(), torch.distributed.get_rank(_group(parameter))
        mine = whole.flatten()[rank * count : (rank + 1) * count]
        return nn.functional.pad(mine, (0, count - len(mine)))
    if not isinstance(parameter, DTensor):
        return whole
    whole = whole.to(parameter.device)
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()


def whole_of(part: Tensor, parameter: Tensor) -> Tensor:
    """The whole tensor of every process's piece, cut as `parameter` is. Every process must ask, in the same order."""
    if hasattr(parameter, "ds_tensor"):
        parts = [torch.empty_like(part) for _ in range(torch.distributed.get_world_size(_group(parameter)))]
        torch.distributed.all_gather(parts, part.contiguous(), group=_group(parameter))
        shape = shape_of(parameter)
        return torch.cat(parts)[: shape.numel()].view(shape)
    if not isinstance(parameter, DTensor):
        return part
    mesh, placements = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride).full_tensor()


def shape_of(parameter: Tensor) -> torch.Size:
    """Of the whole."""
    return getattr(parameter, "ds_shape", parameter.shape)


def _group(parameter: Tensor) -> Any:
    """The processes that have the pieces of a weight of ZeRO-3."""
    return parameter.ds_process_group  # type: ignore[attr-defined]


def whole_optimizer(state: dict[str, Any], *, keep: bool) -> dict[str, Any]:
    """An optimizer's state dict with whole tensors on the CPU, as one without sharding has it. Every process must ask.

    Args:
        keep: False on processes that only take part: they drop what they gather.
    """

    def gathered(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        whole = value.full_tensor()
        return whole.cpu() if keep else None

    moments = {i: {name: gathered(v) for name, v in entry.items()} for i, entry in state["state"].items()}
    return {**state, "state": moments}


def sharded_optimizer(state: dict[str, Any], parameters: list[nn.Parameter]) -> dict[str, Any]:
    """The inverse of `whole_optimizer`: moments cut as their parameters are.

    Args:
        parameters: of the optimizer, in its order.
    """

    def cut(value: Any, parameter: nn.Parameter) -> Any:
        if not (isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.shape == parameter.shape):
            return value
        return distribute_tensor(
            value.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
        )

    moments = {i: {name: cut(v, parameters[i]) for name, v in entry.items()} for i, entry in state["state"].items()}
    return {**state, "state": moments}
