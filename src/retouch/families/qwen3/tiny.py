"""A Qwen3 over bytes, with random weights; see `retouch.families.tiny`."""

from __future__ import annotations

from typing import Any

from transformers import Qwen2Tokenizer, Qwen3Config

from retouch.families.qwen.tiny import byte_qwen_tokenizer

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking -%}
{{ '<think>\\n\\n</think>\\n\\n' }}
{%- endif -%}
{%- endif -%}
"""
"""The rendering of a user's message by the released template."""


def chat_tokenizer() -> Qwen2Tokenizer:
    """Every byte is a token, and a chat of one message is rendered as by the released tokenizer."""
    tokenizer: Any = byte_qwen_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def qwen3(kind: Any, width: int = 32, layers: int = 4) -> Any:
    """A `Qwen3Model` or `Qwen3ForCausalLM` with heads of 16."""
    tokenizer: Any = chat_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 16,
        num_key_value_heads=width // 16,
        head_dim=16,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return kind(config).eval()
