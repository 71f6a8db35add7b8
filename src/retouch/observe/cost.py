"""The computation of a step: network forwards, images, FLOPs and memory, counted by a hook on the network.

A forward-equivalent is one sample through the network once. A backward counts as two if every weight is trained, as one
if the network is frozen (LoRA, adapters), plus one for recomputation (gradient checkpointing). Classifier-free guidance
doubles the samples.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from retouch.observe.measuring import Measurement
from retouch.process.machine import peak_of

if TYPE_CHECKING:
    from torch import nn

    from retouch.observe.flops import CountedNetwork
    from retouch.observe.timing import Stopwatch

COUNTED = ("rollout", "train_forward", "train_backward", "eval")
"""Parts of a step in which the network computes."""


class Costs:
    """Counts the forwards of a network by part of the step.

    Args:
        clock: stopwatch with the current part.
        frozen: only adapters are trained.
        recomputes: a backward repeats the forward.
    """

    def __init__(self, network: nn.Module, clock: Stopwatch, *, frozen: bool, recomputes: bool) -> None:
        self.clock = clock
        self.images = 0
        self._rows_of_calls = Measurement("metrics nfe_*, tflops and mfu")
        self._flops_of_calls = Measurement("metrics tflops and mfu")
        self._memory = Measurement("metric peak_memory_gib")
        self.peak = self._flops_of_calls.take(peak_flops, network)
        self._network = network
        self._backward = (1 if frozen else 2) + (1 if recomputes else 0)
        self._model_backward = 1 if frozen else 2
        self._rows: dict[str, int] = defaultdict(int)
        self._flops = 0.0
        self._hook = network.register_forward_pre_hook(self._count, with_kwargs=True)

    def split(self, seconds: float) -> dict[str, float]:
        """Counts of this process since the last split: `nfe_PART` of each part, images, images per second and, on a
        GPU, peak memory, TFLOP/s and the share of the GPU's peak FLOP/s; resets them.

        Args:
            seconds: time since the last split.
        """
        found = {f"nfe_{part}": float(self._rows[part]) for part in COUNTED if self._rows[part]}
        found |= {"images": float(self.images), "images_per_s": self.images / seconds} if self.images else {}
        if self.peak is not None and self._flops_of_calls.works and self._rows_of_calls.works:
            found["tflops"] = self._flops / seconds / 1e12
            found["mfu"] = self._flops / seconds / self.peak
        found |= self._memory.take(peak_memory) or {}
        self._rows.clear()
        self.images, self._flops = 0, 0.0
        return found

    def rows(self, part: str) -> int:
        """Forwards of one sample in a part of the step since the last split; for another thread."""
        return self._rows.get(part, 0)

    def close(self) -> None:
        self._hook.remove()

    def _count(self, network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        import torch

        rows = self._rows_of_calls.take(rows_in, args, kwargs)
        if rows is None:
            return
        part = self.clock.current if self.clock.current in COUNTED else "rollout"
        trains = torch.is_grad_enabled()
        self._rows[part] += rows
        if trains:
            self._rows["train_backward"] += self._backward * rows
        if self.peak is not None:  # model FLOPs exclude recomputation
            once = self._flops_of_calls.take(forward_flops, self._network, args, kwargs) or 0.0
            self._flops += rows * once * (1 + self._model_backward * trains)


def rows_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """B of the latents in the arguments of a diffusers network: of a tensor [B, ...], or a list of B."""
    return len(args[0] if args else kwargs["hidden_states" if "hidden_states" in kwargs else "sample"])


def forward_flops(network: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
    """FLOPs of a forward with these arguments for one sample (a multiply-add is two), without adapters."""
    from retouch.observe.flops import CountedNetwork

    counted = _COUNTED.get(network)
    if counted is None:
        counted = _COUNTED[network] = CountedNetwork(network)
    return counted.flops(args, kwargs) / rows_in(args, kwargs)


_COUNTED: WeakKeyDictionary[nn.Module, CountedNetwork] = WeakKeyDictionary()
"""A network -> its copy without weights, which takes seconds to make."""


def peak_flops(network: nn.Module) -> float | None:
    """Peak FLOP/s of the network's device; None if unknown."""
    import torch

    device = next(network.parameters()).device
    return peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_memory() -> dict[str, float]:
    """`peak_memory_gib` of tensors on the GPU since the last call; empty if this process uses none."""
    import torch

    if not torch.cuda.is_initialized():  # also where it trains on the CPU of a machine with GPUs
        return {}
    peak = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.reset_peak_memory_stats()
    return {"peak_memory_gib": peak}
