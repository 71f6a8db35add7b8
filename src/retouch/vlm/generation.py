"""How a policy answers: as TRL has it draw completions, wherever it is asked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from transformers import ProcessorMixin, Qwen2_5_VLProcessor
from transformers.utils.hub import cached_file

from retouch.config.trl_fields import DRAWING
from retouch.models.loading import component_path
from retouch.models.qwen_text import ImageTextProcessor
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
