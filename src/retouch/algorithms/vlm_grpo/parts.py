"""What a run of vlm_grpo is made of: the policy and its processor, who draws, who judges, prompts in their order.

Nothing here imports trl.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from PIL.Image import Image
from torch.utils.data import Sampler
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

from retouch.algorithms.vlm_grpo.config import VlmGrpoConfig
from retouch.algorithms.vlm_grpo.drawing import freeze
from retouch.algorithms.vlm_grpo.response import Responses
from retouch.algorithms.vlm_grpo.rules import (
    VlmDerived,
    derive_vlm,
)
from retouch.config import ConfigError, RunConfig
from retouch.config.needs import needed_pictures
from retouch.data.dataset import Dataset, load_dataset
from retouch.data.identity import trained_on
from retouch.engine import Launched
from retouch.engine.speed import choose_kernels
from retouch.families.facts import FACTS
from retouch.families.loading import (
    DTYPES,
    component_path,
    load_component,
)
from retouch.families.qwen.base import QwenModel
from retouch.families.qwen.text import (
    CHAT_TEMPLATE,
    ImageTextProcessor,
    Task,
    prefix_length,
    system_text,
)
from retouch.families.registry import family_class
from retouch.families.vae import save_memory
from retouch.observe import RunDir, Stopwatch
from retouch.observe.timing import stopwatch
from retouch.rewards.table import RewardTable
from retouch.texts import require_texts_of
from retouch.training.build import can_begin
from retouch.types import Example

logger = logging.getLogger(__name__)


@dataclass
class Parts:
    """Everything that a run works with.

    Attributes:
        policy: the text encoder; what is trained. In training the trainer's, with its adapter.
        processor: of text, or of text with pictures.
        drop: tokens of the chat before the user's.
        painter: the frozen diffusion network and autoencoder.
    """

    config: RunConfig
    algorithm: VlmGrpoConfig
    derived: VlmDerived
    policy: Any
    processor: Any
    task: Task
    drop: int
    painter: QwenModel
    data: Dataset
    eval_data: Dataset
    eval_is_held_out: bool
    rewards: RewardTable
    dir: RunDir
    clock: Stopwatch

    @property
    def tokenizer(self) -> Any:
        return tokenizer_of(self.processor)

    @property
    def guidance_scale(self) -> float:
        given = self.config.rollout.guidance_scale
        return self.painter.spec.guidance_scale if given is None else given

    def messages(self, example: Example) -> list[dict[str, Any]]:
        """The chat that the policy answers; pictures are added by whoever tokenises it."""
        return chat_messages(self.task, example.prompt)

    def shown(self, example: Example) -> list[Image]:
        """What the policy sees of an example's pictures, at its final size."""
        if example.source is None or not hasattr(self.painter, "shown"):
            return []
        return [self.painter.shown(example.source)]  # type: ignore[attr-defined]

    def close(self) -> None:
        self.rewards.close()
        self.dir.close()


def build_parts(config: RunConfig, device: Any, world_size: int, *, main: bool) -> Parts:
    """Load data, connect rewards, load the networks. Cheap things that may fail come first.

    Raises:
        ConfigError, DataError, ModelFilesError: one message each that says what to do.
    """
    algorithm = config.algorithm
    assert isinstance(algorithm, VlmGrpoConfig)
    derived = derive_vlm(config, algorithm, world_size)
    needs = needed_pictures(config, training=False)
    data = load_dataset(config.data, "data", needs, Launched())
    section = config.evaluation.data
    held_out = load_dataset(section, "evaluation.data", needs, Launched()) if section else None
    _draws_from_text(config, data, held_out)
    require_texts_of(config, {"data": data.items, **({"evaluation.data": held_out.items} if held_out else {})})
    run_dir = RunDir(config, main=main)
    can_begin(config, run_dir)
    run_dir.require_sinks()
    rewards = RewardTable(config.rewards, config.reward_client, run_dir.path, str(device))
    asked = {item.prompt for item in data.items}  # of an edit it is picture and instruction that are learnt together
    seen = held_out is not None and any(item.prompt in asked for item in trained_on(held_out, data))
    if seen and not config.evaluation.allow_overlap:
        raise ConfigError(
            "evaluation.data: some examples are trained on: data holds the same picture with the same prompt; divide "
            "the data with `retouch data split`, or set evaluation.allow_overlap=true"
        )
    choose_kernels(torch.device(device), config.training)
    policy, processor, task = load_policy(config)
    return Parts(
        config=config,
        algorithm=algorithm,
        derived=derived,
        policy=policy,
        processor=processor,
        task=task,
        drop=prefix_length(tokenizer_of(processor), task),
        painter=load_painter(config, "cpu" if algorithm.offload_painter else device),
        data=data,
        eval_data=held_out or data,
        eval_is_held_out=held_out is not None and not seen,
        rewards=rewards,
        dir=run_dir,
        clock=stopwatch(torch.device(device).type),
    )


def load_painter(config: RunConfig, device: Any) -> QwenModel:
    """The frozen diffusion network and autoencoder of a run file, without a text encoder.

    Raises:
        ModelFilesError: a component is missing or of another class.
    """
    painter: QwenModel = family_class(config.model.family).from_config(config.model, device, with_text=False)
    painter.network.to(device)
    save_memory(painter.vae, config.model, painter.device)
    freeze(painter)
    return painter


