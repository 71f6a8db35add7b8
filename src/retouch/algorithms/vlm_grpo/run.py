"""Build the parts of a run of vlm_grpo: policy and processor, frozen diffusion model, data, rewards, run directory.

Nothing here imports trl.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from torch.utils.data import Sampler
from transformers import (
    AutoTokenizer,
    ProcessorMixin,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessorPil,
)
from transformers.utils.hub import cached_file

from retouch.algorithms.vlm_grpo.config import VlmDerived, VlmGrpoConfig
from retouch.algorithms.vlm_grpo.images import freeze
from retouch.algorithms.vlm_grpo.responses import Responses, chat_messages, prepare_processor, tokenize, tokenizer_of
from retouch.algorithms.vlm_grpo.trl_options import SAMPLING
from retouch.config import ConfigError, RunConfig
from retouch.config.needs import needed_pictures
from retouch.data.dataset import Dataset, load_dataset
from retouch.data.rules import require_held_out, require_more_images
from retouch.data.texts import require_texts_of
from retouch.engine import Launched
from retouch.engine.speed import choose_kernels
from retouch.families.loading import DTYPES, component_path, load_component, load_model, reading_variant
from retouch.families.prompts import PromptCheck
from retouch.families.qwen.base import QwenModel
from retouch.families.qwen.text import ImageTextProcessor, Task, prefix_length
from retouch.observe import RunDir, Stopwatch
from retouch.observe.timing import stopwatch
from retouch.rewards.table import RewardTable
from retouch.training.beginning import require_can_begin
from retouch.types import Example


@dataclass
class VlmRun:
    """The parts of a run.

    Attributes:
        policy: the text encoder, which is trained. During training it is the trainer's, with its adapter.
        processor: tokenizer, or processor of text and images.
        drop: tokens of the chat before the user's.
        diffusion_model: the frozen diffusion model with its autoencoder, without a text encoder.
    """

    config: RunConfig
    algorithm: VlmGrpoConfig
    derived: VlmDerived
    policy: Any
    processor: Any
    task: Task
    drop: int
    diffusion_model: QwenModel
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
        return self.config.guidance_scale

    @property
    def end_tokens(self) -> list[int]:
        """Ids that end a completion: the tokenizer's, and all that the model declares."""
        declared: Any = self.policy.generation_config.eos_token_id
        ids: list[int] = [declared] if isinstance(declared, int) else list(declared or ())
        own = self.tokenizer.eos_token_id
        return ids if own in ids else [own, *ids]

    @property
    def generation_options(self) -> dict[str, Any]:
        """Options of transformers' generation as TRL's trainer derives them from the run file. Every option is set, so
        that the sampling recommended by the model's own generation_config has no effect."""
        trl, tokenizer = self.algorithm.trl, self.tokenizer
        options: dict[str, Any] = {
            "max_new_tokens": self.algorithm.count("max_completion_length"),
            "do_sample": True,
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": self.end_tokens,
            **{name: trl.get(name, default) for name, default in SAMPLING.items()},
        }
        if isinstance(self.processor, ProcessorMixin):  # an image token in a completion would have no image
            options["suppress_tokens"] = [self.policy.config.image_token_id]
        given: Any = trl.get("generation_kwargs", {})
        return {**options, **(json.loads(given) if isinstance(given, str) else given)}

    def messages(self, example: Example) -> list[dict[str, Any]]:
        """The chat that the policy completes; its images are added when it is tokenized."""
        return chat_messages(self.task, example.prompt)

    def shown(self, example: Example) -> list[Image]:
        """The images of an example that the policy reads, at their final size."""
        if example.source is None or not hasattr(self.diffusion_model, "shown"):
            return []
        sources = (example.source, *example.more_images)
        return [self.diffusion_model.shown(source) for source in sources]  # type: ignore[attr-defined]

    def prompts(self, examples: Sequence[Example], texts: Sequence[str] | None = None) -> Responses:
        """Tokenized chats of examples with empty completions.

        Args:
            texts: replace the examples' prompts.
        """
        chats = [chat_messages(self.task, text) for text in texts or [example.prompt for example in examples]]
        return tokenize(self.processor, self.task, chats, [self.shown(example) for example in examples])

    def close(self) -> None:
        self.rewards.close()
        self.dir.close()


