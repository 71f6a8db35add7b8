"""Prompts as chats with Qwen3, and the states that condition a diffusion network.

A prompt is the only message of a user; the chat ends where the assistant would begin. Some networks attend to padded
states, others take only those of the chat itself.

Legend: L tokens of a chat, S tokens with padding, n layers, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from retouch.families.text import PromptReader, counted_chats, layer_states, token_counts


@dataclass(frozen=True)
class Qwen3States(PromptReader):
    """A prompt -> states of a Qwen3 [S, n D], as an encoder of `retouch.families.text.TextEncoders`.

    Attributes:
        model: a `Qwen3Model`.
        tokenizer: its chat template takes `enable_thinking`.
        length: S; a longer chat is cut at its end, as diffusers does it.
        layers: entries of `hidden_states`, concatenated on width; 0 is the embedding.
        thinking: False closes the assistant's thoughts before they begin.
        encodes_padding: whether padding goes through the encoder, and its states depend on the chat; else it is
            appended as zeros.
    """

    model: Any
    tokenizer: Any
    length: int
    layers: tuple[int, ...]
    thinking: bool
    encodes_padding: bool

    def counts(self, prompts: Sequence[str], images: Sequence[int] = (), *, closed: bool = True) -> list[int]:
        """See `PromptReader`; the end of the chat is cut before the prompt."""
        return token_counts(self.tokenizer, counted_chats(self._chat, prompts, closed=closed))

    def tokens(self, prompt: str) -> dict[str, Tensor]:
        """`input_ids` and `attention_mask` of a chat [1, S], or [1, L] where padding is not encoded."""
        chat = self._chat(prompt)
        padding: Any = "max_length" if self.encodes_padding else False
        batch = self.tokenizer([chat], padding=padding, max_length=self.length, truncation=True, return_tensors="pt")
        return {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}

    def _chat(self, prompt: str) -> str:
        return self.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=self.thinking,
        )

    def __call__(self, prompts: Sequence[str]) -> Tensor:
        """[B, S, n D]: in one forward where every chat has S tokens, with gradient where the model has it."""
        chats = [self.tokens(prompt) for prompt in prompts]
        if self.encodes_padding:
            return self._states({name: torch.cat([chat[name] for chat in chats]) for name in chats[0]})
        return torch.cat([self._states(chat) for chat in chats])

    def _states(self, chats: Mapping[str, Tensor]) -> Tensor:
        states = layer_states(self.model, chats, self.layers)
        return nn.functional.pad(states, (0, 0, 0, self.length - states.shape[1]))

    def lengths(self, prompts: Sequence[str]) -> Tensor:
        """[B] int64: how many of the states of each are no padding."""
        counts = [int(self.tokens(prompt)["attention_mask"].sum()) for prompt in prompts]
        return torch.tensor(counts, dtype=torch.int64)
