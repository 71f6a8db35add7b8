"""Data parallelism: the whole network on each process (DDP), or sharded by torch (FSDP2); `zero.py` has DeepSpeed.

All take a loss whose normalizer already counts all ranks and micro-batches, and give equal results.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from retouch.engine.sharding import place, shard, sharded_optimizer, whole_optimizer
from retouch.engine.speed import computed_here, make_optimizer

if TYPE_CHECKING:
    from retouch.config.run import OptimizerConfig, TrainingConfig


class Replicated:
    """One process, or the whole network on each; gradients are reduced once per optimizer step.

    Attributes:
        network: the wrapped network, to call.
        optimizer: AdamW over this process's trained weights or shards.
        own_memory: every weight is whole here and has its own memory.
    """

    optimizer: Any
    own_memory = True

    def __init__(
        self,
        network: nn.Module,
        accelerator: Accelerator,
        config: OptimizerConfig,
        training: TrainingConfig,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Args:
        dtype: see `Engine.prepare`.
        """
        self.accelerator = accelerator
        self.config = config
        self.training = training
        self.dtype = dtype
        self.network: nn.Module = self.wrapped(network)
        self.parameters = [p for p in network.parameters() if p.requires_grad]

    def wrapped(self, network: nn.Module) -> nn.Module:
        place(network, self.accelerator.device, self.dtype)
        return self.accelerator.prepare_model(network)

    def new_optimizer(self) -> None:
        """Start with empty moments."""
        self.accelerator._optimizers.clear()  # accelerate keeps every optimizer that it prepared
        optimizer = make_optimizer(self.config, self.parameters, self.accelerator.device)
        self.optimizer = self.accelerator.prepare_optimizer(optimizer)

    @contextlib.contextmanager
    def micro_step(self, *, last: bool) -> Iterator[None]:
        """Context of forward and backward of one micro-batch."""
        with contextlib.nullcontext() if last else self.accelerator.no_sync(self.network):
            yield

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss * self.accelerator.num_processes)  # data-parallel wrappers average over ranks

    def step(self, lr: float) -> tuple[float, bool]:
        """Clip, step, zero -> (gradient norm before clipping, whether the loss scaler skipped the step). If the norm is
        NaN or Inf, the weights do not change."""
        total = self.accelerator.clip_grad_norm_(self.parameters, self.config.max_grad_norm)
        total = total.full_tensor() if isinstance(total, DTensor) else torch.as_tensor(total, dtype=torch.float32)
        norm = float(total)  # read once, and before the update: the CPU waits for all that was queued
        scaled = self.accelerator.scaler is not None
        skipped = False
        if scaled or math.isfinite(norm):
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            skipped = scaled and bool(self.accelerator.optimizer_step_was_skipped)
        self.optimizer.zero_grad(set_to_none=True)
        return norm, skipped

    def state_dict(self, *, keep: bool) -> dict[str, Any]:
        """The state of an AdamW without sharding. A collective; without `keep` tensors are None."""
        return whole_optimizer(self.optimizer.state_dict(), keep=keep)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(computed_here(sharded_optimizer(state, self.parameters), self.optimizer))


class Fsdp2(Replicated):
    """Each process holds 1/N of every weight, gradient and moment."""

    own_memory = False

    def wrapped(self, network: nn.Module) -> nn.Module:
        # accelerate only adds autocast
        network = self.accelerator.prepare_model(network, device_placement=False, evaluation_mode=True)
        processes, precision = self.accelerator.num_processes, self.training.mixed_precision
        shard(network, self.accelerator.device, processes, precision, self.dtype)
        return network

    @contextlib.contextmanager
    def micro_step(self, *, last: bool) -> Iterator[None]:
        assert isinstance(self.network, FSDPModule)
        self.network.set_requires_gradient_sync(last or self.training.shard_gradients)
        yield
