"""Devices, precision, optimizer steps and collectives on any number of processes."""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    DistributedType,
    InitProcessGroupKwargs,
    gather_object,
    parse_flag_from_env,
    set_seed,
)
from torch import Tensor, nn

from retouch.config.errors import ConfigError
from retouch.engine.parallel import Fsdp2, Replicated
from retouch.engine.speed import choose_kernels, compile_blocks, leave_casts_to_autocast, with_own_options
from retouch.engine.zero import Zero
from retouch.errors import first_line
from retouch.process.process_wide import leave_to_the_run_file
from retouch.rewards.client.config import COLLECTIVE_S
from retouch.types import Diverged

if TYPE_CHECKING:
    from retouch.config.run import OptimizerConfig, TrainingConfig

logger = logging.getLogger(__name__)

PLUGINS = {DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM}
"""Wrappers that accelerate would apply itself, with its own checkpoint files."""

OVERFLOWS = 20
"""Consecutive fp16 steps with an Inf or NaN gradient that end a run. Each halves the loss scale, which starts at 65536:
after 16 the scale is not the cause."""


def require_joined() -> None:
    """Reject several processes of a launcher on a machine without a GPU: accelerate leaves each of them to itself, and
    all would train the same run."""
    launched = int(os.environ.get("WORLD_SIZE", "1")) if "LOCAL_RANK" in os.environ else 1
    if launched > 1 and not torch.accelerator.is_available() and not parse_flag_from_env("ACCELERATE_USE_CPU"):
        raise ConfigError(
            f"WORLD_SIZE: the launcher started {launched} processes, which do not join, because there is no GPU here "
            "(`retouch doctor` prints what torch finds); use a machine with one GPU for each, start one process with "
            "`retouch train`, or set ACCELERATE_USE_CPU=true in the environment to train on CPUs"
        )


def _other_engine(problem: str) -> ConfigError:
    return ConfigError(
        f"accelerate's configuration: {problem}; set MULTI_GPU (configs/accelerate), and in the run file "
        "training.sharding=fsdp2, zero2 or zero3"
    )


