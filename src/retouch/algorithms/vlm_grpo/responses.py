"""Completions of a vision-language model, and the text states of exactly the tokens that it read and generated.

Completions are never decoded and tokenized again: other tokens of the same text would condition the image on tokens
that the policy did not generate. Images keep all outputs of the processor, including positions.

Legend: B completions, P prompt tokens, C completion tokens, S kept states, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from PIL.Image import Image
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.configuration_utils import GenerationMode

from retouch.errors import Diverged, ResponseTooLong
from retouch.families.qwen.text import CHAT_TEMPLATE, Task, evaluating, system_text
from retouch.types import Example

if TYPE_CHECKING:
    from retouch.algorithms.vlm_grpo.run import VlmRun


@dataclass(frozen=True)
class Responses:
    """Token ids of prompts and their completions, without padding.

    Attributes:
        prompt_ids: P ids of each of B prompts, image pads included.
        completion_ids: C ids of each; they include the end-of-turn token where one was generated.
        fields: the processor's outputs other than the ids: a list [P] of each row for values per token
            (`mm_token_type_ids`), a tensor for values per image (`image_grid_thw` [images, 3]) or per patch
            (`pixel_values` [patches, ...]).
        image_counts: number of images of each prompt.
    """

    prompt_ids: Sequence[Sequence[int]]
    completion_ids: Sequence[Sequence[int]]
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])
    image_counts: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.prompt_ids)

    def rows(self, start: int, stop: int) -> Responses:
        """Completions start ... stop - 1 with their images."""
        counts = list(self.image_counts) or [0] * len(self)
        first, last = sum(counts[:start]), sum(counts[:stop])
        grid = self.fields.get("image_grid_thw")
        patches: list[int] = [] if grid is None else torch.as_tensor(grid, dtype=torch.int64).prod(-1).tolist()
        cut: dict[str, Any] = {}
        for name, value in self.fields.items():
            if isinstance(value, list):
                cut[name] = value[start:stop]
            elif len(value) == len(patches):
                cut[name] = value[first:last]
            else:
                cut[name] = value[sum(patches[:first]) : sum(patches[:last])]
        return Responses(self.prompt_ids[start:stop], self.completion_ids[start:stop], cut, counts[start:stop])


# --- prompts ---


def prepare_processor(processor: Any) -> None:
    """Give a processor the chat of the diffusion model and left padding: right padding would misalign images in a batch
    (trl issue 5785)."""
    tokenizer = tokenizer_of(processor)
    tokenizer.padding_side = tokenizer.truncation_side = "left"
    processor.chat_template = tokenizer.chat_template = CHAT_TEMPLATE


def tokenizer_of(processor: Any) -> Any:
    """The tokenizer of a processor, which may be a tokenizer itself."""
    return getattr(processor, "tokenizer", processor)


def chat_messages(task: Task, text: str) -> list[dict[str, Any]]:
    """The chat of a task with `text` as the user's message."""
    return [{"role": "system", "content": system_text(task)}, {"role": "user", "content": text}]


def template_options(task: Task) -> dict[str, Any]:
    """Arguments of the chat template beside the messages."""
    return {"add_vision_id": True} if task == "edit_plus" else {}


def tokenize(
    processor: Any, task: Task, chats: Sequence[Sequence[dict[str, Any]]], images: Sequence[Sequence[Image]]
) -> Responses:
    """Tokenize chats with their images -> prompts with empty completions."""
    seen = any(images)
    tokens = processor.apply_chat_template(
        conversation=[
            _with_images(chat, shown) if seen else list(chat) for chat, shown in zip(chats, images, strict=True)
        ],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **template_options(task),
    )
    fields = {name: value for name, value in tokens.items() if name not in ("input_ids", "attention_mask")}
    prompt_ids = [list(row) for row in tokens["input_ids"]]
    return Responses(prompt_ids, [[] for _ in chats], fields if seen else {}, [len(shown) for shown in images])


def _with_images(messages: Sequence[dict[str, Any]], images: Sequence[Image]) -> list[dict[str, Any]]:
    """Messages in the processor's format, with the images in front of the user's text."""
    found: list[dict[str, Any]] = []
    for message in messages:
        shown = [{"type": "image", "image": image} for image in images] if message["role"] == "user" else []
        found.append({**message, "content": [*shown, {"type": "text", "text": message["content"]}]})
    return found


# --- completions ---


def generate_completions(
    policy: Any, run: VlmRun, examples: Sequence[Example], options: dict[str, Any], seeds: Sequence[int]
) -> Responses:
    """Sample a completion of each example from its own seed, without dropout. The global generators stay as they were,
    and up to rounding a completion does not depend on its batch.

    Args:
        policy: with whole weights, and able to `generate`.
        options: of transformers' GenerationConfig. Anything except plain sampling (`num_beams`) uses random numbers of
            the whole batch; examples are then completed one by one.
    """
    config, prompts, tokenizer = GenerationConfig(**options, disable_compile=True), run.prompts(examples), run.tokenizer
    ids: list[list[int]] = []
    with evaluating(policy):
        if config.get_generation_mode() == GenerationMode.SAMPLE:
            ids = _generate(policy, prompts, config, tokenizer, seeds)
        else:
            for i, seed in enumerate(seeds):
                with torch.random.fork_rng():
                    torch.manual_seed(seed)
                    ids += _generate(policy, prompts.rows(i, i + 1), config, tokenizer)
    return replace(prompts, completion_ids=ids)


