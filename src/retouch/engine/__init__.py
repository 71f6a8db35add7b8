"""Processes, devices, precision, optimizer steps and checkpoints: the only importer of accelerate and DeepSpeed.

Names are loaded on first use: reading checkpoint directories (`saved`) does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retouch.engine.checkpoint import Checkpoints
    from retouch.engine.engine import Engine, Launched, gather_list
    from retouch.engine.policy import Policy
    from retouch.errors import CheckpointError, Diverged, OutOfMemory

__all__ = ["CheckpointError", "Checkpoints", "Diverged", "Engine", "Launched", "OutOfMemory", "Policy", "gather_list"]

_WHERE = {"Checkpoints": "checkpoint", "Engine": "engine", "Launched": "engine", "Policy": "policy"} | {
    "gather_list": "engine"
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = f"{__name__}.{_WHERE[name]}" if name in _WHERE else "retouch.errors"
    return getattr(importlib.import_module(module), name)
