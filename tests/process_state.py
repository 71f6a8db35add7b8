"""What every thread of a process shares, as values that can be compared."""

from __future__ import annotations

import importlib
import locale
import logging
import os
import random
import socket
import sys
import warnings
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageFile
import torch

OF_OTHERS = {"PYTEST_CURRENT_TEST", "LD_LIBRARY_PATH"}
"""Variables that pytest sets, and opencv's wheel when it is imported, which lasts for later imports only."""


def process_state() -> dict[str, Any]:
    """By name; of a thread's own settings, those of this thread."""
    name, keys, *rest = np.random.get_state()
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "deterministic algorithms": torch.get_deterministic_debug_mode(),
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32),
        "precision of matrix products": torch.get_float32_matmul_precision(),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")),
        "threads": torch.get_num_threads(),
        "torch's generator": torch.get_rng_state().numpy().tobytes(),
        "numpy's generator": (name, np.asarray(keys).tobytes(), *rest),
        "python's generator": random.getstate(),
        "numpy's errors": tuple(np.geterr().items()),
        "environment": {name: value for name, value in os.environ.items() if name not in OF_OTHERS},
        "warnings": list(warnings.filters),
        "locale": locale.setlocale(locale.LC_ALL),
        "limits of Pillow": (PIL.Image.MAX_IMAGE_PIXELS, PIL.ImageFile.LOAD_TRUNCATED_IMAGES),
        "verbosity": tuple(verbosity(library) for library in ("transformers", "diffusers", "huggingface_hub")),
        "root logger": (logging.root.level, logging.root.disabled, logging.root.manager.disable),
        "sockets' timeout": socket.getdefaulttimeout(),
        "recursion": sys.getrecursionlimit(),
        "search path": list(sys.path),
    }


def verbosity(library: str) -> int | None:
    """Of its log; None if nothing has imported it."""
    if library not in sys.modules:
        return None
    return importlib.import_module(f"{library}.utils.logging").get_verbosity()


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names of what differs."""
    return [name for name, value in before.items() if after[name] != value]
