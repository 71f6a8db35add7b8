"""Prompts as the text encoder of Qwen-Image-2.1 reads them: chats with source images, and the states they become.

The text encoder is Qwen3-VL. Its states are those of the last layer before the final norm, without the system message.
The tokens of source images stay among them as slots, which the diffusion network fills with latents.

Legend: L tokens of a chat, S tokens with padding, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3VLProcessor

from retouch.families.qwen.text import SEEN, ResizedByPillow, Shown, without_tokens_before
from retouch.families.text import PromptReader, token_counts

SYSTEM = "Comprehend and analyze the provided prompt."
"""System message that the released model was trained with."""

END = "<|im_end|>\n<|im_start|>assistant\n"

PADDING, TEXT, SLOT = range(3)
"""Kinds of tokens."""


class ImageTextProcessor(ResizedByPillow, Qwen3VLProcessor):  # pyright: ignore[reportIncompatibleMethodOverride]
    """The released processor for text and images alone; the stock class also loads one for videos, which needs
    torchvision."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None, **_: Any) -> None:
        super().__init__(image_processor, tokenizer, None, chat_template=chat_template)


def chat(prompt: str, images: int = 0) -> str:
    """A prompt and its numbered images in the chat of the released model."""
    seen = " ".join(f"<image{i + 1}>{SEEN}" for i in range(images))
    return f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{seen}{prompt or ' '}{END}"


@dataclass(frozen=True)
class PromptStates(PromptReader):
    """A prompt, alone or with images (`Shown`) -> states of the vision-language model.

    Attributes:
        model: a `Qwen3VLForConditionalGeneration`.
        processor: of text and images; its tokenizer is that of text alone.
        length: tokens of a chat kept at most, and padded to, without those of images.
    """

    model: Any
    processor: Any
    length: int

    def counts(self, prompts: Sequence[str], images: Sequence[int] = (), *, closed: bool = True) -> list[int]:
        """See `PromptReader`; the end of the chat is never cut, and the tokens of images do not count."""
        less = self._system_tokens() + len(images)
        chats = [chat(prompt, len(images)) for prompt in prompts]
        return [tokens - less for tokens in token_counts(self.processor.tokenizer, chats)]

    def __call__(self, prompts: Sequence[str | Shown]) -> Tensor:
        """[B, S, D], padded with zeros behind; S is `length` and the tokens of the images."""
        return torch.stack([self._states(prompt) for prompt in prompts])

    def kinds(self, prompts: Sequence[str | Shown]) -> Tensor:
        """[B, S] fp32: what each token is, one of PADDING, TEXT and SLOT."""
        return torch.stack([self._kinds(prompt) for prompt in prompts])

    def _kinds(self, prompt: str | Shown) -> Tensor:
        """[S] fp32: what each token is, one of PADDING, TEXT and SLOT."""
        inputs, drop = self._inputs(prompt)
        kinds = torch.where(self._slots(inputs), SLOT, TEXT)[0, drop:]
        return self._padded(kinds, int((kinds == SLOT).sum())).float()

    def _states(self, prompt: str | Shown) -> Tensor:
        inputs, drop = self._inputs(prompt)
        slots = int(self._slots(inputs).sum())
        on_device = {name: value.to(self.model.device) for name, value in inputs.items()}
        body = self.model.model
        # a hook that returns the input of the final norm takes the norm out, as in the pipeline
        without_norm = body.language_model.norm.register_forward_hook(lambda _, args, __: args[0])
        try:
            states = body(**on_device, use_cache=False).last_hidden_state[0, drop:]
        finally:
            without_norm.remove()
        return self._padded(states, slots)

    def _slots(self, inputs: dict[str, Tensor]) -> Tensor:
        """[1, L] bool: tokens that stand for images."""
        return inputs["input_ids"] == self.processor.image_token_id

    def _padded(self, rows: Tensor, slots: int) -> Tensor:
        """[L, ...] -> [S, ...]."""
        return nn.functional.pad(rows, (0, 0) * (rows.ndim - 1) + (0, self.length + slots - len(rows)))

    def _inputs(self, prompt: str | Shown) -> tuple[dict[str, Tensor], int]:
        """Inputs of the model for one prompt, without padding, and the number of tokens of the system message."""
        seen = Shown(prompt, (), ()) if isinstance(prompt, str) else prompt
        text, images = chat(seen.prompt, len(seen.images)), list(seen.images)
        # the sides are multiples of a token's: another size would have another number of slots than the network fills
        given: dict[str, Any] = {"images": images, "do_resize": False} if images else {}
        inputs: dict[str, Tensor] = dict(self.processor(text=[text], return_tensors="pt", **given))
        drop = self._system_tokens()
        over = inputs["input_ids"].shape[1] - drop - int(self._slots(inputs).sum()) - self.length
        return (inputs if over <= 0 else self._shortened(inputs, seen.prompt, over)), drop

    def _system_tokens(self) -> int:
        message = [{"role": "system", "content": [{"type": "text", "text": SYSTEM}]}]
        return len(self.processor.apply_chat_template(message, tokenize=True, return_dict=False)[0])

    def _shortened(self, inputs: dict[str, Tensor], prompt: str, over: int) -> dict[str, Tensor]:
        """Without the last tokens of the prompt: images and the end of the chat stay."""
        tokenizer = self.processor.tokenizer
        count = len(tokenizer(prompt, verbose=False).input_ids)
        if over > count:
            raise ValueError(
                f"the chat around a prompt takes more than model.max_sequence_length {self.length} tokens; set "
                f"{self.length + over - count + 64} or more"
            )
        return without_tokens_before(inputs, len(tokenizer(END).input_ids), over)
