"""The accelerate configuration that a vlm_grpo run is launched with: `accelerate launch --config_file FILE`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from retouch.config.published import resolved
from retouch.config.run import RunConfig
from retouch.errors import ConfigError

_STAGES = ("0", "1", "2", "3")
_OFFLOADED = ("cpu", "nvme")


@dataclass(frozen=True)
class Launch:
    """Processes and DeepSpeed's sharding of a vlm_grpo run.

    Attributes:
        stage: ZeRO stage; 0: no sharding.
        optimizer_waits: the optimizer state is offloaded, to the CPU or to NVMe (counted as the CPU).
        weights_wait: under stage 3, weight shards are offloaded too.
        processes: number of processes.
    """

    stage: int = 0
    optimizer_waits: bool = False
    weights_wait: bool = False
    processes: int = 1


def launch_extras(run: RunConfig | None) -> dict[str, str]:
    """Extras that a run may need because of its accelerate configuration, which the run file does not name -> why."""
    if run is None or not run.algorithm.trains_text_encoder:
        return {}
    files = "configs/accelerate/zero2.yaml or zero3.yaml (`retouch init --example all` writes them)"
    return {"deepspeed": f"needed to launch on several GPUs with {files}"}


def read_launch(file: Path) -> Launch:
    """Read accelerate's configuration.

    Raises:
        ConfigError: no such file, another engine, or no number of processes or ZeRO stage.
    """
    place = resolved(file)
    try:
        given: Any = yaml.safe_load(place.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        given = None
    if not isinstance(given, Mapping):
        raise ConfigError(f"--accelerate: {file} is no configuration of accelerate; give example:accelerate/zero2")
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
            f"--accelerate: {file} is of {kind}, or leaves zero_stage to a DeepSpeed config file; give one with "
            "distributed_type DEEPSPEED and zero_stage 0 to 3, like example:accelerate/zero3"
        )
    return Launch(
        stage=int(stage),
        optimizer_waits=options.get("offload_optimizer_device") in _OFFLOADED,
        weights_wait=options.get("offload_param_device") in _OFFLOADED,
        processes=int(processes),
    )
