"""TRL's arguments and PEFT's adapter, by the run file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from trl import GRPOConfig, ModelConfig, get_peft_config

from retouch.algorithms.vlm_grpo.config import VlmGrpoConfig
from retouch.algorithms.vlm_grpo.parts import template_options
from retouch.algorithms.vlm_grpo.trl_fields import (
    grpo_fields,
    model_fields,
)
from retouch.config import ConfigError, RunConfig
from retouch.families.qwen.text import Task

ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj")
"""Modules of an adapter whose `lora_target_modules` says nothing: attention of the language model."""


def trl_arguments(config: RunConfig) -> GRPOConfig:
    """TRL's arguments: those of the run file under `algorithm.trl`, and what the run file says itself.

    Raises:
        ConfigError: what TRL refuses, and FSDP.
    """
    algorithm, training = config.algorithm, config.training
    assert isinstance(algorithm, VlmGrpoConfig)
    given = {name: value for name, value in algorithm.trl.items() if name in grpo_fields()}
    task: Task = getattr(config.model, "variant", "draw")
    cpu = not torch.cuda.is_available()
    if _launched_by("FSDP"):
        raise ConfigError(
            "accelerate's configuration says FSDP, past whose hooks vlm_grpo reads the text encoder's states; launch "
            "with configs/accelerate/zero3.yaml"
        )
    options: dict[str, Any] = {
        # told of a CPU, accelerate would leave DeepSpeed out; without, it finds its processes by their backend alone
        **({"ddp_backend": "gloo"} if cpu and _launched_by("DEEPSPEED") else {"use_cpu": cpu}),
        "disable_tqdm": True,
        "ddp_timeout": int(config.reward_client.collective_s),
        **given,
        "chat_template_kwargs": {**template_options(task), **(given.get("chat_template_kwargs") or {})},
        "output_dir": str(Path(config.logging.dir).expanduser() / config.name),
        "seed": config.seed,
        "max_steps": training.max_steps,
        "bf16": training.mixed_precision == "bf16",
        "fp16": training.mixed_precision == "fp16",
        "gradient_checkpointing": training.gradient_checkpointing,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "eval_strategy": "no",
        "report_to": "none",
    }
    if training.mixed_precision == "fp16" and cpu:
        raise ConfigError("training.mixed_precision: given 'fp16', which needs a GPU; set bf16, or \"no\" for fp32")
    try:
        return GRPOConfig(**options)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"algorithm.trl: {error}") from None


def _launched_by(engine: str) -> bool:
    """Whether accelerate's configuration says DEEPSPEED, or FSDP: how its launcher tells the processes."""
    return os.environ.get(f"ACCELERATE_USE_{engine}", "false").lower() == "true"


def adapter_config(algorithm: VlmGrpoConfig) -> Any:
    """PEFT's config of the adapter, by TRL's options; None for full fine-tuning. The vision tower gets none unless
    asked: its layers share names with those of the language model."""
    given = {name: value for name, value in algorithm.trl.items() if name in model_fields() - grpo_fields()}
    config: Any = get_peft_config(ModelConfig(**{"lora_target_modules": list(ADAPTED), **given}))
    if config is not None and not algorithm.train_vision_tower:
        config.exclude_modules = r".*visual\..*"
    return config
