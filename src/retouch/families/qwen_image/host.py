"""The style adapter inside Qwen-Image; see `retouch.adapters.hosts`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from diffusers.models.transformers.transformer_qwenimage import apply_rotary_emb_qwen
from torch import Tensor

from retouch.adapters.hosts import BlockHost, IpProcessor, Reference
from retouch.adapters.shape import AdapterShape


class QwenIpProcessor(IpProcessor):
    """Attention with a style adapter in the blocks of Qwen-Image (joint attention): image queries attend to the
    reference tokens."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
        ip_hidden_states: Reference | None = None,
    ) -> tuple[Tensor, Tensor]:
        if ip_hidden_states is None:
            return self.stock(
                attn,
                hidden_states,
                encoder_hidden_states,
                encoder_hidden_states_mask,
                attention_mask,
                image_rotary_emb,
            )
        shape = (-1, attn.inner_dim // attn.heads)
        query, key, value = (p(hidden_states).unflatten(-1, shape) for p in (attn.to_q, attn.to_k, attn.to_v))
        text = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
        text_query, text_key, text_value = (p(encoder_hidden_states).unflatten(-1, shape) for p in text)
        query, key = attn.norm_q(query), attn.norm_k(key)
        text_query, text_key = attn.norm_added_q(text_query), attn.norm_added_k(text_key)
        styled = self.attend(query, ip_hidden_states)
        if image_rotary_emb is not None:
            turn: Any = partial(apply_rotary_emb_qwen, use_real=False)
            image_freqs, text_freqs = image_rotary_emb
            query, key = turn(query, image_freqs), turn(key, image_freqs)
            text_query, text_key = turn(text_query, text_freqs), turn(text_key, text_freqs)
        mask = None
        if encoder_hidden_states_mask is not None:
            everywhere = encoder_hidden_states_mask.new_ones(hidden_states.shape[:2])
            mask = torch.cat([encoder_hidden_states_mask, everywhere], dim=1)[:, None, None]
        query, key, value = (
            torch.cat([text_query, query], 1),
            torch.cat([text_key, key], 1),
            torch.cat([text_value, value], 1),
        )
        out = self.attention(query, key, value, mask).flatten(2, 3).to(query.dtype)
        text_out, out = out.tensor_split([encoder_hidden_states.shape[1]], dim=1)
        out = attn.to_out[1](attn.to_out[0](out + styled))
        return out, attn.to_add_out(text_out.contiguous())


class QwenHost(BlockHost):
    """A `QwenImageTransformer2DModel`. Its forward calls no projection: a hook makes the tokens before it, inside the
    same call."""

    processor = QwenIpProcessor
    attention_kwargs = "attention_kwargs"

    def place(self, shape: AdapterShape) -> None:
        super().place(shape)
        self._hook = self.network.register_forward_pre_hook(_project_reference, with_kwargs=True)

    def remove(self) -> None:
        self._hook.remove()
        super().remove()


def _project_reference(network: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """`ip_adapter_image_embeds` among the attention's arguments becomes `ip_hidden_states`, as diffusers does it in
    FLUX."""
    given = kwargs.get("attention_kwargs") or {}
    if "ip_adapter_image_embeds" not in given:
        return args, kwargs
    rest = {name: value for name, value in given.items() if name != "ip_adapter_image_embeds"}
    tokens = network.encoder_hid_proj(given["ip_adapter_image_embeds"])
    return args, {**kwargs, "attention_kwargs": {**rest, "ip_hidden_states": tokens}}
