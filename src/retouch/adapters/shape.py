"""Sizes of an adapter and which of its weights are trained, without torch: `retouch check --memory` counts them.

Keys are those of the files (`retouch.adapters.formats`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from retouch.families.base import FamilySpec, TrainIpAdapter

SOURCES = 32
"""Number of vectors that a query-former makes of one reference; its queries attend to them."""

Head = Literal["mlp", "mlp+query_former", "linear"]


@dataclass(frozen=True)
class AdapterShape:
    """Sizes of an adapter.

    Attributes:
        head: kind of projection from the vector of an image to tokens.
        width: D of the vector.
        tokens: T.
        token_width: W.
        inner: for each block, the width of its keys and values.
    """

    head: Head
    width: int
    tokens: int
    token_width: int
    inner: tuple[int, ...]

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every key of the file, in the order that other programs write, with its shape."""
        d, w, flat = self.width, self.token_width, self.tokens * self.token_width
        norm: dict[str, tuple[int, ...]] = {"weight": (w,), "bias": (w,)}
        if self.head == "linear":
            own = {"proj.weight": (flat, d), "proj.bias": (flat,)}
        else:
            own = _two_layers("proj", d, flat)
        found = {f"image_proj.{k}": v for k, v in {**own, **{f"norm.{k}": v for k, v in norm.items()}}.items()}
        if self.head == "mlp+query_former":
            attention = {
                "in_proj_weight": (3 * w, w),
                "in_proj_bias": (3 * w,),
                "out_proj.weight": (w, w),
                "out_proj.bias": (w,),
            }
            parts = {
                "query_embeds": (self.tokens, w),
                **_two_layers("id_proj", d, SOURCES * w),
                **{f"cross_attn.{k}": v for k, v in attention.items()},
                **{f"{part}.{k}": v for part in ("cross_attn_norm", "norm") for k, v in norm.items()},
            }
            found |= {f"image_proj_qformer.{k}": v for k, v in parts.items()}
        for number, inner in zip(self.numbers(), self.inner, strict=True):
            found |= {f"ip_adapter.{number}.to_{x}_ip.weight": (inner, w) for x in "kv"}
        return found

    def numbers(self) -> list[int]:
        """Numbers of the blocks in the file: Tencent's counts all attentions of a U-Net, of which every other one has
        keys from the image."""
        return [2 * i + 1 if self.head == "linear" else i for i in range(len(self.inner))]

    def parameters(self) -> dict[str, int]:
        """Number of weights by top-level key."""
        counts: dict[str, int] = {}
        for key, shape in self.tensors().items():
            section = key.partition(".")[0]
            counts[section] = counts.get(section, 0) + math.prod(shape)
        return counts


def shape_in(
    train: TrainIpAdapter, spec: FamilySpec, width: int, token_width: int, inner: tuple[int, ...]
) -> AdapterShape:
    """Shape of the adapter of `model.train`.

    Args:
        width: of the image encoder's vectors.
        token_width, inner: of the network, as of `AdapterShape`.
    """
    facts = spec.adapter
    assert facts is not None, "`check` refuses other families"
    head: Head = "mlp+query_former" if train.query_former else facts.head
    return AdapterShape(head, width, train.tokens or facts.tokens, token_width, inner)


def is_trained(key: str, weights: str) -> bool:
    """Whether a weight of the file is trained itself.

    Args:
        weights: `model.train.weights`.
    """
    if weights == "all":
        return True
    if weights == "no_last_layer":
        return not key.startswith(("image_proj.proj.2.", "image_proj_qformer.id_proj.2."))
    return weights == "kv" and key.startswith("ip_adapter.")


def _two_layers(name: str, width: int, out: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}.0.weight": (2 * width, width),
        f"{name}.0.bias": (2 * width,),
        f"{name}.2.weight": (out, 2 * width),
        f"{name}.2.bias": (out,),
    }
