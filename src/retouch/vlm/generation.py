"""How a policy answers: as TRL has it draw completions, wherever it is asked."""

from __future__ import annotations

import json
from typing import Any

from transformers import ProcessorMixin

from retouch.config.trl_fields import DRAWING
from retouch.vlm.parts import Parts


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
