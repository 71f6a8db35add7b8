"""How processes share a network: whole on each (DDP), in pieces by torch (FSDP2), or by DeepSpeed (`zero.py`).

Each is given a loss whose normalizer already counts all ranks and micro-batches, and trains the same numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from retouch.engine.sharding import shard, sharded_optimizer, whole_optimizer
from retouch.engine.speed import computed_here, make_optimizer

if TYPE_CHECKING:
    from retouch.config.run import (
        OptimizerConfig,
        TrainingConfig,
    )


class Parallel(Protocol):
    """A network, its gradients and its optimizer on all processes.

    Attributes:
        network: what is called.
        optimizer: AdamW over what this process holds.
        own_memory: every weight is whole here, and has its memory to itself.
    """

    network: nn.Module
    optimizer: Any
    own_memory: bool

    def new_optimizer(self) -> None:
        """Empty moments."""
        ...

    def micro_step(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        """Around forward and backward of one micro-batch."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient."""
        ...

    def step(self, lr: float) -> tuple[float, bool]:
        """Clip, step, zero -> (gradient norm before clipping, whether a loss scaler skipped the step). Where the norm
        is not finite the weights stay as they are."""
        ...

    def state_dict(self, *, keep: bool) -> dict[str, Any]:
        """The optimizer's, as AdamW without sharding has it. Every process must ask; keep=False gets no tensors."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse."""
        ...


class Replicated:
    """One process, or the whole network on each; gradients are exchanged once an optimizer step."""

    optimizer: Any
    own_memory = True

    def __init__(self, network: nn.Module, accelerator: Accelerator, config: OptimizerConfig) -> None:
        self.accelerator = accelerator
        self.config = config
        self.network: nn.Module = self.wrapped(network)
        self.parameters = [p for p in network.parameters() if p.requires_grad]

    def wrapped(self, network: nn.Module) -> nn.Module:
        return self.accelerator.prepare_model(network)

    def new_optimizer(self) -> None:
        self.accelerator._optimizers.clear()  # the accelerator keeps every optimizer it prepared
        optimizer = make_optimizer(self.config, self.parameters, self.accelerator.device)
        self.optimizer = self.accelerator.prepare_optimizer(optimizer)

    @contextlib.contextmanager
    def micro_step(self, *, last: bool) -> Iterator[None]:
        with contextlib.nullcontext() if last else self.accelerator.no_sync(self.network):
            yield

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss * self.accelerator.num_processes)  # data-parallel wrappers average over ranks

    def step(self, lr: float) -> tuple[float, bool]:
        total = self.accelerator.clip_grad_norm_(self.parameters, self.config.max_grad_norm)
        total = total.full_tensor() if isinstance(total, DTensor) else torch.as_tensor(total)
        scaled = self.accelerator.scaler is not None
        skipped = False
        if scaled or torch.isfinite(total):
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            skipped = scaled and bool(self.accelerator.optimizer_step_was_skipped)
        self.optimizer.zero_grad(set_to_none=True)
        return float(total), skipped

    def state_dict(self, *, keep: bool) -> dict[str, Any]:
        return whole_optimizer(self.optimizer.state_dict(), keep=keep)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(computed_here(sharded_optimizer(state, self.parameters), self.optimizer))


class Fsdp2(Replicated):
    """1/N of every weight, gradient and moment on each process."""

    own_memory = False

    def __init__(
        self, network: nn.Module, accelerator: Accelerator, config: OptimizerConfig, training: TrainingConfig
    ) -> None:
        self.training = training
        super().__init__(network, accelerator, config)

    def wrapped(self, network: nn.Module) -> nn.Module:
        # accelerate only autocasts
        network = self.accelerator.prepare_model(network, device_placement=False, evaluation_mode=True)
        shard(network, self.accelerator.device, self.accelerator.num_processes, self.training.mixed_precision)
        return network

    @contextlib.contextmanager
    def micro_step(self, *, last: bool) -> Iterator[None]:
        """Gradients are exchanged in the last one only, or in each where they are kept sharded."""
        assert isinstance(self.network, FSDPModule)
        self.network.set_requires_gradient_sync(last or self.training.shard_gradients)
        yield
