"""Shape rules and reductions of the core: scalars and [B] vectors meet [B, ...] tensors explicitly, elements become one
value a row, rows one loss.

Legend: B rows (images), W trained steps of a row.
"""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor


def working(x: Tensor) -> Tensor:
    """`x` in the precision of step arithmetic: fp16 and bf16 become fp32, fp32 and fp64 stay."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def may_ask(t: Tensor) -> bool:
    """Whether a check may read the values of `t`: only on the CPU. On another device each check would wait for all
    queued work, in every forward."""
    return t.device.type == "cpu"


def per_row(value: Tensor | float, x: Tensor, name: str) -> Tensor:
    """A scalar or [B] `value` shaped to multiply `x` [B, ...].

    Raises:
        ValueError: any other shape, with both shapes in the message.
    """
    if isinstance(value, Tensor):
        v = value.to(x.device, x.dtype)
    else:  # a tensor that is made of a number is copied to the device, which the CPU waits for
        v = torch.full((), value, dtype=x.dtype, device=x.device)
    if v.ndim == 0:
        return v
    if v.shape == x.shape[:1]:
        return v.reshape(-1, *([1] * (x.ndim - 1)))
    raise ValueError(
        f"{name} has shape {tuple(v.shape)}; it must be a scalar or [B] = [{x.shape[0]}] "
        f"beside a tensor of shape {tuple(x.shape)}"
    )


def require_known(value: str, known: object, name: str) -> None:
    """Check that `value` is one of the values of `known`, a Literal.

    Raises:
        ValueError: naming them.
    """
    words = get_args(known)
    if value not in words:
        raise ValueError(f"{name} is {value!r}; it must be {', '.join(words[:-1])} or {words[-1]}")


def require_same_shape(**tensors: Tensor) -> None:
    """Check that all tensors share one shape with at least two dims (batch first).

    Raises:
        ValueError: naming every tensor and its shape.
    """
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    if len(set(shapes.values())) != 1:
        raise ValueError("these must have one shape: " + ", ".join(f"{n} {s}" for n, s in shapes.items()))
    name, shape = next(iter(shapes.items()))
    if len(shape) < 2:
        raise ValueError(f"{name} has shape {shape}; it needs a batch dim and at least one more")


def row_mean(values: Tensor, region: Tensor | None = None) -> Tensor:
    """Mean of `values` [B, ...] over all non-batch dims -> [B].

    With `region`, non-negative weights that broadcast to `values` in every dim but the batch ([B, 1, H, W] beside
    [B, C, H, W]), it is the weighted mean: elements where the region is 0 do not count at all, not even if they are
    NaN or infinite.

    A row whose region is empty has no mean. On the CPU that is an error; on another device, where a check would wait
    for all queued work, the row is NaN instead.

    Raises:
        ValueError: `values` without a non-batch dim, `region` of another rank or batch, or on the CPU an empty region.
    """
    if values.ndim < 2:
        raise ValueError(f"values have shape {tuple(values.shape)}; a row mean needs at least one non-batch dim")
    if region is None:
        return values.flatten(1).mean(1)
    if region.ndim != values.ndim or region.shape[0] != values.shape[0]:
        raise ValueError(
            f"region has shape {tuple(region.shape)}; beside values of shape {tuple(values.shape)} it needs "
            f"{values.ndim} dims and {values.shape[0]} rows"
        )
    weights = region.to(values.dtype).expand_as(values)
    total = weights.flatten(1).sum(1)
    if may_ask(total) and not bool((total > 0).all()):
        raise ValueError("a row has an empty region: nothing to average over (is its mask empty?)")
    inside = torch.where(weights > 0, values, torch.zeros_like(values))
    return (inside * weights).flatten(1).sum(1) / total


def within(values: Tensor, region: Tensor | None) -> Tensor:
    """`values` [B, ...] with 0 where `region` is 0; values there, NaN included, have no gradient.

    Apply it to differences before they are squared: 0 times the derivative of NaN² would be NaN.
    """
    return values if region is None else torch.where(region > 0, values, torch.zeros_like(values))


def region_of_kept(region: Tensor | None, weight: Tensor) -> Tensor | None:
    """`region`, with rows of weight 0 filled with 1: an empty region in a row that does not count is no error."""
    if region is None or region.shape[:1] != weight.shape:  # which `row_mean` refuses
        return region
    return region.masked_fill((weight == 0).view(-1, *([1] * (region.ndim - 1))), 1)


def row_weights(weight: Tensor | None, rows: Tensor) -> Tensor:
    """`weight` [B] beside `rows` [B, ...]; ones where there is none.

    Raises:
        ValueError: another shape.
    """
    if weight is None:
        return torch.ones(len(rows), dtype=torch.promote_types(rows.dtype, torch.float32), device=rows.device)
    if weight.shape != rows.shape[:1]:
        raise ValueError(f"weight has shape {tuple(weight.shape)}; it must be [B] = [{len(rows)}]")
    return weight


def weighted_mean(rows: Tensor, weight: Tensor | None = None, normalizer: Tensor | float | None = None) -> Tensor:
    """sum(weight * rows) / normalizer -> scalar of fp32 at least; rows [B] or [B, W], weight [B].

    Rows of weight 0 are inert whatever they hold. [B, W] rows are averaged over W first. `normalizer` defaults to
    sum(weight); a recipe passes the sum over ranks and micro-batches of one optimizer step, and every image then counts
    the same however the batch is split. A zero total gives 0, with zero gradient.

    Raises:
        ValueError: other shapes, or a normalizer of more than one number.
    """
    rows = working(rows)
    if rows.ndim == 2:
        rows = rows.mean(1)
    if rows.ndim != 1:
        raise ValueError(f"rows have shape {tuple(rows.shape)}; they must be [B] or [B, W]")
    weight = row_weights(weight, rows).to(rows.dtype)
    total = weight.sum() if normalizer is None else torch.as_tensor(normalizer, dtype=rows.dtype, device=rows.device)
    if total.numel() != 1:
        raise ValueError(f"normalizer has shape {tuple(total.shape)}; it must be a scalar")
    total = total.reshape(())
    kept = torch.where(weight != 0, rows, torch.zeros_like(rows))
    return torch.where(
        total > 0, (weight * kept).sum() / total.clamp(min=torch.finfo(rows.dtype).tiny), 0.0 * kept.sum()
    )
