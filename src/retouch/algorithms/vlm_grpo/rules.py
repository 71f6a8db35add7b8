"""What a run of vlm_grpo amounts to, and combinations of it that cannot work."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from retouch.config.base import Section
from retouch.config.errors import ConfigError
from retouch.config.needs import data_sections
from retouch.families.facts import FACTS

if TYPE_CHECKING:
    from retouch.algorithms.vlm_grpo.config import VlmGrpoConfig
    from retouch.config.run import RunConfig

FAMILIES = ("qwen_image", "qwen_image_edit")
"""Families whose text encoder is a vision-language model."""

ROLLOUT_KEYS = ("num_steps", "guidance_scale", "batch_size_per_device")
"""Of `rollout`, what drawing reads; the rest is of the diffusion network's own rollouts."""


@dataclass(frozen=True)
class VlmDerived:
    """What a run of vlm_grpo amounts to on `world_size` processes.

    Attributes:
        global_completions_per_step: what one optimizer step sees: the effective batch.
        global_completions_per_generation: what is generated, drawn and scored at once.
        global_prompts_per_generation: different prompts among them.
        images_per_generation_per_device: pictures that a device draws for them.
        optimizer_steps_per_generation: after so many, generation and optimizer steps meet again: the cycle. Checkpoints
            lie between cycles only, because TRL does not keep completions that are still to be trained on.
        forwards_per_image: of the frozen diffusion network; guidance doubles them.
    """

    world_size: int
    global_completions_per_step: int
    global_completions_per_generation: int
    global_prompts_per_generation: int
    images_per_generation_per_device: int
    optimizer_steps_per_generation: int
    generations: int
    forwards_per_image: float

    def as_dict(self) -> dict[str, int | float]:
        return asdict(self)


def derive_vlm(run: RunConfig, algorithm: VlmGrpoConfig, world_size: int = 1) -> VlmDerived:
    """Compute the numbers of a run.

    Raises:
        ConfigError: batches that TRL could not split into groups on this many processes.
    """
    if world_size < 1:
        raise ConfigError(f"--world-size: given {world_size}; it is the number of processes, at least 1")
    per_pass = algorithm.count("per_device_train_batch_size") * world_size
    accumulation, group = algorithm.count("gradient_accumulation_steps"), algorithm.count("num_generations")
    generated = _generation_batch(algorithm, per_pass)
    if generated % group:
        raise ConfigError(
            f"algorithm.trl.num_generations: given {group}, but {generated} completions are generated at once "
            f"(per_device_train_batch_size x processes x steps_per_generation = {per_pass} x {generated // per_pass}); "
            f"set steps_per_generation so that {group} divides them, for example "
            f"{math.lcm(per_pass, group) // per_pass}"
        )
    used = generated // per_pass * algorithm.count("num_iterations")
    cycle = math.lcm(used, accumulation) // accumulation
    every = run.training.checkpoint_every
    if every % cycle:
        raise ConfigError(
            f"training.checkpoint_every: given {every}, but completions are generated every {cycle} optimizer steps "
            "(steps_per_generation x num_iterations / gradient_accumulation_steps), and a checkpoint between would "
            f"lose what is still to be trained on; set a multiple of {cycle}, such as "
            f"{max(cycle, every // cycle * cycle)}"
        )
    steps = run.training.max_steps
    if steps % cycle:
        raise ConfigError(
            f"training.max_steps: given {steps}, but completions are generated every {cycle} optimizer steps, and the "
            f"run would end with some that are still to be trained on; set a multiple of {cycle}, such as "
            f"{max(cycle, steps // cycle * cycle)}"
        )
    scale = FACTS[run.model.family].guidance_scale if run.rollout.guidance_scale is None else run.rollout.guidance_scale
    return VlmDerived(
        world_size=world_size,
        global_completions_per_step=per_pass * accumulation,
        global_completions_per_generation=generated,
        global_prompts_per_generation=generated // group,
        images_per_generation_per_device=generated // world_size * algorithm.images_per_completion,
        optimizer_steps_per_generation=cycle,
        generations=steps * accumulation // used,
        forwards_per_image=float(run.rollout.num_steps * (2 if scale > 1 else 1)),
    )


