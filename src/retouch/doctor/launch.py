"""How accelerate is told to share out what TRL trains: `accelerate launch --config_file FILE`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from retouch.config.errors import ConfigError

_STAGES = ("0", "1", "2", "3")
_OFF_THE_GPU = ("cpu", "nvme")


@dataclass(frozen=True)
class Launch:
    """Processes and DeepSpeed of a run of vlm_grpo.

    Attributes:
        stage: of ZeRO; 0: none, every process holds everything.
        optimizer_waits: its state is off the GPU, on the CPU or on NVMe, which is counted as the CPU.
        weights_wait: under stage 3, pieces of weights are, too.
        processes: how many.
    """

    stage: int = 0
    optimizer_waits: bool = False
    weights_wait: bool = False
    processes: int = 1


def read_launch(file: Path) -> Launch:
    """Of accelerate's configuration.

    Raises:
        ConfigError: no such file, one of another engine, or one that leaves open what is counted.
    """
    try:
        given: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        given = None
    if not isinstance(given, Mapping):
        raise ConfigError(f"--accelerate: {file} is no configuration of accelerate; give configs/accelerate/zero2.yaml")
    config = cast("Mapping[str, Any]", given)
    processes = str(config.get("num_processes", 1))
    if not processes.isdecimal() or int(processes) < 1:
        raise ConfigError(f"--accelerate: {file}: num_processes is {processes}; write how many are launched, like 8")
    kind = config.get("distributed_type", "NO")
    if kind in ("NO", "MULTI_GPU", "MULTI_CPU"):
        return Launch(processes=int(processes))
    engine: Any = config.get("deepspeed_config")
    options = cast("Mapping[str, Any]", engine if isinstance(engine, Mapping) else {})
    stage = str(options.get("zero_stage"))
    if kind != "DEEPSPEED" or stage not in _STAGES:
        raise ConfigError(
            f"--accelerate: {file} is of {kind}, or leaves zero_stage to a file of DeepSpeed's own; give one that says "
            "distributed_type DEEPSPEED and zero_stage 0 to 3, like configs/accelerate/zero3.yaml"
        )
    return Launch(
        stage=int(stage),
        optimizer_waits=options.get("offload_optimizer_device") in _OFF_THE_GPU,
        weights_wait=options.get("offload_param_device") in _OFF_THE_GPU,
        processes=int(processes),
    )
