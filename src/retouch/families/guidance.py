"""Classifier-free guidance (arXiv 2207.12598) in one forward of a doubled batch: the half without the prompt, then that
with it; or in a forward of each half. A condition is guided where it has a `negative_text`.

Legend: B samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]
"""Tensors of a condition."""


def is_guided(tensors: Tensors) -> bool:
    """Whether a condition has a negative prompt."""
    return "negative_text" in tensors


def doubled(x: Tensor, tensors: Tensors) -> Tensor:
    """[B, ...] -> the same for both halves [2 B, ...]; unchanged without guidance."""
    return torch.cat([x, x]) if is_guided(tensors) else x


def halves(tensors: Tensors, name: str) -> Tensor:
    """A tensor of the negative prompt, then of the prompt [2 B, ...]; of the prompt alone without guidance."""
    return torch.cat([tensors[f"negative_{name}"], tensors[name]]) if is_guided(tensors) else tensors[name]


def each_half(tensors: Tensors) -> list[Tensors]:
    """A guided condition as two without guidance, of the negative prompt and of the prompt, whose outputs concatenated
    are one of both halves; another condition alone."""
    if not is_guided(tensors):
        return [tensors]
    negative = {name: t for name, t in tensors.items() if name.startswith("negative_")}
    with_text = {name: t for name, t in tensors.items() if name not in negative}
    without = {**with_text, **{name.removeprefix("negative_"): t for name, t in negative.items()}}
    if "reference_keep" in without:
        without["reference_keep"] = torch.zeros_like(without["reference_keep"])
    return [without, with_text]


def guided(output: Tensor, tensors: Tensors, scale: float | None = None) -> Tensor:
    """An output of both halves [2 B, ...] -> without + scale (with - without) [B, ...]; unchanged without guidance.

    Args:
        scale: None takes `guidance` [B] of the condition.
    """
    if not is_guided(tensors):
        return output
    without, with_text = output.chunk(2)
    factor = tensors["guidance"].view(-1, *[1] * (output.ndim - 1)) if scale is None else scale
    return without + factor * (with_text - without)


def adapter_inputs(tensors: Tensors) -> dict[str, Any] | None:
    """Input of the attention processors of a style adapter; its projection runs inside the network's forward. The half
    with the negative prompt attends to no token."""
    if "reference" not in tensors:
        return None
    keep = tensors["reference_keep"]
    keep = torch.cat([torch.zeros_like(keep), keep]) if is_guided(tensors) else keep
    return {"ip_adapter_image_embeds": (doubled(tensors["reference"], tensors), keep)}
