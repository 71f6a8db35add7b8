"""The computation of a step: network forwards, images, FLOPs and memory, counted by a hook on the network.

A forward-equivalent is one sample through the network once. A backward counts as two if every weight is trained, as one
if the network is frozen (LoRA, adapters), plus one for recomputation (gradient checkpointing). Classifier-free guidance
doubles the samples.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

    from retouch.observe.timing import Stopwatch

COUNTED = ("rollout", "train_forward", "train_backward", "eval")
"""Parts of a step in which the network computes."""

PEAKS: Mapping[str, float] = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12, "L40S": 362e12}
"""Dense bf16 FLOP/s by a part of the GPU's name, from NVIDIA's data sheets (SXM variants)."""


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
        self.peak = peak_flops(network)
        self._network = network
        self._backward = (1 if frozen else 2) + (1 if recomputes else 0)
        self._model_backward = 1 if frozen else 2
        self._rows: dict[str, int] = defaultdict(int)
        self._flops = 0.0
        self._flops_of_row: dict[Any, float] = {}
        self._hook = network.register_forward_pre_hook(self._count, with_kwargs=True)

    def split(self, seconds: float) -> dict[str, float]:
        """Counts of this process since the last split: `nfe_PART` of each part, images, images per second and, on a
        GPU, peak memory, TFLOP/s and the share of the GPU's peak FLOP/s; resets them.

        Args:
            seconds: time since the last split.
        """
        found = {f"nfe_{part}": float(self._rows[part]) for part in COUNTED if self._rows[part]}
        found |= {"images": float(self.images), "images_per_s": self.images / seconds} if self.images else {}
        if self.peak is not None:
            found["tflops"] = self._flops / seconds / 1e12
            found["mfu"] = self._flops / seconds / self.peak
        found |= peak_memory()
        self._rows.clear()
        self.images, self._flops = 0, 0.0
        return found

    def close(self) -> None:
        self._hook.remove()

    def _count(self, network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        import torch

        rows = len(first_tensor(args, kwargs))
        part = self.clock.current if self.clock.current in COUNTED else "rollout"
        trains = torch.is_grad_enabled()
        self._rows[part] += rows
        if trains:
            self._rows["train_backward"] += self._backward * rows
        if self.peak is not None:  # model FLOPs exclude recomputation
            self._flops += rows * self._flops_once(args, kwargs) * (1 + self._model_backward * trains)

    def _flops_once(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        shape = tuple(first_tensor(args, kwargs).shape[1:])
        if shape not in self._flops_of_row:
            self._flops_of_row[shape] = forward_flops(self._network, args, kwargs)
        return self._flops_of_row[shape]


def first_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """The latents in the arguments of a diffusers network [B, ...]."""
    return args[0] if args else kwargs["hidden_states" if "hidden_states" in kwargs else "sample"]


def forward_flops(network: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
    """FLOPs of a forward of one sample with these arguments (a multiply-add is two), counted on the meta
    device, without adapters."""
    import torch
    from torch.utils._pytree import tree_map_only
    from torch.utils.flop_counter import FlopCounterMode

    kind = next(c for c in type(network).__mro__ if c.__module__.startswith("diffusers."))  # not a sharded one
    config = dict(network.config)
    if config.get("encoder_hid_dim_type") == "ip_image_proj":  # diffusers sets it on a UNet with a style adapter
        config["encoder_hid_dim_type"] = None
    with torch.device("meta"):
        bare: Any = kind.from_config(config)  # type: ignore[attr-defined]
    dropped = ("joint_attention_kwargs", "attention_kwargs", "added_cond_kwargs")
    kwargs = {name: value for name, value in kwargs.items() if name not in dropped}
    args, kwargs = tree_map_only(
        torch.Tensor,
        lambda t: torch.empty_like(t, device="meta", dtype=torch.float32 if t.is_floating_point() else t.dtype),
        (args, kwargs),
    )
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        bare(*args, **kwargs)
    return counter.get_total_flops() / len(first_tensor(args, kwargs))


def peak_flops(network: Any) -> float | None:
    """Peak FLOP/s of the network's device; None if unknown."""
    import torch

    device = next(network.parameters()).device
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in PEAKS.items() if known in name), None)


def peak_memory() -> dict[str, float]:
    """`peak_memory_gib` of tensors on the GPU since the last call; empty without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return {}
    peak = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.reset_peak_memory_stats()
    return {"peak_memory_gib": peak}