def check_vlm(run: RunConfig, algorithm: VlmGrpoConfig) -> None:
    """Raise ValueError with *what you gave, what is allowed, what to set*."""
    if run.model.family not in FAMILIES:
        raise ValueError(
            f"model.family: given {run.model.family!r}, but vlm_grpo trains a vision-language model that encodes text; "
            f"set {', '.join(FAMILIES)}"
        )
    _untouched(run)
    trl = algorithm.trl
    if trl.get("generation_batch_size") and trl.get("steps_per_generation"):
        raise ValueError(
            "algorithm.trl: given generation_batch_size and steps_per_generation, of which one follows; set one"
        )
    if algorithm.count("num_generations") < 2:
        raise ValueError(
            "algorithm.trl.num_generations: given 1, but completions of one prompt are compared with each other; set 2 "
            "or more (8 is usual)"
        )
    if trl.get("beta") and not algorithm.uses_adapter:
        raise ValueError(
            f"algorithm.trl.beta: given {trl['beta']}, but without an adapter TRL loads the reference by the model's "
            "name, which a pipeline's text encoder has none of; set algorithm.trl.use_peft=true, or beta=0"
        )
    if trl.get("use_vllm") and trl.get("generation_kwargs"):
        raise ValueError(
            "algorithm.trl.generation_kwargs: given beside use_vllm, which evaluations do without, so that they could "
            "not be drawn alike; leave it out"
        )
    adapter = sorted(name for name in trl if name.startswith("lora_") or name in ("use_rslora", "use_dora"))
    if adapter and not algorithm.uses_adapter:
        raise ValueError(f"algorithm.trl.{adapter[0]}: given, but use_peft is not; set algorithm.trl.use_peft=true")
    if algorithm.negative_encoder == "base" and not algorithm.uses_adapter:
        raise ValueError(
            "algorithm.negative_encoder: given 'base', but without an adapter the base is gone after the first step; "
            "set policy, or algorithm.trl.use_peft=true"
        )
    if algorithm.offload_painter and run.model.offload_vae:
        raise ValueError(
            "model.offload_vae: given true beside algorithm.offload_painter, which moves the autoencoder as well; "
            "leave it out"
        )
    if run.evaluation.weights == "ema":
        raise ValueError("evaluation.weights: given 'ema', but vlm_grpo keeps no average; set raw")


def _untouched(run: RunConfig) -> None:
    """Sections that are the diffusion network's own training, which there is none of."""
    model = run.model
    if model.train != type(model).model_fields["train"].default:
        raise ValueError(
            "model.train: given, but vlm_grpo trains the text encoder and the diffusion network stays as it is; leave "
            "it out, and set algorithm.trl.use_peft, lora_r, lora_alpha"
        )
    if model.free_text_encoders:
        raise ValueError("model.free_text_encoders: given true, but the text encoder is what is trained; leave it out")
    if model.embeddings is not None:
        raise ValueError(
            f"model.embeddings: given {model.embeddings!r}, but the text encoder is what is trained; leave it out"
        )
    if run.training.compile:
        raise ValueError(
            "training.compile: given true, but vlm_grpo does not train the diffusion network; leave it out"
        )
    for key in ("sharding", "shard_gradients"):
        if getattr(run.training, key) != getattr(type(run.training)(), key):
            raise ValueError(
                f"training.{key}: given {getattr(run.training, key)!r}, but vlm_grpo is sharded by TRL's trainer; "
                "leave it out, and launch with configs/accelerate/zero2.yaml or zero3.yaml"
            )
    pairs: list[tuple[str, Section, Section]] = [
        ("optimizer", run.optimizer, type(run.optimizer)()),
        ("rollout", run.rollout, type(run.rollout)()),
    ]
    for name, section, default in pairs:
        for key in type(section).model_fields:
            if name == "rollout" and key in ROLLOUT_KEYS:
                continue
            if getattr(section, key) != getattr(default, key):
                raise ValueError(
                    f"{name}.{key}: given {getattr(section, key)!r}, which is of the diffusion network's own training; "
                    f"vlm_grpo takes TRL's options under algorithm.trl (learning_rate, num_generations, ...)"
                )
    for name, data in data_sections(run).items():
        strip = data.image_options.reference_strip
        if strip is not None:
            raise ValueError(
                f"{name}.reference_strip: given {strip}, but the diffusion network of vlm_grpo learns to look at none; "
                "leave it out"
            )
    if run.ema is not None:
        raise ValueError("ema: given, but vlm_grpo keeps no average; set ema=null")
    if run.warmup_data is not None:
        raise ValueError("warmup_data: given, but vlm_grpo has no supervised steps; leave it out")


def _generation_batch(algorithm: VlmGrpoConfig, per_pass: int) -> int:
    """Completions generated at once over all processes.

    Raises:
        ConfigError: a generation_batch_size that is no whole number of passes.
    """
    given = algorithm.trl.get("generation_batch_size")
    if given is None:
        steps = algorithm.trl.get("steps_per_generation") or algorithm.count("gradient_accumulation_steps")
        return per_pass * steps
    if given % per_pass:
        raise ConfigError(
            f"algorithm.trl.generation_batch_size: given {given}; set a multiple of {per_pass} "
            "(per_device_train_batch_size x processes)"
        )
    return given
