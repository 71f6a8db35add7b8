"""Shape rules of the core: scalars and [B] vectors meet [B, ...] tensors explicitly, never by broadcasting luck."""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor


def working(x: Tensor) -> Tensor:
    """`x` in the precision of step arithmetic: fp16 and bf16 become fp32, fp32 and fp64 stay."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def may_ask(t: Tensor) -> bool:
    """Whether a check may look at the numbers of `t`: on the CPU alone. Any other device would first have to finish all
    that it was given, once for every check of every forward."""
    return t.device.type == "cpu"


def per_row(value: Tensor | float, x: Tensor, name: str) -> Tensor:
    """A scalar or [B] `value` shaped to multiply `x` [B, ...].

    Raises:
        ValueError: any other shape, with both shapes in the message.
    """
    v = torch.as_tensor(value, dtype=x.dtype, device=x.device)
    if v.ndim == 0:
        return v
    if v.shape == x.shape[:1]:
        return v.reshape(-1, *([1] * (x.ndim - 1)))
    raise ValueError(
        f"{name} has shape {tuple(v.shape)}; it must be a scalar or [B] = [{x.shape[0]}] "
        f"beside a tensor of shape {tuple(x.shape)}"
    )


def require_known(value: str, known: object, name: str) -> None:
    """`value` is one of the words of `known`, a Literal.

    Raises:
        ValueError: naming them.
    """
    words = get_args(known)
    if value not in words:
        raise ValueError(f"{name} is {value!r}; it must be {', '.join(words[:-1])} or {words[-1]}")


def require_same_shape(**tensors: Tensor) -> None:
    """All tensors share one shape with at least two dims (batch first).

    Raises:
        ValueError: naming every tensor and its shape.
    """
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    if len(set(shapes.values())) != 1:
        raise ValueError("these must have one shape: " + ", ".join(f"{n} {s}" for n, s in shapes.items()))
    name, shape = next(iter(shapes.items()))
    if len(shape) < 2:
        raise ValueError(f"{name} has shape {shape}; it needs a batch dim and at least one more")
