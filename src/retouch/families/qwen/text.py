"""Prompts as Qwen-Image's text encoder reads them: chats, and the states that they become.

The text encoder is a vision-language model. A prompt is put into a chat; the states of its last layer behind the
system part are the text condition.

Legend: L tokens of a row, D width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import torch
from diffusers import QwenImageEditPipeline, QwenImageEditPlusPipeline, QwenImagePipeline
from PIL.Image import Image
from torch import Tensor, nn
from transformers import AutoImageProcessor, ProcessorMixin, Qwen2_5_VLProcessor

from retouch.families.loading import ModelFilesError
from retouch.families.text import Encoding, PromptReader, token_counts

Task = Literal["draw", "edit", "edit_plus"]
"""Chat template of a prompt: text to image, one image to edit, or numbered images to edit."""

PREFIX: dict[Task, int] = {"draw": 34, "edit": 64, "edit_plus": 64}
"""Tokens of the chat before the user's words, with the released tokenizer."""

USER = "<|im_start|>user\n"
SEEN = "<|vision_start|><|image_pad|><|vision_end|>"
"""An image in a chat; the processor repeats the pad for as many tokens as the image takes."""


class ResizedByPillow(ProcessorMixin):
    """A processor that resizes images with Pillow. torchvision, which transformers prefers where it is installed, makes
    other pixels: the text encoder of one run file would read others on another machine."""

    @classmethod
    def from_pretrained(cls, path: Any, **options: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """See `ProcessorMixin.from_pretrained`."""
        processor: Any = super().from_pretrained(path, **options)
        processor.image_processor = AutoImageProcessor.from_pretrained(path, backend="pil", **options)
        return processor


class ImageTextProcessor(ResizedByPillow, Qwen2_5_VLProcessor):  # pyright: ignore[reportIncompatibleMethodOverride]
    """The released processor without its video part, which needs torchvision."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None, **_: Any) -> None:
        super().__init__(image_processor, tokenizer, None, chat_template=chat_template)


CHAT_TEMPLATE = """\
{%- set seen = namespace(count=0) -%}
{%- for message in messages -%}
{%- if loop.first and message.role != 'system' -%}
{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}
{%- set seen.count = seen.count + 1 -%}
{%- if add_vision_id -%}{{ 'Picture ' ~ seen.count ~ ': ' }}{%- endif -%}
{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- else -%}
{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
"""The released processor's chat format as a template. A VLM policy that uses it reads exactly the tokens that condition
the diffusion network, whichever template its files contain."""


@lru_cache
def template(task: Task) -> str:
    """The chat that the released model was trained on, from diffusers; {} stands for the images and the prompt.

    diffusers writes the one image of `edit` into the text; here it stands in front of the prompt, as in `edit_plus`.
    """
    absent: Any = None
    if task == "draw":
        return QwenImagePipeline(*[absent] * 5).prompt_template_encode
    kind: Any = QwenImageEditPipeline if task == "edit" else QwenImageEditPlusPipeline
    return kind(*[absent] * 6).prompt_template_encode.replace(SEEN, "")


def chat(task: Task, prompt: str, pictures: int = 0) -> str:
    """A prompt and its images in the template of a task."""
    seen = "".join(f"Picture {i + 1}: {SEEN}" for i in range(pictures)) if task == "edit_plus" else SEEN * pictures
    return template(task).replace("{}", seen + prompt)


def system_text(task: Task) -> str:
    """System message in the chat of a task."""
    return template(task).partition("<|im_start|>system\n")[2].partition("<|im_end|>")[0]


def prefix_length(tokenizer: Any, task: Task) -> int:
    """Tokens of the chat that are cut off: the system part and the mark of the user.

    Raises:
        ModelFilesError: a tokenizer of the released size that counts them differently.
    """
    before, mark, _ = template(task).partition(USER)
    count = len(tokenizer(before + mark).input_ids)
    if len(tokenizer) > 100_000 and count != PREFIX[task]:  # the released one
        raise ModelFilesError(f"tokenizer/: {count} tokens before the prompt instead of {PREFIX[task]}; copy it anew")
    return count


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout and gradients; what was in training mode is again afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


@dataclass(frozen=True)
class ChatStates(PromptReader):
    """A prompt and images in the chat of a task -> states of the vision-language model after the system part.

    Attributes:
        model: its weights may be in training and have adapters; encoding is done without dropout and gradients.
        tokenizer: for text without images.
        processor: for text with images; None where the task has none.
        length: tokens kept at most, including images and the end of the chat.
    """

    model: Any  # Qwen2_5_VLForConditionalGeneration
    tokenizer: Any
    processor: Any  # ImageTextProcessor
    task: Task
    length: int

    def __call__(self, prompt: str, pictures: Sequence[Image] = ()) -> Tensor:
        """States [L, D] on the model's device.

        Raises:
            ValueError: the images alone take more tokens than are kept.
        """
        inputs, drop = self._inputs(prompt, pictures)
        with evaluating(self.model):
            on_device = {name: value.to(self.model.device) for name, value in inputs.items()}
            return self.model.model(**on_device).last_hidden_state[0, drop:]

    def counts(self, prompts: Sequence[str], images: Sequence[int] = (), *, closed: bool = True) -> list[int]:
        """See `PromptReader`; images and the end of the chat are never cut."""
        more = sum(images) - len(images) - prefix_length(self.tokenizer, self.task)
        chats = [chat(self.task, prompt, len(images)) for prompt in prompts]
        return [tokens + more for tokens in token_counts(self.tokenizer, chats)]

    def kept(self, prompt: str, pictures: Sequence[Image] = ()) -> int:
        """L of the states."""
        inputs, drop = self._inputs(prompt, pictures)
        return inputs["input_ids"].shape[1] - drop

    def _inputs(self, prompt: str, pictures: Sequence[Image]) -> tuple[dict[str, Tensor], int]:
        """The model's inputs of one row without padding, and the number of states to cut off in front."""
        text = chat(self.task, prompt, len(pictures))
        if pictures:
            inputs = dict(self.processor(text=[text], images=list(pictures), return_tensors="pt"))
        else:
            inputs = dict(self.tokenizer([text], return_tensors="pt"))
        drop = prefix_length(self.tokenizer, self.task)
        return self._shortened(inputs, drop, prompt), drop

    def _shortened(self, inputs: dict[str, Tensor], drop: int, prompt: str) -> dict[str, Tensor]:
        """Cut the last tokens of a prompt that is too long; images and the end of the chat stay."""
        ids = inputs["input_ids"]
        over = ids.shape[1] - drop - self.length
        if over <= 0:
            return inputs
        tail = len(self.tokenizer(template(self.task).partition("{}")[2]).input_ids)
        words = len(self.tokenizer(prompt, verbose=False).input_ids)
        if over > words:
            raise ValueError(
                f"the images and the chat around a prompt take {ids.shape[1] - drop - words} tokens, but "
                f"model.max_sequence_length is {self.length}; raise it, or give the text encoder smaller images "
                "(model.vision_pixels)"
            )
        return without_tokens_before(inputs, tail, over)


@dataclass(frozen=True)
class Shown:
    """A prompt and its images in the text encoder; equal if all are."""

    prompt: str
    digests: tuple[bytes, ...]
    images: tuple[Image, ...] = field(compare=False, repr=False)

    @classmethod
    def of(cls, prompt: str, images: Sequence[Image]) -> Shown:
        pixels = tuple(image.convert("RGB") for image in images)
        return cls(prompt, tuple(hashlib.sha256(repr(p.size).encode() + p.tobytes()).digest() for p in pixels), pixels)


def without_tokens_before(inputs: Mapping[str, Tensor], tail: int, count: int) -> dict[str, Tensor]:
    """Inputs of a text encoder for one row [1, L], without the `count` tokens before the last `tail`."""
    ids = inputs["input_ids"]
    end = ids.shape[1] - tail
    return {
        name: torch.cat([value[:, : end - count], value[:, end:]], 1) if value.shape == ids.shape else value
        for name, value in inputs.items()
    }


def chat_encoders(chat: ChatStates, read: Callable[[Any], tuple[str, Sequence[Image]]]) -> Mapping[str, Encoding]:
    """`text` [B, S, D] and `text_mask` [B, S] of the conditions of a family: states of chats, padded to one length, and
    which of them are no padding.

    Args:
        read: the prompt and the images of a stored one.
    """

    def states(texts: Sequence[Any]) -> Tensor:
        rows = [chat(*read(text)) for text in texts]
        return torch.stack([nn.functional.pad(row, (0, 0, 0, chat.length - len(row))) for row in rows])

    def mask(texts: Sequence[Any]) -> Tensor:
        counts = torch.tensor([[chat.kept(*read(text))] for text in texts], dtype=torch.int64)
        return (torch.arange(chat.length, dtype=torch.int64) < counts).float()

    return {"text": Encoding(chat, states), "text_mask": Encoding(chat, mask)}
