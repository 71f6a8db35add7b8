"""Facts of the Qwen3 text encoder."""

from __future__ import annotations

from typing import Any

QWEN3_4B: dict[str, Any] = {  # 4.02 B parameters
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": True,
}
"""Config of Qwen3-4B."""
