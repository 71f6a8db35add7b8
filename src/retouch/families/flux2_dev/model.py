"""FLUX.2 [dev]: a flow model for text to image, edits and inpainting, on diffusers' own network.

The language model of a Mistral 3 reads the prompt in a chat with a fixed system message; its vision tower and its head
are not used. Guidance is embedded, an input of the network, and there is no negative prompt.
`retouch.families.flux2.base` has the rest.

Legend: B samples, S text tokens, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from diffusers import Flux2Pipeline
from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE
from torch import Tensor
from transformers import Mistral3ForConditionalGeneration
from transformers.processing_utils import ProcessorMixin

from retouch.families.flux2.base import Flux2Model, quarters, tiny_parts
from retouch.families.flux2_dev.spec import Flux2DevModel
from retouch.families.flux2_dev.tiny import CHAT_TEMPLATE, byte_tokenizer, mistral3
from retouch.families.text import PromptReader, counted_chats, layer_states


class TextProcessor(ProcessorMixin):
    """The released processor (`PixtralProcessor`) without its images, which need torchvision: the tokenizer with the
    chat template that the processor takes."""

    def __init__(self, tokenizer: Any = None, chat_template: Any = None, **_: Any) -> None:
        super().__init__(tokenizer, chat_template=chat_template)


@dataclass(frozen=True)
class SystemChat(PromptReader):
    """A prompt after the system message of the released model -> states [S, D], as an encoder of
    `retouch.families.text.TextEncoders`.

    Attributes:
        model: a `MistralModel`.
        length: S; a longer chat is cut at its end, and padding is encoded, as diffusers does it.
        layers: entries of `hidden_states`, concatenated on width.
    """

    model: Any
    processor: TextProcessor
    length: int
    layers: tuple[int, ...]

    def counts(self, prompts: Sequence[str], images: Sequence[int] = (), *, closed: bool = True) -> list[int]:
        """See `PromptReader`; the end of the chat is cut before the prompt."""
        texts = counted_chats(self._text, [_readable(prompt) for prompt in prompts], closed=closed)
        return [len(ids) for ids in self._tokens(texts, verbose=False).input_ids]

    def __call__(self, prompts: Sequence[str]) -> Tensor:
        """[B, S, D], in one forward, with gradient where the model has it."""
        options: dict[str, Any] = {"padding": "max_length", "max_length": self.length, "truncation": True}
        batch = self._tokens([self._text(prompt) for prompt in prompts], return_tensors="pt", **options)
        return layer_states(self.model, {n: batch[n] for n in ("input_ids", "attention_mask")}, self.layers)

    def _tokens(self, texts: Sequence[str], **options: Any) -> Any:
        tokenizer: Any = self.processor.tokenizer
        begins = texts[0].startswith(tokenizer.bos_token)  # as with most templates
        return tokenizer(list(texts), add_special_tokens=not begins, **options)

    def _text(self, prompt: str) -> str:
        said = {"system": SYSTEM_MESSAGE, "user": _readable(prompt)}
        chat: Any = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in said.items()]
        return self.processor.apply_chat_template(chat)


def _readable(prompt: str) -> str:
    """A prompt without the mark of an image, of which the chat has none."""
    return prompt.replace("[IMG]", "")


class Flux2Dev(Flux2Model):
    """The family protocol (`retouch.types.DiffusionModel`) for FLUX.2 [dev]: a prompt, with a source or without, and a
    mask where there is a source."""

    section = Flux2DevModel
    tokenizer_class = TextProcessor
    embeds_guidance = True

    @staticmethod
    def language_model(encoder: Mistral3ForConditionalGeneration) -> Any:
        return encoder.model.language_model

    @staticmethod
    def states(model: Any, tokenizer: TextProcessor, length: int) -> SystemChat:
        """After the layers 10, 20 and 30 of the released encoder."""
        return SystemChat(model, tokenizer, length, quarters(model))

    @staticmethod
    def tiny() -> Flux2Pipeline:
        """See `tiny_parts`; prompts are bytes, and the system message is one token."""
        width, processor = 32, TextProcessor(byte_tokenizer(), chat_template=CHAT_TEMPLATE)
        parts: dict[str, Any] = tiny_parts(width, guidance_embeds=True) | {"tokenizer": processor}
        return Flux2Pipeline(**parts, text_encoder=mistral3(width))
