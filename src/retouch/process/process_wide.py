"""Settings that all threads of a process share and the numbers of a run depend on: torch's default dtype, its switches,
and the global random generators. No torch at import time.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

_one_at_a_time = threading.RLock()


@contextmanager
def loading() -> Iterator[None]:
    """Within it a model may be loaded: one at a time, and afterwards the process is as before.

    `from_pretrained` of transformers saves torch's default dtype, sets another and restores the saved one. If two
    threads are inside it, the one that enters second saves the other's dtype, and leaves the process with it.
    """
    with _one_at_a_time:
        if sys.modules.get("torch") is None:  # nothing in this process can depend on it yet
            yield
            return
        before = [(write, read()) for read, write in _switches()], rng_state()
        try:
            yield
        finally:
            for write, value in before[0]:
                write(value)
            set_rng_state(before[1])


def _switches() -> list[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """How to read and to set each; torch's default device, number of threads and gradient mode belong to a thread."""
    import torch
    from torch.backends import cudnn

    return [
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        (lambda: cudnn.benchmark, lambda value: setattr(cudnn, "benchmark", value)),
        (lambda: cudnn.deterministic, lambda value: setattr(cudnn, "deterministic", value)),
    ]


def rng_state() -> dict[str, Any]:
    """State of the global random generators. The run's own seeds are derived; libraries may use these. A process that
    has not used CUDA yet has no state there, and reading it would take memory of every GPU."""
    import torch

    name, keys, position, has_gauss, cached = np.random.get_state()
    version, internal, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "numpy": [name, torch.from_numpy(np.asarray(keys, np.int64)), position, has_gauss, cached],  # pyright: ignore
        "python": [version, list(internal), gauss],
    }


def set_rng_state(state: dict[str, Any]) -> None:
    import torch

    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
