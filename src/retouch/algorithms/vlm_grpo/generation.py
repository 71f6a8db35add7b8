"""How a policy answers: as TRL has it draw completions, wherever it is asked.

Legend: B rows, S tokens so far, V words of the vocabulary.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, ProcessorMixin, Qwen2_5_VLProcessor
from transformers.generation.configuration_utils import GenerationMode
from transformers.utils.hub import cached_file

from retouch.algorithms.vlm_grpo.parts import (
    Parts,
    asked,
)
from retouch.algorithms.vlm_grpo.response import (
    Responses,
    model_inputs,
)
from retouch.algorithms.vlm_grpo.trl_fields import DRAWING
from retouch.families.loading import component_path
from retouch.families.qwen.text import (
    ImageTextProcessor,
    evaluating,
)
from retouch.types import Example


def generation_options(parts: Parts) -> dict[str, Any]:
    """Options of transformers' generation as TRL's trainer makes them of the run file: complete, so that nothing is
    left to the sampling that the model's own generation_config recommends."""
    trl, tokenizer = parts.algorithm.trl, parts.tokenizer
    options: dict[str, Any] = {
        "max_new_tokens": parts.algorithm.count("max_completion_length"),
        "do_sample": True,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": ends_of(parts),
        **{name: trl.get(name, default) for name, default in DRAWING.items()},
    }
    if isinstance(parts.processor, ProcessorMixin):  # a sampled picture would be one that is not there
        options["suppress_tokens"] = [parts.policy.config.image_token_id]
    given: Any = trl.get("generation_kwargs", {})
    return {**options, **(json.loads(given) if isinstance(given, str) else given)}


def ends_of(parts: Parts) -> list[int]:
    """Tokens that end an answer: the tokenizer's, and all that the model declares."""
    declared: Any = parts.policy.generation_config.eos_token_id
    ids: list[int] = [declared] if isinstance(declared, int) else list(declared or ())
    own = parts.tokenizer.eos_token_id
    return ids if own in ids else [own, *ids]


def speak(
    policy: Any, parts: Parts, examples: Sequence[Example], options: dict[str, Any], seeds: Sequence[int]
) -> Responses:
    """Answers of the policy to examples, without dropout, each drawn from a seed of its own; the caller's randomness
    goes on as it was. But for rounding an answer does not depend on what it is batched with.

    Args:
        policy: with its weights at hand, and able to `generate`.
        options: of transformers' GenerationConfig. Anything but plain sampling (`num_beams`) draws for all rows at
            once, and is asked row by row.
    """
    prompts = asked(
        parts.processor,
        parts.task,
        [parts.messages(example) for example in examples],
        [parts.shown(example) for example in examples],
    )
    config = GenerationConfig(**options, disable_compile=True)
    said: list[list[int]] = []
    with evaluating(policy):
        if config.get_generation_mode() == GenerationMode.SAMPLE:
            said = _completions(policy, parts, prompts, config, seeds)
        else:
            for i, seed in enumerate(seeds):
                with torch.random.fork_rng():
                    torch.manual_seed(seed)
                    said += _completions(policy, parts, prompts.rows(i, i + 1), config)
    return replace(prompts, completion_ids=said)


def _completions(
    policy: Any, parts: Parts, prompts: Responses, config: GenerationConfig, seeds: Sequence[int] | None = None
) -> list[list[int]]:
    """Ids of each answer, up to and including the first that ends a turn.

    Args:
        seeds: of each row; None draws from the process's generator.
    """
    device = next(policy.parameters()).device
    inputs = {n: v.to(device) for n, v in model_inputs(prompts, parts.tokenizer.pad_token_id).items()}
    apart = None if seeds is None else _drawing_apart(seeds)
    output = policy.generate(**inputs, generation_config=config, custom_generate=apart)
    given: Any = config.eos_token_id
    ends = {given} if isinstance(given, int) else set(given or [parts.tokenizer.eos_token_id])
    return [_until(row[inputs["input_ids"].shape[1] :].tolist(), ends) for row in output]


def _until(ids: list[int], ends: set[int]) -> list[int]:
    stop = next((i + 1 for i, token in enumerate(ids) if token in ends), len(ids))
    return ids[:stop]


def _drawing_apart(seeds: Sequence[int]) -> Callable[..., Any]:
    """Transformers' sampling for its `custom_generate`, with a generator for each row in place of one for the batch."""

    def sample(
        model: Any, input_ids: Tensor, logits_processor: Any, generation_config: GenerationConfig, **inputs: Any
    ) -> Any:
        generators = [torch.Generator(input_ids.device).manual_seed(seed) for seed in seeds]

        def drawn(ids: Tensor, scores: Tensor) -> Tensor:
            """[B, S], [B, V] -> [B, V] that leave a token of each row."""
            odds = logits_processor(ids, scores).softmax(-1)
            tokens = [torch.multinomial(row, 1, generator=g) for row, g in zip(odds, generators, strict=True)]
            return torch.full_like(scores, -torch.inf).scatter_(1, torch.stack(tokens), 0.0)

        generation_config.do_sample = False
        return model._sample(input_ids, logits_processor=drawn, generation_config=generation_config, **inputs)

    return sample


def name_for_vllm(parts: Parts) -> None:
    """Give the policy a name by which vLLM can load it, as TRL tells it no more. A pipeline keeps weights and processor
    apart: here they are in one folder of the run directory, the weights as links. The first process writes; the others
    must wait for it."""
    folder = parts.dir.path / "vllm"
    if parts.dir.main:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        path = component_path(parts.config.model.path, parts.config.model.family)
        found: Any = cached_file(path, "config.json", subfolder="text_encoder")
        parts.processor.save_pretrained(folder)  # before the links, through which it would write into the model
        written = {file.name for file in folder.iterdir()}
        for file in Path(found).parent.iterdir():
            if file.name not in written:
                (folder / file.name).symlink_to(file.resolve())
        for file in folder.glob("*_config.json"):  # the stock class by its name, which is all that others know
            text = file.read_text(encoding="utf-8")
            if ImageTextProcessor.__name__ in text and not file.is_symlink():
                file.write_text(
                    text.replace(ImageTextProcessor.__name__, Qwen2_5_VLProcessor.__name__), encoding="utf-8"
                )
    parts.policy.name_or_path = parts.policy.config.name_or_path = str(folder)
