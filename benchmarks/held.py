"""What tensors hold on a device, measured where a step holds the most that lasts."""

from __future__ import annotations

import gc

import torch
from torch._subclasses.fake_tensor import FakeTensor  # what a compiler traced with; it has no memory

from retouch.training.build import Run


def held_bytes(device: torch.device) -> int:
    """Bytes of tensors: of the allocator on a GPU; on a CPU of every tensor that is alive, each storage once."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated()
    storages: dict[int, int] = {}
    for found in gc.get_objects():
        if isinstance(found, torch.Tensor) and not isinstance(found, FakeTensor) and found.device.type == "cpu":
            for tensor in (found, found.grad) if found.is_leaf else (found,):
                if tensor is not None:
                    storage = tensor.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def watched(run: Run, device: torch.device) -> list[int]:
    """Grows by what is held before every update: gradients are there, the moments from the second one on, and no
    activation."""
    held: list[int] = []
    step = run.engine.step

    def stepped(lr: float) -> dict[str, float]:
        held.append(held_bytes(device))
        return step(lr)

    run.engine.step = stepped  # type: ignore[method-assign]
    return held
