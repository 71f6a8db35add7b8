"""From the vector of a reference image to the tokens that the blocks attend to.

Legend: B rows, D width of the vector, T tokens, W width of a token (that of the network's text).
Parameter names are those of the files (`retouch.adapters.formats`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from retouch.adapters.shape import SOURCES

HEADS = 8
"""Heads of the query-former's attention; adapter files do not record it."""


class MlpProjection(nn.Module):
    """Two layers and a norm: the head of InstantX's and Calligrapher's adapters."""

    def __init__(self, width: int, tokens: int, token_width: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.proj = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, tokens * token_width))
        self.norm = nn.LayerNorm(token_width)

    def forward(self, vectors: Tensor) -> Tensor:
        """[B, D] -> [B, T, W]."""
        hidden = self.proj[1](_apply(self.proj[0], vectors))
        return _apply(self.norm, _apply(self.proj[2], hidden).unflatten(-1, (self.tokens, -1)))


class QueryFormer(nn.Module):
    """Learned queries attend to vectors made of one reference: the second head of the released Calligrapher."""

    def __init__(self, width: int, tokens: int, token_width: int) -> None:
        super().__init__()
        self.query_embeds = nn.Parameter(torch.randn(tokens, token_width, dtype=torch.float32))
        self.id_proj = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, SOURCES * token_width)
        )
        self.cross_attn = nn.MultiheadAttention(token_width, HEADS, batch_first=True)
        self.cross_attn_norm = nn.LayerNorm(token_width)
        self.norm = nn.LayerNorm(token_width)

    def forward(self, vectors: Tensor) -> Tensor:
        """[B, D] -> [B, T, W]."""
        hidden = self.id_proj[1](_apply(self.id_proj[0], vectors))
        sources = _apply(self.id_proj[2], hidden).unflatten(-1, (SOURCES, -1)).to(self.query_embeds.dtype)
        queries = self.query_embeds.expand(len(vectors), -1, -1)
        attended = self.cross_attn(queries, sources, sources, need_weights=False)[0]
        return _apply(self.norm, _apply(self.cross_attn_norm, attended + queries))


class TokenProjection(nn.Module):
    """The head or the sum of both heads, where a network expects its `encoder_hid_proj`.

    Attributes:
        idle: no row attends to the tokens.
    """

    def __init__(self, width: int, tokens: int, token_width: int, *, query_former: bool) -> None:
        super().__init__()
        self.mlp = MlpProjection(width, tokens, token_width)
        self.qformer = QueryFormer(width, tokens, token_width) if query_former else None
        self.idle = False

    def forward(self, reference: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Vectors [B, D], or (vectors, keep [B]) -> tokens [B, T, W], and which rows attend to them (0: to none)."""
        vectors, keep = reference if isinstance(reference, tuple) else (reference, None)
        keep = torch.zeros_like(vectors[:, 0]) if self.idle else keep
        tokens = self.mlp(vectors)
        return (tokens if self.qformer is None else tokens + self.qformer(vectors)), keep


def _apply(layer: nn.Module, x: Tensor) -> Tensor:
    """A layer in its own precision: parts that are trained are fp32, frozen ones have the network's."""
    return layer(x.to(next(layer.parameters()).dtype))