def _draws_from_text(config: RunConfig, *given: Dataset | None) -> None:
    """Refuse pictures that nobody would look at."""
    pictured = [item for data in given if data is not None for item in data.items if item.source_path is not None]
    if pictured and not FACTS[config.model.family].edits:
        raise ConfigError(
            f"data: example {pictured[0].id} has a picture, but under vlm_grpo {config.model.family} draws from text "
            "alone; name examples without pictures, or set model.family=qwen_image_edit"
        )


def load_policy(config: RunConfig) -> tuple[Any, Any, Task]:
    """The text encoder of a run file with its processor, and the chat that it is asked in.

    All weights are fp32 where all are trained; under an adapter they are as `model.dtype` says.

    Raises:
        ModelFilesError: a component is missing or of another class.
    """
    assert isinstance(config.algorithm, VlmGrpoConfig)
    path = component_path(config.model.path, config.model.family)
    dtype = DTYPES[config.model.dtype] if config.algorithm.uses_adapter else torch.float32
    policy = load_component(Qwen2_5_VLForConditionalGeneration, path, "text_encoder", dtype)
    # as published when it is saved: under ZeRO-3 transformers would undo renamings that it never did
    policy._weight_conversions = None
    task: Task = getattr(config.model, "variant", "draw")
    if task == "draw":
        processor = load_component(AutoTokenizer, path, "tokenizer", None)
    else:
        processor = load_component(ImageTextProcessor, path, "processor", None)
    prepare_processor(processor)
    return policy, processor, task


def prepare_processor(processor: Any) -> None:
    """The chat of the diffusion model, padded on the left: right padding would misalign pictures in a batch (trl
    issue 5785)."""
    tokenizer = tokenizer_of(processor)
    tokenizer.padding_side = tokenizer.truncation_side = "left"
    processor.chat_template = tokenizer.chat_template = CHAT_TEMPLATE


def tokenizer_of(processor: Any) -> Any:
    """The tokenizer of a processor, which may be one itself."""
    return getattr(processor, "tokenizer", processor)


def chat_messages(task: Task, text: str) -> list[dict[str, Any]]:
    """Text in the chat of a task."""
    return [{"role": "system", "content": system_text(task)}, {"role": "user", "content": text}]


def template_options(task: Task) -> dict[str, Any]:
    """What the chat template is told besides the messages."""
    return {"add_vision_id": True} if task == "edit_plus" else {}


def with_pictures(messages: Sequence[dict[str, Any]], pictures: Sequence[Image]) -> list[dict[str, Any]]:
    """The messages as a processor takes them: pictures in front of the user's words."""
    parts: list[dict[str, Any]] = []
    for message in messages:
        seen = [{"type": "image", "image": p} for p in pictures] if message["role"] == "user" else []
        parts.append({**message, "content": [*seen, {"type": "text", "text": message["content"]}]})
    return parts


def asked(
    processor: Any, task: Task, chats: Sequence[Sequence[dict[str, Any]]], pictures: Sequence[Sequence[Image]]
) -> Responses:
    """Chats that nobody has answered yet, tokenised."""
    pairs = zip(chats, pictures, strict=True)
    seen = any(pictures)
    conversations = [with_pictures(chat, shown) if seen else list(chat) for chat, shown in pairs]
    tokens = processor.apply_chat_template(
        conversation=conversations,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **template_options(task),
    )
    fields = {name: value for name, value in tokens.items() if name not in ("input_ids", "attention_mask")}
    return Responses(
        [list(row) for row in tokens["input_ids"]],
        [[] for _ in chats],
        fields if seen else {},
        [len(shown) for shown in pictures],
    )


class PromptOrder(Sampler[int]):
    """Positions as TRL wants them, for the whole run in one pass: for each generation a block of different prompts,
    each repeated for its group, the block repeated for every pass that trains on it.

    A run is one epoch of the trainer, so that resuming is skipping.
    """

    def __init__(self, order: Sequence[int], prompts: int, group: int, repeats: int, generations: int) -> None:
        self.order = order
        self.prompts, self.group, self.repeats, self.generations = prompts, group, repeats, generations

    def __len__(self) -> int:
        return self.generations * self.repeats * self.prompts * self.group

    def __iter__(self) -> Iterator[int]:
        for number in range(self.generations):
            block = self.order[number * self.prompts : (number + 1) * self.prompts]
            for _ in range(self.repeats):
                yield from (position for position in block for _ in range(self.group))


class Rows:
    """Examples as rows of the trainer's data set, opened when they are asked for and shared by their group."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        keep = lru_cache(maxsize=2 * parts.derived.global_prompts_per_generation)
        self.example = keep(parts.data.__getitem__)
        self._shown = keep(lambda position: self.parts.shown(self.example(position)))

    def __call__(self, batch: dict[str, list[int]]) -> dict[str, list[Any]]:
        examples = [self.example(position) for position in batch["position"]]
        rows: dict[str, list[Any]] = {
            "position": list(batch["position"]),
            "prompt": [self.parts.messages(example) for example in examples],
        }
        if self.parts.task != "draw":
            rows["images"] = [self._shown(position) for position in batch["position"]]
        return rows