def build_run(config: RunConfig, device: Any, world_size: int, *, main: bool) -> VlmRun:
    """Load data, connect rewards, load the networks. Steps that are cheap and may fail come first.

    Raises:
        ConfigError, DataError, ModelFilesError: one message each, with the remedy.
    """
    algorithm = config.algorithm
    assert isinstance(algorithm, VlmGrpoConfig)
    derived = algorithm.derive(config, world_size)
    needs = needed_pictures(config, training=False)
    load = partial(load_dataset, needs=needs, processes=Launched(), check_prompts=PromptCheck(config))
    section = config.evaluation.data
    data, held_out = load(config.data, "data"), load(section, "evaluation.data") if section else None
    named = {"data": data.items, **({"evaluation.data": held_out.items} if held_out else {})}
    with_source = [item.id for items in named.values() for item in items if item.source_path is not None]
    if with_source and not config.model.spec.edits:
        raise ConfigError(
            f"data: example {with_source[0]} has a source image, but under vlm_grpo {config.model.family} generates "
            "from text alone; leave source images out, or set model.family=qwen_image_edit"
        )
    for name, items in named.items():
        require_more_images(config, name, items)
    require_texts_of(config, named)
    run_dir = RunDir(config, main=main)
    require_can_begin(config, run_dir)
    run_dir.require_sinks()
    rewards = RewardTable(config.rewards, config.reward_client, run_dir.path, str(device))
    apart = require_held_out(config, held_out, data)
    choose_kernels(torch.device(device), config.training)
    clock = stopwatch(torch.device(device).type)
    return run_with_networks(
        config, device, derived, data, (held_out or data).each_once, rewards, run_dir, clock, apart
    )


def run_with_networks(
    config: RunConfig,
    device: Any,
    derived: VlmDerived,
    data: Dataset,
    eval_data: Dataset,
    rewards: RewardTable,
    run_dir: RunDir,
    clock: Stopwatch,
    eval_is_held_out: bool = False,
    dtype: torch.dtype | None = None,
) -> VlmRun:
    """Load the networks of a run.

    Args:
        dtype: of the policy; None for that of training.

    Raises:
        ModelFilesError: a component is missing or of another class.
    """
    algorithm = config.algorithm
    assert isinstance(algorithm, VlmGrpoConfig)
    policy, processor, task = load_policy(config, dtype)
    return VlmRun(
        config=config,
        algorithm=algorithm,
        derived=derived,
        policy=policy,
        processor=processor,
        task=task,
        drop=prefix_length(tokenizer_of(processor), task),
        diffusion_model=load_diffusion_model(config, "cpu" if algorithm.offload_diffusion_model else device),
        data=data,
        eval_data=eval_data,
        eval_is_held_out=eval_is_held_out,
        rewards=rewards,
        dir=run_dir,
        clock=clock,
    )


def load_diffusion_model(config: RunConfig, device: Any) -> QwenModel:
    """The frozen diffusion model of a run file with its autoencoder, without a text encoder.

    Raises:
        ModelFilesError: a component is missing or of another class.
    """
    model: QwenModel = load_model(config.model, device, with_text=False)  # type: ignore[assignment]
    model.network.to(device)
    freeze(model)
    return model


