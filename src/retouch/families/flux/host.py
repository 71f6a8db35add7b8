"""The style adapter inside FLUX: the double blocks, then the single ones. See `retouch.adapters.hosts`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from diffusers.models.embeddings import apply_rotary_emb
from torch import Tensor

from retouch.adapters.hosts import BlockHost, IpProcessor, Reference
from retouch.config.errors import ConfigError


class FluxIpProcessor(IpProcessor):
    """Attention with a style adapter in the double and single blocks of FLUX."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
        ip_hidden_states: Reference | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        if ip_hidden_states is None:
            return self.stock(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
        if attn.fused_projections:
            raise ConfigError("the adapter does not work on fused projections; call unfuse_qkv_projections() first")
        shape = (-1, attn.head_dim)
        query, key, value = (p(hidden_states).unflatten(-1, shape) for p in (attn.to_q, attn.to_k, attn.to_v))
        query, key = attn.norm_q(query), attn.norm_k(key)
        styled = self.attend(query, ip_hidden_states)
        if encoder_hidden_states is not None:
            text = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
            text_query, text_key, text_value = (p(encoder_hidden_states).unflatten(-1, shape) for p in text)
            query = torch.cat([attn.norm_added_q(text_query), query], dim=1)
            key = torch.cat([attn.norm_added_k(text_key), key], dim=1)
            value = torch.cat([text_value, value], dim=1)
        if image_rotary_emb is not None:
            rotate: Any = partial(apply_rotary_emb, freqs_cis=image_rotary_emb, sequence_dim=1)
            query, key = rotate(query), rotate(key)
        out = self.attention(query, key, value, attention_mask).flatten(2, 3).to(query.dtype)
        if encoder_hidden_states is None:
            return out + styled
        text_out, out = out.tensor_split([encoder_hidden_states.shape[1]], dim=1)
        out = attn.to_out[1](attn.to_out[0](out + styled))
        return out, attn.to_add_out(text_out.contiguous())


class FluxHost(BlockHost):
    """A `FluxTransformer2DModel`."""

    processor = FluxIpProcessor
