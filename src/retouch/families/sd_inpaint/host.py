"""The style adapter inside the U-Net of Stable Diffusion; see `retouch.adapters.hosts`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.models.attention_processor import IPAdapterAttnProcessor2_0
from diffusers.models.embeddings import ImageProjection, MultiIPAdapterImageProjection
from torch import Tensor, nn

from retouch.adapters.hosts import Host
from retouch.adapters.shape import AdapterShape
from retouch.families.facts import AdapterFacts


class UnetHost(Host):
    """The U-Net of Stable Diffusion: diffusers' own modules at every cross-attention, in Tencent's layout."""

    def __init__(self, network: Any, facts: AdapterFacts) -> None:
        super().__init__(network, facts)
        self._stock: dict[str, Any] = {}

    def blocks(self) -> list[str]:
        return [name for name in super().blocks() if name.endswith(".attn2")]

    def token_width(self) -> int:
        return self.network.config.cross_attention_dim

    def place(self, shape: AdapterShape) -> None:
        network = self.network
        projection = MultiIPAdapterImageProjection([ImageProjection(shape.width, shape.token_width, shape.tokens)])
        network.encoder_hid_proj = projection.to(network.device)
        network.register_to_config(encoder_hid_dim_type="ip_image_proj")
        for block, inner in zip(self.blocks(), shape.inner, strict=True):
            attention = network.get_submodule(block)
            self._stock[block] = attention.processor
            made = IPAdapterAttnProcessor2_0(inner, shape.token_width, num_tokens=(shape.tokens,))
            made.to_k_ip[0], made.to_v_ip[0] = (
                CastLinear(shape.token_width, inner, bias=False, out_dtype=network.dtype) for _ in "kv"
            )
            nn.init.zeros_(made.to_v_ip[0].weight)  # type: ignore[arg-type]
            attention.set_processor(made.to(network.device))

    def remove(self) -> None:
        del self.network.encoder_hid_proj
        self.network.encoder_hid_proj = None
        self.network.register_to_config(encoder_hid_dim_type=None)
        for block, stock in self._stock.items():
            self.network.get_submodule(block).set_processor(stock)

    def set_strength(self, scales: Sequence[float], *, value_norm: bool) -> None:
        for attention, scale in zip(self.attentions(), scales, strict=True):
            attention.processor.scale = [scale]

    def name(self, part: str, block: str, rest: str) -> str:
        if block:
            return f"{block}.processor.{rest.removesuffix('.weight')}.0.weight"
        layer, _, tensor = rest.partition(".")
        inside = "image_embeds" if layer == "proj" else layer
        return f"encoder_hid_proj.image_projection_layers.0.{inside}.{tensor}"

    def call_options(self, vectors: Tensor, *, guided: bool) -> dict[str, Any]:
        rows = vectors[:, None]
        return {"ip_adapter_image_embeds": [torch.cat([torch.zeros_like(rows), rows]) if guided else rows]}


class CastLinear(nn.Linear):
    """A layer in its own precision among others: diffusers' processor mixes its output with the network's."""

    def __init__(self, *sizes: int, bias: bool, out_dtype: torch.dtype) -> None:
        super().__init__(*sizes, bias=bias)
        self.out_dtype = out_dtype

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.to(self.weight.dtype)).to(self.out_dtype)
