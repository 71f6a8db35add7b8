"""Versions and machine of a run, for its environment.json."""

from __future__ import annotations

import os
import platform
import sys
import time
from typing import Any

from retouch.observe.measuring import Measurement
from retouch.process.machine import installed_version

PACKAGES = (
    "retouch",
    "torch",
    "diffusers",
    "transformers",
    "peft",
    "accelerate",
    "rapidocr",
    "onnxruntime",
    "numpy",
    "pillow",
)


def environment() -> dict[str, Any]:
    """Versions and machine, to repeat the run."""
    import torch

    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": {name: version for name in PACKAGES if (version := installed_version(name, ""))},
        "gpus": Measurement("names of the GPUs in environment.json").take(_gpu_names) or [],
        "processes": int(os.environ.get("WORLD_SIZE", "1")) if "LOCAL_RANK" in os.environ else 1,  # as `Engine`
        "threads": torch.get_num_threads(),
        "command": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _gpu_names() -> list[str]:
    """Names of the GPUs that torch can use; `device_count` may include others, for example with an old driver."""
    import torch

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)]
