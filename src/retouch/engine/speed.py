"""Kernels, compiled blocks and optimizers."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from retouch.config.errors import ConfigError
from retouch.registry import load_named

if TYPE_CHECKING:
    from retouch.config.run import OptimizerConfig, TrainingConfig

COMPILED_VARIANTS = 128
"""Maximum number of compiled variants of a block, for all its widths, sizes and batches."""


def choose_kernels(device: torch.device, training: TrainingConfig) -> None:
    """Set the kernels for the whole process; on a CPU only the precision of products of fp32.

    It is torch's default, which a variable of the environment lowers to TF32 (TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, set in
    NVIDIA's images), and which other libraries may set.

    cuDNN's attention is disabled: torch prefers it on Hopper and newer, where the backward of FLUX's blocks reads
    beyond its memory, also in diffusers alone (torch 2.11 with cuDNN 9.19 on an H200; `tests/cuda` runs it without).
    torch then uses FlashAttention. mixed_precision "no" also disables TF32 convolutions. With `deterministic`, an
    operation without a deterministic kernel raises.
    """
    torch.set_float32_matmul_precision("highest")
    if device.type != "cuda":
        return
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cudnn.allow_tf32 = training.mixed_precision != "no"
    if training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
    torch.use_deterministic_algorithms(training.deterministic)


def leave_casts_to_autocast(network: nn.Module) -> None:
    """Disable peft's cast of LoRA inputs to fp32 under autocast, which lowers them again: equal results with two passes
    over memory less per adapted layer."""
    module: Any
    for module in network.modules():
        if hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = False


def compile_blocks(network: nn.Module, backend: str = "inductor") -> None:
    """Compile the repeated blocks of a diffusers network in place (its `compile_repeated_blocks`).

    In place, because rollout and training must run the same block: another rounding would break ratio = 1. For the same
    reason the limit of variants is raised: torch stops compiling after 8, which a UNet's widths and sizes, with and
    without gradients, exceed before the first step.

    Raises:
        ConfigError: the network's class has no repeated blocks.
    """
    if not getattr(network, "_repeated_blocks", None):
        raise ConfigError(
            f"training.compile: given true, but {type(network).__name__} has no repeated blocks; set compile=false"
        )
    limits: Any = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, COMPILED_VARIANTS)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, 4 * COMPILED_VARIANTS)
    network.compile_repeated_blocks(backend=backend)  # type: ignore[operator]


def make_optimizer(config: OptimizerConfig, parameters: Sequence[nn.Parameter], device: torch.device) -> Any:
    """AdamW over the trained weights, fused on GPUs and CPUs, or with 8-bit moments; or the class of
    `optimizer.factory`.

    Raises:
        ConfigError: 8-bit moments without bitsandbytes or without a GPU, or a class that cannot be used.
    """
    if config.factory is not None:
        return _custom_optimizer(config.factory, config, parameters)
    options: dict[str, Any] = {
        "lr": config.lr,
        "betas": config.betas,
        "weight_decay": config.weight_decay,
        "eps": config.eps,
    }
    if config.state == "fp32":
        # on CPUs the fused kernel ignores strides
        whole = all(parameter.is_contiguous() for parameter in parameters)
        return torch.optim.AdamW(parameters, **options, fused=whole if device.type == "cpu" else device.type != "meta")
    where = "optimizer.state: given '8bit', "
    if device.type != "cuda":
        raise ConfigError(f"{where}which needs a GPU, but the device is {device.type}; set optimizer.state=fp32")
    try:
        library: Any = importlib.import_module("bitsandbytes")
    except ImportError:
        raise ConfigError(
            f"{where}which needs bitsandbytes: pip install bitsandbytes, or set optimizer.state=fp32"
        ) from None
    return library.optim.AdamW8bit(parameters, **options)


def _custom_optimizer(
    factory: str, config: OptimizerConfig, parameters: Sequence[nn.Parameter]
) -> torch.optim.Optimizer:
    kind, given = load_named("optimizer.factory", factory, "class"), f"optimizer.factory: given {factory!r}, which"
    try:
        optimizer = kind(parameters, lr=config.lr, **config.options)
    except Exception as error:  # whatever the class raises: a missing library, an assertion, a key
        raise ConfigError(f"{given} raised {type(error).__name__}: {error}; set optimizer.options to fit it") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"{given} made {type(optimizer).__name__}; expected a subclass of torch.optim.Optimizer")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    # those have a step that evaluates the loss itself, and one whose weights differ between training and evaluation
    if hasattr(optimizer, "eval") or (closure is not None and closure.default is inspect.Parameter.empty):
        raise ConfigError(
            f"{given} needs a closure, or a switch between training and evaluation; set a class whose step() is called "
            "after backward and that has neither"
        )
    return optimizer


def with_own_options(
    state: Mapping[str, Any], optimizer: Any, config: OptimizerConfig, before: Iterable[str] = ()
) -> dict[str, Any]:
    """A saved state with the options of the run file, as this optimizer has them, in place of the checkpoint's.

    Args:
        before: names of `optimizer.options` in the checkpoint: one that the run file has no more is at its default.
    """
    names = ("betas", "weight_decay", "eps") if config.factory is None else {*config.options, *before}
    own = [{name: group[name] for name in names if name in group} for group in optimizer.param_groups]
    return {**state, "param_groups": [{**saved, **new} for saved, new in zip(state["param_groups"], own, strict=True)]}


def computed_here(state: Mapping[str, Any], optimizer: Any) -> dict[str, Any]:
    """A saved state for this optimizer to load, with this machine's choice of a fused AdamW."""
    own = {name: value for name, value in optimizer.param_groups[0].items() if name == "fused"}
    return {**state, "param_groups": [{**group, **own} for group in state["param_groups"]]}
