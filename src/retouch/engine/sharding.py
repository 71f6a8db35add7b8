"""Sharded weights: every process keeps 1/N of each tensor (FSDP2, torch's `fully_shard`), on CPUs and on GPUs.

accelerate's own sharding is not used, because it does not run on CPUs, where the tests do.

A weight is gathered for the forward and for the backward of its block, and freed after each. Between forwards a
parameter is this process's shard, on which EMA, snapshots, swaps and AdamW operate.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def shard(
    network: nn.Module,
    device: torch.device,
    world_size: int,
    mixed_precision: str,
    dtype: torch.dtype | None = None,
) -> None:
    """Shard in place, block by block, then the rest: no device ever holds the whole network.

    Shards are made empty, and then filled: of a weight that is mapped from its file, a process reads its own rows.
    Under bf16, weights are gathered in bf16 and gradients are summed in fp32. Inputs are not cast: autocast decides
    which of them need fp32, as without sharding.

    Args:
        dtype: of weights and buffers; None leaves them as they are.
    """
    gathered = torch.bfloat16 if mixed_precision == "bf16" else None
    whole = _emptied(network, dtype)
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (world_size,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=torch.float32, cast_forward_inputs=False),
        # also the root: weights left whole after a forward would be stale when shards are swapped or averaged
        "reshard_after_forward": True,
    }
    for block in reversed(blocks(network)):  # inner ones first
        fully_shard(block, **options)
    fully_shard(network, **options)
    network._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name in whole:
                piece(parameter).copy_(_own_rows(whole.pop(name), parameter))  # frees what is in memory
    if whole:  # a wrapper that renames weights would leave shards with whatever was in memory
        raise RuntimeError(f"no shard took the weights {', '.join(sorted(whole)[:3])}")
    # torch warns of blocks that return a view, which diffusers never changes in place
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)


def place(module: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
    """Move weights and buffers one after the other: those that are mapped from files are never in host memory together.

    Args:
        dtype: None leaves them where and as they are, for the wrapper to move.
    """
    if dtype is None:
        return
    for tensor in [*module.parameters(), *module.buffers()]:
        tensor.data = tensor.data.to(device, dtype if tensor.is_floating_point() else None)


def _emptied(network: nn.Module, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Take the weights out of a network -> by name; empty ones without memory, on the meta device, replace them.

    Those of another class stay: quantized ones consist of more than their values.
    """
    found: dict[str, Tensor] = {}
    made: dict[nn.Parameter, nn.Parameter] = {}
    for prefix, module in network.named_modules():
        for name, weight in module._parameters.items():
            if type(weight) is not nn.Parameter or weight.device.type != "cpu":
                continue
            if weight not in made:  # one that modules share has its first name, as in `named_parameters`
                found[f"{prefix}.{name}" if prefix else name] = weight.data
                kind = dtype if weight.is_floating_point() else None
                empty = torch.empty_like(weight, device="meta", dtype=kind)
                made[weight] = nn.Parameter(empty, weight.requires_grad)
            module._parameters[name] = made[weight]
    for buffer in network.buffers():
        if dtype is not None and buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)
    return found


def _own_rows(whole: Tensor, parameter: Any) -> Tensor:
    """This process's rows of a tensor, as `fully_shard` cuts it."""
    mesh = parameter.device_mesh
    begin = -(-len(whole) // mesh.size()) * mesh.get_local_rank()
    return whole[begin : begin + len(piece(parameter))]


def blocks(network: nn.Module) -> list[nn.Module]:
    """The blocks of a diffusers network (`_no_split_modules`), outer ones first."""
    names = set(getattr(network, "_no_split_modules", None) or ())
    return [module for module in network.modules() if type(module).__name__ in names]


def piece(tensor: Tensor) -> Tensor:
    """This process's shard of a parameter, or all of it; shares its memory."""
    if hasattr(tensor, "ds_tensor"):  # ZeRO-3: a part of the flat weight behind an empty parameter
        return tensor.ds_tensor.data  # type: ignore[attr-defined]
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def piece_of(whole: Tensor, parameter: Tensor) -> Tensor:
    """This process's shard of a whole tensor, cut like `parameter`; no communication."""
    if hasattr(parameter, "ds_tensor"):
        count, rank = piece(parameter).numel(), torch.distributed.get_rank(_group(parameter))
        mine = whole.flatten()[rank * count : (rank + 1) * count]
        return nn.functional.pad(mine, (0, count - len(mine)))
    if not isinstance(parameter, DTensor):
        return whole
    whole = whole.to(parameter.device)
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()


def whole_of(part: Tensor, parameter: Tensor) -> Tensor:
    """The whole tensor from the shards of all processes, cut like `parameter`. A collective."""
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
    """Shape of the whole tensor."""
    return getattr(parameter, "ds_shape", parameter.shape)


def _group(parameter: Tensor) -> Any:
    """The processes that hold the shards of a ZeRO-3 weight."""
    return parameter.ds_process_group  # type: ignore[attr-defined]


def whole_optimizer(state: dict[str, Any], *, keep: bool) -> dict[str, Any]:
    """An optimizer's state dict with whole tensors on the CPU. A collective.

    Args:
        keep: False on processes that discard the gathered tensors.
    """

    def gathered(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        whole = value.full_tensor()
        return whole.cpu() if keep else None

    moments = {i: _each(entry, gathered) for i, entry in state["state"].items()}
    return {**state, "state": moments}


def sharded_optimizer(state: dict[str, Any], parameters: list[nn.Parameter]) -> dict[str, Any]:
    """The inverse of `whole_optimizer`: moments cut like the optimizer's `parameters`."""

    def cut(parameter: nn.Parameter, value: Any) -> Any:
        if not (isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.shape == parameter.shape):
            return value
        return distribute_tensor(
            value.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
        )

    # keys that are no position, and entries that are no dict, are what a class keeps beside its parameters
    moments = {
        i: _each(entry, partial(cut, parameters[i])) if isinstance(i, int) else entry
        for i, entry in state["state"].items()
    }
    return {**state, "state": moments}


def _each(entry: Any, change: Callable[[Any], Any]) -> Any:
    """An entry of the state of an optimizer, its values changed; one that is no dict as it is."""
    return {name: change(value) for name, value in entry.items()} if isinstance(entry, dict) else entry
