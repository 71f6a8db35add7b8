"""LoRA layers whose update is added to the output of the frozen layer in one product (`addmm`)."""

from __future__ import annotations

from typing import Any, cast

import torch
from peft.tuners.lora import Linear
from torch import Tensor, nn
from torch.nn import functional as F


class FusedLinear(Linear):
    """W x + s B (A x), peft's layer with one pass over the output instead of three: scaling and sum are part of the
    second product. Equal to peft's layer up to rounding, in the precision of the frozen layer."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        factors = self._factors(args, kwargs)
        if factors is None:
            return super().forward(x, *args, **kwargs)
        (a, b, scale), result = factors, cast(Tensor, self.base_layer(x))
        a, b = a.to(result.dtype), b.to(result.dtype)  # fp32 factors on a bf16 layer, with autocast or without
        hidden = F.linear(x.to(result.dtype), a).flatten(0, -2)
        return torch.addmm(result.flatten(0, -2), hidden, b.t(), alpha=scale).view_as(result)

    def _factors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, float] | None:
        """A, B and the scale of the one active LoRA; None where the layer has other options of peft, is off or merged,
        or under ZeRO-3, which gathers a factor when its own module is called."""
        # peft's own forward stays wherever it computes more than W x + s B A x: the fused product has no place for
        # dropout, biases, variants, or a second adapter.
        if (
            args
            or kwargs
            or self.disable_adapters
            or self.merged
            or self.lora_variant
            or len(self.active_adapters) != 1
        ):
            return None
        [name] = self.active_adapters
        if name not in self.lora_A or not isinstance(self.lora_dropout[name], nn.Identity) or self.lora_bias[name]:
            return None
        a, b = (cast(nn.Linear, factors[name]).weight for factors in (self.lora_A, self.lora_B))
        return (a, b, self.scaling[name]) if a.numel() and b.numel() else None


def fuse_lora(network: nn.Module) -> None:
    """Make the linear LoRA layers of a network fused ones, in place; weights and their names stay."""
    for module in network.modules():
        if type(module) is Linear:
            module.__class__ = FusedLinear
