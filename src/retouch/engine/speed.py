"""Kernels, compiled blocks and optimizers: what makes a step faster, smaller, or the same every time."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from retouch.config.errors import ConfigError

if TYPE_CHECKING:
    from retouch.config.run import (
        OptimizerConfig,
        TrainingConfig,
    )


COMPILED_VARIANTS = 128
"""Of one block, for all its widths, sizes and batches."""


def choose_kernels(device: torch.device, training: TrainingConfig) -> None:
    """What a GPU computes with, for the whole process, whatever was set before; nothing on a CPU.

    cuDNN's attention is left out: torch prefers it on Hopper and newer, where the backward of FLUX's blocks, plain
    diffusers alike, reads beyond its memory (torch 2.11 with cuDNN 9.19 on an H200; `tests/cuda` runs it without).
    FlashAttention is next. mixed_precision "no" is fp32 in convolutions, too, where torch would take TF32; with
    `deterministic` an operation without a kernel that gives the same bits every time raises.
    """
    if device.type != "cuda":
        return
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cudnn.allow_tf32 = training.mixed_precision != "no"
    if training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read where cuBLAS is first used
    torch.use_deterministic_algorithms(training.deterministic)


def leave_casts_to_autocast(network: nn.Module) -> None:
    """LoRA of a network whose forward is autocast takes its input as it is: peft would raise it to the fp32 of its
    weights, for autocast to lower it again. The same numbers in two passes over memory less for each adapted layer."""
    module: Any
    for module in network.modules():
        if hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = False


def compile_blocks(network: nn.Module, backend: str = "inductor") -> None:
    """Compile the repeated blocks of a diffusers network in place (its `compile_repeated_blocks`).

    In place, so that rollout and training run the same block: compiled for one of them only, it would round otherwise
    and the ratio would not be 1. So it would where torch stops compiling and goes on without: after 8 variants of a
    block, which a UNet's widths and sizes, with and without gradients, use up before the first step.

    Raises:
        ConfigError: a network whose class names no repeated blocks.
    """
    if not getattr(network, "_repeated_blocks", None):
        raise ConfigError(
            f"training.compile: given true, but {type(network).__name__} names no blocks to compile; set compile=false"
        )
    limits: Any = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, COMPILED_VARIANTS)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, 4 * COMPILED_VARIANTS)
    network.compile_repeated_blocks(backend=backend)  # type: ignore[operator]


def make_optimizer(config: OptimizerConfig, parameters: Sequence[nn.Parameter], device: torch.device) -> Any:
    """AdamW over the trained weights: fused on GPUs and CPUs; with moments of 8 bits where the run file asks for it.

    Raises:
        ConfigError: 8 bits without the library that has them, or without a GPU.
    """
    options: dict[str, Any] = {
        "lr": config.lr,
        "betas": config.betas,
        "weight_decay": config.weight_decay,
        "eps": config.eps,
    }
    if config.state == "fp32":
        # on CPUs it goes through memory in order, whatever the strides
        whole = all(parameter.is_contiguous() for parameter in parameters)
        return torch.optim.AdamW(parameters, **options, fused=device.type == "cuda" or (device.type == "cpu" and whole))
    where = "optimizer.state: given '8bit', "
    if device.type != "cuda":
        raise ConfigError(f"{where}which needs a GPU, but the device is {device.type}; set fp32")
    try:
        library: Any = importlib.import_module("bitsandbytes")
    except ImportError:
        raise ConfigError(
            f"{where}which bitsandbytes computes, but it is not installed: pip install bitsandbytes, or set fp32"
        ) from None
    return library.optim.AdamW8bit(parameters, **options)


def computed_here(state: Mapping[str, Any], optimizer: Any) -> dict[str, Any]:
    """An optimizer's state for this one to load: whether AdamW is fused is up to the machine."""
    own = {name: value for name, value in optimizer.param_groups[0].items() if name == "fused"}
    return {**state, "param_groups": [{**group, **own} for group in state["param_groups"]]}
