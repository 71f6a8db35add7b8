"""A Mistral 3 over bytes, with random weights; see `retouch.families.tiny`."""

from __future__ import annotations

from typing import Any

from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Mistral3Config, Mistral3ForConditionalGeneration, PreTrainedTokenizerFast

from retouch.families.tiny import bytes_to_characters

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- set mark = 'SYSTEM_PROMPT' if message.role == 'system' else 'INST' -%}
{{ '[' + mark + ']' + message.content[0].text + '[/' + mark + ']' }}
{%- endfor -%}
"""
"""A system message and a prompt in Mistral's format of a chat."""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token, each mark of a chat is one, and so is the system message."""
    marks = ["<s>", "</s>", "<pad>", "[IMG]", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"]
    words = [*marks, *map(chr, bytes_to_characters())]
    bytewise = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=bytewise,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        padding_side="left",
        additional_special_tokens=[*marks[3:], SYSTEM_MESSAGE],
    )


def mistral3(width: int) -> Mistral3ForConditionalGeneration:
    """A language model of four layers with heads of 16, and a vision tower of one."""
    tokenizer: Any = byte_tokenizer()
    text = {
        "model_type": "mistral",
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 4,
        "num_attention_heads": width // 16,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "sliding_window": None,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "model_type": "pixtral",
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 16,
        "image_size": 28,
        "patch_size": 14,
    }
    image = tokenizer.convert_tokens_to_ids("[IMG]")
    config = Mistral3Config(text_config=text, vision_config=vision, image_token_index=image)
    return Mistral3ForConditionalGeneration(config).eval()