def load_policy(config: RunConfig, dtype: torch.dtype | None = None) -> tuple[Any, Any, Task]:
    """The text encoder of a run file, its processor, and the task of its chat.

    Args:
        dtype: of its weights; None for that of training: fp32 for full fine-tuning, under an adapter `model.dtype`.

    Raises:
        ModelFilesError: a component is missing or of another class.
    """
    assert isinstance(config.algorithm, VlmGrpoConfig)
    path = component_path(config.model.path, config.model.family)
    if dtype is None:
        dtype = DTYPES[config.model.dtype] if config.algorithm.uses_adapter else torch.float32
    with reading_variant(config.model.weights_variant):
        policy = load_component(Qwen2_5_VLForConditionalGeneration, path, "text_encoder", dtype)
    # saved under the names of its files: under ZeRO-3 transformers would undo renamings that it never did
    policy._weight_conversions = None
    task: Task = getattr(config.model, "variant", "draw")
    if task == "draw":
        processor = load_component(AutoTokenizer, path, "tokenizer", None)
    else:
        processor = load_component(ImageTextProcessor, path, "processor", None)
    prepare_processor(processor)
    return policy, processor, task


def name_for_vllm(run: VlmRun) -> None:
    """Give the policy a name by which vLLM can load it, which is all that TRL passes on. A pipeline keeps weights and
    processor apart: the named folder of the run directory holds both, the weights as links. The first process writes
    it; the others must wait for it."""
    folder = run.dir.path / "vllm"
    if run.dir.main:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        path = component_path(run.config.model.path, run.config.model.family)
        found: Any = cached_file(path, "config.json", subfolder="text_encoder")
        _with_images(run).save_pretrained(folder)  # before the links, through which it would write into the model
        written = {file.name for file in folder.iterdir()}
        for file in Path(found).parent.iterdir():
            if file.name not in written:
                (folder / file.name).symlink_to(file.resolve())
        for file in folder.glob("*_config.json"):  # other programs know only the stock class
            text = file.read_text(encoding="utf-8")
            if ImageTextProcessor.__name__ in text and not file.is_symlink():
                stock = text.replace(ImageTextProcessor.__name__, Qwen2_5_VLProcessor.__name__)
                file.write_text(stock, encoding="utf-8")
    run.policy.name_or_path = run.policy.config.name_or_path = str(folder)


def _with_images(run: VlmRun) -> Any:
    """The run's processor. vLLM asks a vision-language model for one of images although `qwen_image` is given text
    alone: beside a tokenizer it is that of the released model, with the patches of the policy."""
    if isinstance(run.processor, ProcessorMixin):
        return run.processor
    vision = run.policy.config.vision_config
    images = Qwen2VLImageProcessorPil(
        patch_size=vision.patch_size,
        temporal_patch_size=vision.temporal_patch_size,
        merge_size=vision.spatial_merge_size,
        min_pixels=56 * 56,
        max_pixels=3584 * 3584,
    )
    return ImageTextProcessor(images, run.processor, run.processor.chat_template)


class PromptOrder(Sampler[int]):
    """Positions in the order that TRL expects, for the whole run in one pass: for each generation a block of distinct
    prompts, each repeated for its group, and the block repeated for every pass that trains on it.

    A run is one epoch of the trainer: on resume, the trainer skips the batches already trained.
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
    """Rows of the trainer's data set, from positions; examples are opened on demand and shared by their group."""

    def __init__(self, run: VlmRun) -> None:
        self.run = run
        keep = lru_cache(maxsize=2 * run.derived.global_prompts_per_generation)
        self.example = keep(run.data.__getitem__)
        self._shown = keep(lambda position: self.run.shown(self.example(position)))

    def __reduce__(self) -> Any:
        """datasets would pickle all of the run, policy included, for the name of a cache that nothing reads; after an
        error it takes a random one."""
        raise TypeError("rows of a run cannot be pickled")

    def __call__(self, batch: dict[str, list[int]]) -> dict[str, list[Any]]:
        positions = list(batch["position"])
        rows: dict[str, list[Any]] = {
            "position": positions,
            "prompt": [self.run.messages(self.example(position)) for position in positions],
        }
        if self.run.task != "draw":
            rows["images"] = [self._shown(position) for position in positions]
        return rows
