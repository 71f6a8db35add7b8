"""FLOPs of a forward of a diffusers network, counted on a copy without weights.

The copy lies on the meta device, where nothing is computed and no memory is taken. Two things make that possible for
every network, and cheap. Whole numbers and masks keep their values (`ValuesWhereWhole`), because a network may compute
the layout of its tokens from them. And a repeated block is run once for each shape of its inputs (`CountedBlocks`): the
meta device takes a fraction of a millisecond for an operation, and Qwen-Image has 12,000 of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

Shapes = tuple[Any, ...]

ADAPTERS = ("joint_attention_kwargs", "attention_kwargs")
"""Arguments of a network that only adapters read; the copy has none."""

_INDEXING = (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_)


def shapes_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Shapes:
    """Shapes of the tensors in the arguments of a call, and everything else as it is: calls with equal ones have equal
    FLOPs."""
    leaves = tree_leaves((args, sorted(kwargs), kwargs))
    return tuple(tuple(a.shape) if isinstance(a, Tensor) else repr(a) for a in leaves)


class CountedNetwork:
    """Counts the FLOPs (a multiply-add is two) of forwards of a network without its adapters."""

    def __init__(self, network: Any) -> None:
        kind: Any = next(c for c in type(network).__mro__ if c.__module__.startswith("diffusers."))  # not a sharded one
        config = dict(network.config)
        if config.get("encoder_hid_dim_type") == "ip_image_proj":  # diffusers sets it on a UNet with a style adapter
            config["encoder_hid_dim_type"] = None
        with torch.device("meta"):
            self._bare: Any = kind.from_config(config)
        own = vars(network).get("_original_forward", vars(network).get("forward"))  # the first is accelerate's name
        if isinstance(own, MethodType):  # a family's own, which takes other arguments
            self._bare.forward = MethodType(own.__func__, self._bare)
        self._known: dict[Shapes, float] = {}
        self._blocks = CountedBlocks()
        for module in self._bare.modules():
            if type(module).__name__ in (getattr(kind, "_repeated_blocks", None) or ()):
                self._blocks.adopt(module)

    def flops(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
        """FLOPs of a forward of the whole batch with these arguments."""
        kwargs = {name: value for name, value in kwargs.items() if name not in ADAPTERS}
        key = shapes_of(args, kwargs)
        if key not in self._known:
            self._known[key] = self._count(args, kwargs)
        return self._known[key]

    def _count(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
        args, kwargs = tree_map_only(
            Tensor,
            lambda t: torch.empty_like(t, device="meta", dtype=torch.float32) if t.is_floating_point() else t.cpu(),
            (args, kwargs),
        )
        with torch.no_grad(), ValuesWhereWhole(), FlopCounterMode(display=False) as counter:
            self._blocks.begin(counter)
            self._bare(*args, **kwargs)
        return self._blocks.total()


class CountedBlocks:
    """Blocks of which one stands for all of its kind with inputs of the same shapes."""

    def __init__(self) -> None:
        self._known: dict[Shapes, tuple[float, Any]] = {}
        self._counter: Any = None
        self._not_run = 0.0

    def begin(self, counter: FlopCounterMode) -> None:
        """Count a forward with this counter."""
        self._counter, self._not_run = counter, 0.0

    def total(self) -> float:
        """FLOPs since `begin`, those of blocks that were not run included."""
        return self._counter.get_total_flops() + self._not_run

    def adopt(self, block: Any) -> None:
        """Replace the forward of a block, in place."""
        kind = (type(block), *(tuple(weight.shape) for weight in block.parameters()))
        run = block.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            key = (kind, shapes_of(args, kwargs))
            if key in self._known:
                flops, output = self._known[key]
                self._not_run += flops
                return output
            before = self.total()
            output = run(*args, **kwargs)
            self._known[key] = self.total() - before, output
            return output

        block.forward = forward


class ValuesWhereWhole(TorchDispatchMode):
    """Inside, tensors of the CPU, with values, meet tensors of the meta device, without: the result has none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if len({t.device.type for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}) > 1:
            if func.overloadpacket in _INDEXING:
                args = (args[0], _places(args[1]), *args[2:])
            args, kwargs = tree_map_only(Tensor, lambda t: t.to("meta"), (args, kwargs))
        return func(*args, **kwargs)


def _places(indices: list[Tensor | None]) -> list[Tensor | None]:
    """Indices of an operation with masks as places, whose number is in their shape."""
    found: list[Tensor | None] = []
    for index in indices:
        is_mask = index is not None and index.dtype == torch.bool and index.device.type == "cpu"
        found += index.nonzero(as_tuple=True) if is_mask else [index]  # type: ignore[union-attr]
    return found
