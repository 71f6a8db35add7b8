"""DeepSpeed's ZeRO on accelerate's processes: stage 2 shards gradients and moments, stage 3 weights as well.

DeepSpeed communicates gradients and weights, and steps torch's AdamW on flat shards. Precision is autocast over fp32
weights, and checkpoints are the same as without it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.cpp_extension import get_default_build_root

from retouch.config.errors import ConfigError
from retouch.engine.sharding import piece_of, place, whole_of
from retouch.engine.speed import computed_here, make_optimizer

if TYPE_CHECKING:
    from retouch.config.run import OptimizerConfig, TrainingConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


logger = logging.getLogger(__name__)


def note_compiling(main: bool) -> None:
    """Log that DeepSpeed is about to compile the operators of its engine, which takes minutes without output, unless
    they are installed or an earlier start compiled them."""
    from deepspeed.git_version_info import installed_ops  # pyright: ignore[reportMissingImports]

    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    if main and not installed_ops.get("utils") and not any(folder.glob("**/utils/utils.so")):
        logger.info("DeepSpeed compiles its operators, once for this machine; this takes minutes (into %s)", folder)


class OneByOne(nn.Module):
    """A network whose weights get their dtype in host memory as DeepSpeed iterates over them. It shards each before it
    takes the next: no process holds all of them, and no device the whole network."""

    def __init__(self, network: nn.Module, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.network, self.dtype = network, dtype

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        for weight in self.network.parameters(recurse):
            weight.data = weight.data.to("cpu", self.dtype if weight.is_floating_point() else None)
            yield weight


class Zero:
    """The interface of `Replicated`, by DeepSpeed's engine.

    Raises:
        ConfigError: DeepSpeed is not installed.
    """

    own_memory = False

    def __init__(
        self,
        network: nn.Module,
        accelerator: Accelerator,
        config: OptimizerConfig,
        training: TrainingConfig,
        dtype: torch.dtype | None = None,
    ) -> None:
        try:
            import deepspeed  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise ConfigError(
                f"training.sharding: given {training.sharding!r}, which needs DeepSpeed: "
                'pip install "retouch[deepspeed]", or set training.sharding=fsdp2'
            ) from None
        note_compiling(accelerator.is_main_process)
        warnings.filterwarnings("ignore", "`torch.distributed.* is deprecated", FutureWarning)  # DeepSpeed's calls
        self.whole_weights = training.sharding == "zero2"
        self.processes = accelerator.num_processes
        self.parameters = [p for p in network.parameters() if p.requires_grad]
        self.optimizer: Any = make_optimizer(config, self.parameters, accelerator.device)
        self._access: Any = deepspeed.utils
        deepspeed.init_distributed(torch.distributed.get_backend())
        settings = options(training, config.max_grad_norm)
        if self.whole_weights:
            place(network, accelerator.device, dtype)
        else:
            deepspeed.zero.Init(module=OneByOne(network, dtype), config_dict_or_path=settings)
            for buffer in network.buffers():
                buffer.data = buffer.data.to(accelerator.device, dtype if buffer.is_floating_point() else None)
        self.network: Any = deepspeed.initialize(model=network, optimizer=self.optimizer, config=settings)[0]
        self.network.eval()
        self._zero: Any = self.network.optimizer
        zero = self._zero
        for flat in zero.single_partition_of_fp32_groups if self.whole_weights else zero.fp32_partitioned_groups_flat:
            step = torch.zeros((), dtype=torch.float32, device=flat.device if flat.is_cuda else None)
            moments = {name: torch.zeros_like(flat, requires_grad=False) for name in MOMENTS}
            self.optimizer.state[flat] = {"step": step, **moments}
        if self.whole_weights:
            self._zero._lazy_init_hp_params_optimizer_state()  # without this, moments cannot be read before step 1

    def new_optimizer(self) -> None:
        """In place: DeepSpeed keeps views of the moments."""
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()

    @contextlib.contextmanager
    def micro_step(self, *, last: bool) -> Iterator[None]:
        self.network.set_gradient_accumulation_boundary(last)
        yield

    def backward(self, loss: Tensor) -> None:
        self.network.backward(loss * self.processes)  # DeepSpeed averages over ranks

    def step(self, lr: float) -> tuple[float, bool]:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self._zero.refresh_fp32_params()  # snapshots and checkpoints write to the weights, not to its copies
        self.network.step()  # skipped if the norm is NaN or Inf
        return float("inf" if self._zero.overflow else self.network.get_global_grad_norm()), False

    def state_dict(self, *, keep: bool) -> dict[str, Any]:
        [group] = self.optimizer.param_groups
        settings = {name: value for name, value in group.items() if name != "params"}
        step = next(iter(self.optimizer.state.values()))["step"]
        moments: dict[int, dict[str, Any]] = {}
        for i, parameter in enumerate(self.parameters if step > 0 else []):
            moments[i] = {"step": step.clone().cpu()}
            for name in MOMENTS:
                whole = self._moment(parameter, name)
                moments[i][name] = whole.cpu() if keep else None
        return {"state": moments, "param_groups": [{**settings, "params": list(range(len(self.parameters)))}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        [group], [saved] = self.optimizer.param_groups, computed_here(state, self.optimizer)["param_groups"]
        group.update({name: value for name, value in saved.items() if name != "params"})
        self.new_optimizer()
        for i, entry in state["state"].items():
            parameter = self.parameters[i]
            for name in MOMENTS:
                self._set_moment(parameter, name, entry[name].to(self.network.device))
            for flat in self.optimizer.state.values():
                flat["step"].fill_(entry["step"])

    def _moment(self, parameter: nn.Parameter, name: str) -> Tensor:
        if self.whole_weights:
            return self._access.safe_get_full_optimizer_state(parameter, name)
        return whole_of(self._access.safe_get_local_optimizer_state(parameter, name), parameter)

    def _set_moment(self, parameter: nn.Parameter, name: str, whole: Tensor) -> None:
        if self.whole_weights:
            self._access.safe_set_full_optimizer_state(parameter, whole, name)
        else:
            self._access.safe_set_local_optimizer_state(parameter, piece_of(whole, parameter), name)


def options(training: TrainingConfig, max_grad_norm: float) -> dict[str, Any]:
    """DeepSpeed's configuration. Stage 1 is stage 2 with whole gradients, which are reduced once."""
    stage = 3 if training.sharding == "zero3" else 2 if training.shard_gradients else 1
    zero: dict[str, Any] = {
        "stage": stage,
        "reduce_bucket_size": 50_000_000,
        # stage 3: no weight stays whole after its use, or it would be stale when shards are swapped or averaged
        "stage3_param_persistence_threshold": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": 0,
    }
    return {
        "train_micro_batch_size_per_gpu": 1,  # only for DeepSpeed's own statistics
        "gradient_accumulation_steps": 1,
        "gradient_clipping": max_grad_norm,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
        "torch_autocast": {
            "enabled": training.mixed_precision == "bf16",
            "dtype": "bfloat16",
            "lower_precision_safe_modules": [],  # their gradients would be reduced in bf16
        },
    }
