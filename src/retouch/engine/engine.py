"""One optimizer step on however many processes there are."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    DistributedType,
    InitProcessGroupKwargs,
    gather_object,
    set_seed,
)
from torch import Tensor, nn

from retouch.config.errors import ConfigError
from retouch.engine.parallel import Fsdp2, Parallel, Replicated
from retouch.engine.speed import choose_kernels, compile_blocks, leave_casts_to_autocast
from retouch.engine.zero import Zero
from retouch.rewards.client.config import COLLECTIVE_S
from retouch.types import Diverged

if TYPE_CHECKING:
    from retouch.config.run import (
        OptimizerConfig,
        TrainingConfig,
    )

logger = logging.getLogger(__name__)

PLUGINS = {DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM}
"""What accelerate would wrap the network in by itself, and save in files of its own."""

OVERFLOWS = 20
"""Steps in a row without a finite gradient under fp16 that end a run. Each halves the scale of the loss, which begins
at 65536: after 16 of them it is not the scale."""


class Engine:
    """Precision, gradients, collectives.

    Collectives run once an optimizer step (`sum`, `step`), never inside the loop over micro-batches; where weights are
    sharded, they are gathered for each forward and backward besides, so that every process must take as many.
    """

    def __init__(
        self, training: TrainingConfig, optimizer: OptimizerConfig, seed: int, collective_s: float = COLLECTIVE_S
    ) -> None:
        """Args:
        collective_s: how long processes wait for each other.
        """
        # accelerate keeps precision in a process-wide state; a second engine in one process starts from its own
        AcceleratorState._reset_state()
        try:
            self.accelerator = Accelerator(
                mixed_precision=training.mixed_precision,
                step_scheduler_with_optimizer=False,
                # a weight is used once a forward; of full weights the lowered copies would all be kept until its end
                kwargs_handlers=[
                    AutocastKwargs(cache_enabled=False),
                    InitProcessGroupKwargs(timeout=timedelta(seconds=collective_s)),
                ],
            )
        except ValueError as error:
            raise ConfigError(f"training.mixed_precision: given {training.mixed_precision!r}; {error}") from None
        if self.accelerator.distributed_type in PLUGINS:
            raise ConfigError(
                f"accelerate's configuration: distributed_type is {self.accelerator.distributed_type.value}; set "
                "MULTI_GPU (configs/accelerate), and in the run file training.sharding=fsdp2, zero2 or zero3"
            )
        if training.mixed_precision == "fp16" and self.device.type == "cpu":
            # accelerate would run in fp32 without a word
            raise ConfigError("training.mixed_precision: given 'fp16', which needs a GPU; set bf16, or \"no\" for fp32")
        choose_kernels(self.device, training)
        set_seed(seed)  # what draws from global generators (weight initialisation) is the same on every rank
        self.training = training
        self.config = optimizer
        self._overflows = 0
        self._parallel: Parallel

    # --- where and who ---

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    @property
    def rank(self) -> int:
        return self.accelerator.process_index

    @property
    def world_size(self) -> int:
        return self.accelerator.num_processes

    @property
    def is_main(self) -> bool:
        return self.accelerator.is_main_process

    # --- the network ---

    def prepare(
        self, network: nn.Module, *, gradient_checkpointing: bool, some_without_gradient: bool = False
    ) -> nn.Module:
        """Place and wrap the network; what it returns is what `predict` must be given, in rollout and training alike.

        It stays in eval mode: dropout in one of the two would break ratio = 1.

        Args:
            some_without_gradient: some of what is trained never gets one; DDP would wait for it.
        """
        if gradient_checkpointing:
            network.enable_gradient_checkpointing()  # type: ignore[operator]
        if self.training.mixed_precision != "no":
            leave_casts_to_autocast(network)
        if self.training.compile:
            compile_blocks(network)
        network.eval()
        sharding, accelerator, c = self.training.sharding, self.accelerator, self.config
        if sharding != "none" and self.world_size == 1:
            logger.info("training.sharding=%s on one process: there is nothing to share out", sharding)
            sharding = "none"
        unused = DistributedDataParallelKwargs(find_unused_parameters=some_without_gradient)
        accelerator.ddp_handler = unused  # pyright: ignore[reportAttributeAccessIssue]
        if sharding == "none":
            self._parallel = Replicated(network, accelerator, c)
        elif sharding == "fsdp2":
            self._parallel = Fsdp2(network, accelerator, c, self.training)
        else:
            self._parallel = Zero(network, accelerator, c, self.training)
        return self._parallel.network

    @property
    def network(self) -> nn.Module:
        """What `prepare` returned."""
        return self._parallel.network

    @property
    def own_memory(self) -> bool:
        """Whether every weight is whole here and has its memory to itself: no piece, no part of a flat buffer."""
        return self._parallel.own_memory

    @property
    def optimizer(self) -> Any:
        """AdamW over what this process holds."""
        return self._parallel.optimizer

    def new_optimizer(self) -> None:
        """A fresh AdamW over the trained weights: each phase starts with empty moments."""
        self._parallel.new_optimizer()

    # --- one step ---

    def micro_step(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        """Around forward and backward of one micro-batch; gradients are exchanged in the last one only, or in each
        where they are kept sharded."""
        return self._parallel.micro_step(last=last)

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of a loss whose normalizer already counts all ranks and micro-batches."""
        self._parallel.backward(loss)

    def step(self, lr: float) -> dict[str, float]:
        """Clip, check, step, zero -> `grad_norm` before clipping, and `overflow` (fp16: 1 where the scaler skipped).

        Raises:
            Diverged: a gradient norm that is not finite; under fp16, in OVERFLOWS steps in a row.
        """
        norm, skipped = self._parallel.step(lr)
        self._overflows = self._overflows + 1 if skipped else 0
        if not math.isfinite(norm) and self.accelerator.scaler is None:
            raise Diverged(f"the gradient norm is {norm}; lower optimizer.lr, or look at the rewards of the last batch")
        if self._overflows >= OVERFLOWS:
            raise Diverged(
                f"no finite gradient in {OVERFLOWS} steps in a row under fp16, whatever the loss was scaled by; set "
                "training.mixed_precision=bf16, or lower optimizer.lr"
            )
        return {"grad_norm": norm, "overflow": float(skipped)}

    def drop_gradients(self) -> None:
        """Forget what was accumulated since the last step, and give its memory back."""
        self.optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # --- between ranks ---

    def sum(self, value: Tensor) -> Tensor:
        """Sum over ranks, elementwise."""
        return self.accelerator.reduce(value.to(self.device), reduction="sum")  # type: ignore[return-value]

    def gather(self, value: Tensor) -> Tensor:
        """Rows of every rank, in rank order."""
        return self.accelerator.gather(value.to(self.device).contiguous())  # type: ignore[return-value]

    def gather_list(self, values: Sequence[Any]) -> list[Any]:
        """Python objects of every rank, in rank order."""
        return gather_list(values)

    def any(self, flag: bool) -> bool:
        """True where any rank says so: how ranks agree to stop."""
        return bool(self.sum(torch.tensor(float(flag))) > 0)

    def barrier(self) -> None:
        self.accelerator.wait_for_everyone()

    def close(self) -> None:
        self.accelerator.end_training()

    # --- state ---

    def state_dict(self) -> dict[str, Any]:
        """Optimizer, whole where it is sharded, and loss scaler. Every process must ask; the first one's counts."""
        scaler = self.accelerator.scaler
        moments = self._parallel.state_dict(keep=self.is_main)
        return {"optimizer": moments, "scaler": scaler.state_dict() if scaler else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._parallel.load_state_dict(state["optimizer"])
        if self.accelerator.scaler is not None and state["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])


class Launched:
    """The processes of a run, whoever set them up."""

    @property
    def rank(self) -> int:
        return PartialState().process_index

    @property
    def world_size(self) -> int:
        return PartialState().num_processes

    def gather_list(self, values: Sequence[Any]) -> list[Any]:
        return gather_list(values)


def gather_list(values: Sequence[Any]) -> list[Any]:
    """Python objects of every process, in rank order, whoever set the processes up."""
    return gather_object(list(values)) if PartialState().num_processes > 1 else list(values)