def _generate(
    policy: Any, prompts: Responses, config: GenerationConfig, tokenizer: Any, seeds: Sequence[int] | None = None
) -> list[list[int]]:
    """Ids of each completion, up to and including the first token that ends a turn.

    Args:
        seeds: of each row; None uses the global generator.
    """
    device = next(policy.parameters()).device
    inputs = {n: v.to(device) for n, v in model_inputs(prompts, tokenizer.pad_token_id).items()}
    sampling = None if seeds is None else _sampling_with(seeds)
    with finite_probabilities():
        output = policy.generate(**inputs, generation_config=config, custom_generate=sampling)
    given: Any = config.eos_token_id
    ends = {given} if isinstance(given, int) else set(given or [tokenizer.eos_token_id])
    generated = [row[inputs["input_ids"].shape[1] :].tolist() for row in output]
    return [row[: next((i + 1 for i, token in enumerate(row) if token in ends), len(row))] for row in generated]


@contextmanager
def finite_probabilities() -> Iterator[None]:
    """Inside, completions are sampled.

    Raises:
        Diverged: the policy's probabilities are NaN or Inf.
    """
    try:
        yield
    except RuntimeError as error:
        if "probability tensor contains" not in str(error):
            raise
        raise Diverged(
            "the policy's token probabilities contain NaN or Inf; lower algorithm.trl.learning_rate and resume from a "
            "checkpoint before it diverged"
        ) from None


def _sampling_with(seeds: Sequence[int]) -> Callable[..., Any]:
    """Transformers' sampling for its `custom_generate`, with a generator for each row instead of one for the batch."""

    def sample(
        model: Any, input_ids: Tensor, logits_processor: Any, generation_config: GenerationConfig, **inputs: Any
    ) -> Any:
        generators = [torch.Generator(input_ids.device).manual_seed(seed) for seed in seeds]

        def one_token(ids: Tensor, scores: Tensor) -> Tensor:
            """[B, S], [B, V] -> [B, V], -inf except for the sampled token of each row."""
            odds = logits_processor(ids, scores).softmax(-1)
            tokens = [torch.multinomial(row, 1, generator=g) for row, g in zip(odds, generators, strict=True)]
            return torch.full_like(scores, -torch.inf).scatter_(1, torch.stack(tokens), 0.0)

        generation_config.do_sample = False
        return model._sample(input_ids, logits_processor=one_token, generation_config=generation_config, **inputs)

    return sample


# --- text states ---


def encode_response(
    model: Any,  # Qwen2_5_VLForConditionalGeneration, with or without a PEFT adapter in it
    responses: Responses,
    *,
    pad_token_id: int,
    drop: int,
    limit: int | None = None,
    truncate: bool = False,
    batch_size: int = 8,
    adapter: bool = True,
) -> tuple[list[Tensor], list[bool]]:
    """States of the last layer of prompt and completion, without the system part -> ([S, D] and truncated, of each).

    One forward over the ids as they are, left-padded as for generation, in eval mode, without gradient. The padding is
    cut off by its count, and then the `drop` tokens of the system part.

    Args:
        drop: tokens of the chat before the user's (`prefix_length`).
        limit: maximum number of states of a row; None for no limit.
        truncate: cut the last states off instead of raising an error.
        adapter: False runs the model without its adapter.

    Raises:
        ResponseTooLong: more states than `limit` without `truncate`.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    device = next(model.parameters()).device
    states: list[Tensor] = []
    truncated: list[bool] = []
    with evaluating(model), nullcontext() if adapter or base is model else model.disable_adapter():
        for start in range(0, len(responses), batch_size):
            part = responses.rows(start, start + batch_size)
            inputs = {name: value.to(device) for name, value in model_inputs(part, pad_token_id).items()}
            hidden: Tensor = base.model(**inputs, use_cache=False).last_hidden_state
            lengths = inputs["attention_mask"].sum(1).tolist()
            for row, length in zip(hidden, lengths, strict=True):
                kept = row[len(row) - length + drop :]
                truncated.append(limit is not None and len(kept) > limit)
                if truncated[-1]:
                    if not truncate:
                        raise ResponseTooLong(
                            f"a prompt and its completion give {len(kept)} text states, but model.max_sequence_length "
                            f"is {limit}; raise it, lower algorithm.trl.max_completion_length, or set "
                            "algorithm.on_overflow=truncate"
                        )
                    kept = kept[:limit]
                states.append(kept.detach().clone())
    return states, truncated


def model_inputs(responses: Responses, pad_token_id: int) -> dict[str, Tensor]:
    """The model's inputs for prompt and completion, padded on the left."""
    ids = [[*p, *c] for p, c in zip(responses.prompt_ids, responses.completion_ids, strict=True)]
    inputs = {"input_ids": _left(ids, pad_token_id), "attention_mask": _left([[1] * len(row) for row in ids], 0)}
    for name, value in responses.fields.items():
        if isinstance(value, list):  # by token of the prompt; tokens of the completion are text, which is 0
            full = [[*row, *[0] * len(c)] for row, c in zip(value, responses.completion_ids, strict=True)]
            inputs[name] = _left(full, 0)
        else:
            inputs[name] = torch.as_tensor(value)
    return inputs


def _left(rows: Sequence[Sequence[int]], pad: int) -> Tensor:
    """[B, longest] rows padded on the left."""
    longest = max(map(len, rows))
    return torch.tensor([[pad] * (longest - len(row)) + list(row) for row in rows], dtype=torch.int64)
