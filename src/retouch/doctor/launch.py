"""How accelerate is told to share out what TRL trains: `accelerate launch --config_file FILE`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from retouch.config.errors import ConfigError


@dataclass(frozen=True)
class Launch:
    """DeepSpeed of a run of vlm_grpo.

    Attributes:
        stage: of ZeRO; 0: none, every process holds everything.
        optimizer_waits: its state is on the CPU.
        weights_wait: under stage 3, pieces of weights are on the CPU, too.
    """

    stage: int = 0
    optimizer_waits: bool = False
    weights_wait: bool = False


def read_launch(file: Path) -> Launch:
    """Of accelerate's configuration.

    Raises:
        ConfigError: no such file, or one of another engine.
    """
    try:
        given: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        given = None
    if not isinstance(given, Mapping):
        raise ConfigError(f"--accelerate: {file} is no configuration of accelerate; give configs/accelerate/zero2.yaml")
    config = cast("Mapping[str, Any]", given)
    kind = config.get("distributed_type", "NO")
    if kind in ("NO", "MULTI_GPU", "MULTI_CPU"):
        return Launch()
    engine: Mapping[str, Any] = config.get("deepspeed_config") or {}
    if kind != "DEEPSPEED" or "zero_stage" not in engine:
        raise ConfigError(
            f"--accelerate: {file} is of {kind}, or names a file of DeepSpeed's own; give one that says "
            "distributed_type DEEPSPEED and zero_stage, like configs/accelerate/zero3.yaml"
        )
    return Launch(
        stage=int(engine["zero_stage"]),
        optimizer_waits=engine.get("offload_optimizer_device") == "cpu",
        weights_wait=engine.get("offload_param_device") == "cpu",
    )