class Engine:
    """Precision, gradients, collectives.

    Collectives run once per optimizer step (`sum`, `step`), never in the loop over micro-batches. Sharded weights are
    also gathered for each forward and backward: every process must run equally many.
    """

    def __init__(
        self, training: TrainingConfig, optimizer: OptimizerConfig, seed: int, collective_s: float = COLLECTIVE_S
    ) -> None:
        """Args:
        collective_s: timeout of collectives in seconds.
        """
        require_joined()
        leave_to_the_run_file(training.mixed_precision)
        # accelerate keeps the precision in a process-wide state, which a second engine in one process must not inherit
        AcceleratorState._reset_state()
        try:
            self.accelerator = Accelerator(
                mixed_precision=training.mixed_precision,
                step_scheduler_with_optimizer=False,
                # no cache: each weight is used once per forward, and lowered copies would be kept until its end
                kwargs_handlers=[
                    AutocastKwargs(cache_enabled=False),
                    InitProcessGroupKwargs(timeout=timedelta(seconds=collective_s)),
                ],
            )
        except ValueError as error:
            raise ConfigError(f"training.mixed_precision: given {training.mixed_precision!r}; {error}") from None
        except ImportError as error:  # of one of PLUGINS, by a variable of the environment
            raise _other_engine(first_line(error).rstrip(".")) from None
        if self.accelerator.distributed_type in PLUGINS:
            raise _other_engine(f"distributed_type is {self.accelerator.distributed_type.value}")
        self.device: torch.device = self.accelerator.device
        self.rank: int = self.accelerator.process_index
        self.world_size: int = self.accelerator.num_processes
        self.is_main: bool = self.accelerator.is_main_process
        if training.mixed_precision == "fp16" and self.device.type == "cpu":
            # accelerate would silently run in fp32
            raise ConfigError("training.mixed_precision: given 'fp16', which needs a GPU; set bf16, or \"no\" for fp32")
        choose_kernels(self.device, training)
        set_seed(seed)  # for global generators: initial weights are equal on every rank
        self.training = training
        self.config = optimizer
        self.grad_norm = 0.0
        """Gradient norm of the last step, before clipping."""
        self._overflows = 0
        self._collective_s = collective_s
        self._between_cpus: Any = None  # gloo, from its first use on; False where it does not start
        self._parallel: Replicated | Zero

    # --- the network ---

    def prepare(
        self,
        network: nn.Module,
        *,
        gradient_checkpointing: bool,
        some_without_gradient: bool = False,
        dtype: torch.dtype | None = None,
    ) -> nn.Module:
        """Place and wrap the network -> the network for `predict`, in rollout and training.

        It stays in eval mode: dropout would break ratio = 1.

        Args:
            some_without_gradient: some trained weights never get a gradient; DDP would wait for it.
            dtype: that the weights shall have, where they were left in that of their files; None leaves them.
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
            logger.info("training.sharding=%s has no effect on one process", sharding)
            sharding = "none"
        # buffers are constants; DDP would send them at every forward, of which processes need not run equally many
        options = DistributedDataParallelKwargs(find_unused_parameters=some_without_gradient, broadcast_buffers=False)
        accelerator.ddp_handler = options  # pyright: ignore[reportAttributeAccessIssue]
        if sharding == "none":
            self._parallel = Replicated(network, accelerator, c, self.training, dtype)
        elif sharding == "fsdp2":
            self._parallel = Fsdp2(network, accelerator, c, self.training, dtype)
        else:
            self._parallel = Zero(network, accelerator, c, self.training, dtype)
        return self._parallel.network

    @property
    def network(self) -> nn.Module:
        """The network that `prepare` returned."""
        return self._parallel.network

    @property
    def own_memory(self) -> bool:
        """Whether every weight is whole here and has its own memory: no shard, no part of a flat buffer."""
        return self._parallel.own_memory

    @property
    def optimizer(self) -> Any:
        """AdamW, or that of `optimizer.factory`, over this process's trained weights or shards."""
        return self._parallel.optimizer

    def new_optimizer(self) -> None:
        """Start a phase with empty moments."""
        self._parallel.new_optimizer()

    # --- one step ---

    def micro_step(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        """Context of forward and backward of one micro-batch. Gradients are reduced in the last one, or in each if they
        are sharded."""
        return self._parallel.micro_step(last=last)

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of a loss whose normalizer already counts all ranks and micro-batches."""
        self._parallel.backward(loss)

    def step(self, lr: float) -> dict[str, float]:
        """Clip, check, step, zero -> `grad_norm` before clipping, and `overflow` (fp16: 1 if the step was skipped).

        Raises:
            Diverged: the gradient norm is NaN or Inf; under fp16, in OVERFLOWS consecutive steps.
        """
        self.grad_norm, skipped = self._parallel.step(lr)
        norm = self.grad_norm
        self._overflows = self._overflows + 1 if skipped else 0
        if not math.isfinite(norm) and self.accelerator.scaler is None:
            raise Diverged(f"the gradient norm is {norm}; lower optimizer.lr, or check the rewards of the last batch")
        if self._overflows >= OVERFLOWS:
            raise Diverged(
                f"the gradient is NaN or Inf in {OVERFLOWS} consecutive fp16 steps at every loss scale; set "
                "training.mixed_precision=bf16, or lower optimizer.lr"
            )
        return {"grad_norm": norm, "overflow": float(skipped)}

    def drop_gradients(self) -> None:
        """Discard the gradients accumulated since the last step, and free their memory."""
        self.optimizer.zero_grad(set_to_none=True)
        if self.device.type != "cpu":
            torch.get_device_module(self.device).empty_cache()

    # --- between ranks ---

    def sum(self, value: Tensor) -> Tensor:
        """Sum over ranks, elementwise."""
        return self.accelerator.reduce(value.to(self.device), reduction="sum")  # type: ignore[return-value]

    def gather(self, value: Tensor) -> Tensor:
        """Concatenate tensors of all ranks, in rank order."""
        return self.accelerator.gather(value.to(self.device).contiguous())  # type: ignore[return-value]

    def gather_list(self, values: Sequence[Any]) -> list[Any]:
        """Python objects of every rank, in rank order."""
        return gather_list(values)

    def tensors_on_first(self, tensors: Mapping[str, Tensor]) -> list[Mapping[str, Tensor]]:
        """CPU tensors of every rank, in rank order, on the first; [] on the others. Sent one after the other between
        CPUs: NCCL would take them, pickled, through every GPU, and each rank would keep those of all. It does where
        gloo does not start."""
        if self.world_size == 1:
            return [tensors]
        if self._between_cpus is None:
            self._between_cpus = self._connected_cpus()
        if not self._between_cpus:
            everyones = self.gather_list([dict(tensors)])
            return everyones if self.is_main else []
        # a receiver must have the memory first, and ranks have different numbers of rows
        shapes = self.gather_list([{name: (t.dtype, t.shape) for name, t in tensors.items()}])
        if not self.is_main:
            for tensor in tensors.values():
                if tensor.numel():
                    dist.send(tensor.contiguous(), 0, group=self._between_cpus)
            return []
        found = [tensors]
        for rank, of_rank in enumerate(shapes[1:], 1):
            found.append({name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in of_rank.items()})
            for tensor in found[-1].values():
                if tensor.numel():
                    dist.recv(tensor, rank, group=self._between_cpus)
        return found

    def _connected_cpus(self) -> Any:
        """A group of gloo, which looks up the address of this host, unlike NCCL; False on every rank where one cannot:
        a checkpoint needs it first hours into a run, which shall not end there."""
        found, problem = None, ""
        try:
            found = cast(
                "dist.ProcessGroup", dist.new_group(timeout=timedelta(seconds=self._collective_s), backend="gloo")
            )
        except RuntimeError as error:
            problem = f" ({first_line(error)})"
        if not self.any(found is None):
            return found
        if self.is_main:
            logger.warning("gloo does not connect all processes%s: rows of checkpoints go through the GPUs", problem)
        return False

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return bool(self.sum(torch.full((), float(flag), dtype=torch.float32, device=self.device)) > 0)

    def barrier(self) -> None:
        self.accelerator.wait_for_everyone()

    def close(self) -> None:
        self.accelerator.end_training()

    # --- state ---

    def state_dict(self) -> dict[str, Any]:
        """Gathered optimizer state and loss scaler. A collective; the first process gets the tensors."""
        scaler = self.accelerator.scaler
        moments = self._parallel.state_dict(keep=self.is_main)
        return {"optimizer": moments, "scaler": scaler.state_dict() if scaler else None}

    def load_state_dict(self, state: dict[str, Any], options: Iterable[str] = ()) -> None:
        """Restore `state_dict`, under the options of the run file.

        Args:
            options: names of `optimizer.options` in the run file that the state was written under.
        """
        self._parallel.load_state_dict(with_own_options(state["optimizer"], self.optimizer, self.config, options))
        if self.accelerator.scaler is not None and state["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])


class Launched:
    """The processes of a run that another library has started."""

    @property
    def rank(self) -> int:
        return PartialState().process_index

    @property
    def world_size(self) -> int:
        return PartialState().num_processes

    def gather_list(self, values: Sequence[Any]) -> list[Any]:
        return gather_list(values)


def gather_list(values: Sequence[Any]) -> list[Any]:
    """Python objects of every process, in rank order."""
    return gather_object(list(values)) if PartialState().num_processes > 1 else list(values)
