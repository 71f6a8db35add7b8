"""Settings that all threads of a process share and the numbers of a run depend on: torch's default dtype, its switches,
the global random generators, and what libraries take from the environment. No torch at import time.
"""

from __future__ import annotations

import logging
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)

OVERRULED = {
    "ACCELERATE_DYNAMO_BACKEND": "training.compile decides",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "the run file decides",
    "ACCELERATE_INIT_INCLUDE_BUFFERS": "networks are loaded with their buffers",
    "ACCELERATE_MIXED_PRECISION": "training.mixed_precision decides",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "training.sharding decides",
}
"""Variable that accelerate would take a setting from -> why it does not."""

_IDLE = {"", "0", "1", "no", "false"}
"""Values that change nothing; accelerate's launcher sets some of the variables to one of them."""

_one_at_a_time = threading.RLock()


def leave_to_the_run_file(mixed_precision: str) -> None:
    """Take the settings out of the environment that accelerate would apply beside those of the run file: its launcher
    or a shell put them there, and one run file would give two runs. Other processes that this one starts have none of
    them either.

    Args:
        mixed_precision: of the run, which a launcher may set, too.
    """
    for name, why in OVERRULED.items():
        value = os.environ.pop(name, "")
        if value.lower() not in {*_IDLE, mixed_precision}:
            logger.warning("%s=%s in the environment has no effect: %s", name, value, why)


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
