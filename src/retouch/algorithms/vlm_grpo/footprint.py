"""What each phase of a run of vlm_grpo holds on a device beside weights and optimizer: the modules themselves run, on
tensors without data (`retouch.families.meta.without_data`) or with it, and what is alive is counted.

Legend: B rows, S tokens of a row, C of them completion, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from retouch.families.loading import DTYPES
from retouch.families.qwen.text import evaluating
from retouch.observe.live_bytes import LiveBytes

HEAD_TILE = (4096, 32768)
"""Tokens and words of the tiles in which TRL computes log-probabilities; a test compares it with the installed one."""


def autocast(precision: str) -> Callable[[], Any]:
    """What `training.mixed_precision` has around a forward; DeepSpeed casts weights instead."""
    return nullcontext if precision == "no" else lambda: torch.autocast("cpu", DTYPES[precision])


def generating(policy: Any, rows: int, prompt: int, new: int, around: Callable[[], Any] = nullcontext) -> int:
    """Peak while `rows` answers of `new` tokens are drawn: the prompt in one forward, or the last token with the keys
    and values of all before it."""
    language, head = language_model(policy), head_of(policy)
    cache: Any = DynamicCache(config=language.config)
    with evaluating(policy), LiveBytes() as live:
        _next_token(language, head, cache, rows, prompt, around)
        for layer in cache.layers:
            layer.keys, layer.values = (_longer(kept, prompt + new - 1) for kept in (layer.keys, layer.values))
        _next_token(language, head, cache, rows, 1, around)
    return live.peak


def encoding(policy: Any, rows: int, tokens: int) -> int:
    """Peak while prompts and completions become states."""
    with evaluating(policy), LiveBytes() as live:
        _states(language_model(policy), rows, tokens)
    return live.peak


def comparing(policy: Any, rows: int, tokens: int, scored: int, around: Callable[[], Any] = nullcontext) -> int:
    """Peak while log-probabilities of `rows` x `scored` tokens are computed without gradient: of the reference, which
    is the policy without its adapter, or of the policy as it generated."""
    with torch.no_grad(), around(), LiveBytes() as live:
        states = _states(language_model(policy), rows, tokens)
        live.add(head_bytes(head_of(policy), states, rows * scored, backward=False))
    return live.peak


def training(policy: Any, rows: int, tokens: int, scored: int, around: Callable[[], Any] = nullcontext) -> int:
    """Peak of a forward and backward of the loss of `rows` x `scored` tokens, gradients of weights left out: those are
    there all the time."""
    hooks = [w.register_post_accumulate_grad_hook(_drop_gradient) for w in policy.parameters() if w.requires_grad]
    try:
        with LiveBytes() as live:
            with around():
                states = _states(language_model(policy), rows, tokens)
                live.add(head_bytes(head_of(policy), states, rows * scored, backward=True))
            states.backward(torch.empty_like(states))
    finally:
        for hook in hooks:
            hook.remove()
    return live.peak


def head_bytes(head: Tensor, states: Tensor, tokens: int, *, backward: bool) -> int:
    """What TRL's fused head holds beside its input: a tile of logits and of the weights in the precision of the
    computation, and in the backward gradients in fp32.

    Args:
        head: [V, D] the weights.
        states: [B, S, D] what the head reads, under the run's autocast.
        tokens: that are scored, over all rows.
    """
    words, width = head.shape
    precision = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else states.dtype
    tile = min(tokens, HEAD_TILE[0]) * HEAD_TILE[1] * precision.itemsize
    cast = 0 if head.dtype == precision else min(words, HEAD_TILE[1]) * width * precision.itemsize
    scored = tokens * width * states.dtype.itemsize
    if not backward:
        return scored + tile + cast
    learnt = words * width * (4 + (0 if head.dtype == torch.float32 else head.dtype.itemsize))
    return scored + tile + cast + tokens * width * 4 + (learnt if head.requires_grad else 0)


def drawing(
    network: Any,
    vae: Any,
    rows: int,
    size: tuple[int, int],
    text_tokens: int,
    *,
    sources: int,
    guided: bool,
) -> int:
    """Peak while `rows` pictures are drawn at once: their sources encoded one by one, a step of the network, or the
    autoencoder at the end.

    Args:
        size: (height, width) of the pictures and of the `sources` that each edits.
        text_tokens: states of the longest condition.
        guided: twice the rows, half of them of the negative prompt.
    """
    dtype = network.dtype
    h, w = (side // 2 ** len(vae.temperal_downsample) for side in size)  # diffusers' spelling
    channels = vae.config.z_dim
    cells = (1, h // 2, w // 2)
    count = rows * (2 if guided else 1)
    peaks: list[int] = []
    with torch.no_grad():
        with LiveBytes() as live:
            tokens = torch.empty(count, (1 + sources) * cells[1] * cells[2], 4 * channels, dtype=dtype)
            network(
                hidden_states=tokens,
                timestep=torch.empty(count, dtype=dtype),
                encoder_hidden_states=torch.empty(count, text_tokens, network.config.joint_attention_dim, dtype=dtype),
                encoder_hidden_states_mask=torch.ones(count, text_tokens) > 0,
                img_shapes=[[cells] * (1 + sources)] * count,
                return_dict=False,
            )
        peaks.append(live.peak)
        with LiveBytes() as live:
            vae.decode(torch.empty(rows, channels, 1, h, w, dtype=vae.dtype))
        peaks.append(live.peak)
        if sources:
            with LiveBytes() as live:
                vae.encode(torch.empty(1, 3, 1, *size, dtype=vae.dtype))
            peaks.append(live.peak)
    return max(peaks)


def language_model(policy: Any) -> Any:
    """What speaks, of a policy with or without an adapter."""
    return _base(policy).model.language_model


def head_of(policy: Any) -> Tensor:
    """[V, D] the weights that make words of states."""
    return _base(policy).lm_head.weight


def _base(policy: Any) -> Any:
    return policy.get_base_model() if hasattr(policy, "get_base_model") else policy


def _states(language: Any, rows: int, tokens: int) -> Tensor:
    """[B, S, D] of a forward over padded rows."""
    return language(
        input_ids=torch.zeros(rows, tokens, dtype=torch.long),
        attention_mask=_padded(rows, tokens),
        position_ids=torch.zeros(3, rows, tokens, dtype=torch.long),
        use_cache=False,
    ).last_hidden_state


def _next_token(language: Any, head: Tensor, cache: Any, rows: int, tokens: int, around: Callable[[], Any]) -> None:
    """A forward over `tokens` behind what the cache holds, and the draw of the next one."""
    before = cache.get_seq_length()
    with around():
        states = language(
            input_ids=torch.zeros(rows, tokens, dtype=torch.long),
            attention_mask=_padded(rows, before + tokens),
            position_ids=torch.zeros(3, rows, tokens, dtype=torch.long),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state[:, -1]
        logits = nn.functional.linear(states, head)
    logits = logits.to(torch.float32, copy=True)
    logits.softmax(-1)


def _padded(rows: int, tokens: int) -> Tensor:
    """A mask with padding in it: rows of one length would need none."""
    mask = torch.ones(rows, tokens, dtype=torch.long)
    mask[0, 0] = 0
    return mask


def _longer(kept: Tensor, tokens: int) -> Tensor:
    return kept.new_empty(*kept.shape[:2], tokens, kept.shape[3])


def _drop_gradient(weight: Tensor) -> None:
    weight.grad = None
