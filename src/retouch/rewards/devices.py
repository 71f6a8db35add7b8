"""Devices of scorers: from `rewards.NAME.device` of a run file to devices of torch and of a reward server.

torch is imported only to count GPUs.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from retouch.errors import ConfigError

if TYPE_CHECKING:
    from retouch.rewards.base import RewardEntry

Devices = tuple[str, ...]
"""One device per instance: "cpu", "cuda:N", or ("cuda",) for the GPUs that the run trains on."""

CPU: Devices = ("cpu",)
TRAINED_ON: Devices = ("cuda",)


def own_device() -> str:
    """Device of a process without an engine: its GPU under a launcher, else the first GPU, else the CPU."""
    count = gpu_count()
    return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % count}" if count else "cpu"


def gpu_count() -> int:
    """Number of GPUs that torch can use; 0 without torch."""
    if importlib.util.find_spec("torch") is None:
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def visible_gpus() -> tuple[str, ...]:
    """Identifiers (UUID) of the GPUs that are visible to this process, by number: a launcher, or the control group of a
    job, may give each process another one under the same number. Slices of a GPU (MIG) may have its UUID: with one, the
    choice of CUDA_VISIBLE_DEVICES follows."""
    if not (count := gpu_count()):
        return ()
    import torch

    gpus = [torch.cuda.get_device_properties(number) for number in range(count)]
    chosen = [os.environ.get("CUDA_VISIBLE_DEVICES", "")] if any("MIG" in gpu.name for gpu in gpus) else []
    return (*(str(gpu.uuid) for gpu in gpus), *chosen)


def devices_of(name: str, entry: RewardEntry, own: str) -> Devices:
    """The devices of an entry that is scored in this process or by a server of the run.

    Args:
        own: the device that this process trains on.

    Raises:
        ConfigError: this machine does not have the GPU.
    """
    given = [entry.device] if isinstance(entry.device, str) else list(entry.device)
    if given == ["auto"]:
        given = ["cuda" if own.startswith("cuda") else "cpu"]
    where = f"rewards.{name}.device: given {entry.device!r}"
    if given == ["cuda"]:
        if not own.startswith("cuda"):
            raise ConfigError(f"{where}, but the run trains on {own}; set rewards.{name}.device=cpu, or auto")
        return TRAINED_ON if entry.url == "auto" else (numbered(own),)
    require(given, where)
    return tuple(given)


def require(devices: Sequence[str], where: str) -> None:
    """Raise ConfigError if one of the devices, "cpu" or "cuda:N", is missing; `where` begins the message."""
    numbers = [device.removeprefix("cuda:") for device in devices if device != "cpu"]
    count = gpu_count() if numbers else 0
    if not all(number.isdecimal() and int(number) < count for number in numbers):
        there = f"cuda:0 to cuda:{count - 1}" if count else "no GPU"
        raise ConfigError(f"{where}, but this machine has {there}; set a device that it has, or cpu")


def numbered(device: str) -> str:
    """The device with its number: "cuda" is "cuda:0" in torch."""
    return "cuda:0" if device == "cuda" else device


def instances(devices: Devices, trained_on: Iterable[str]) -> Devices:
    """One device per instance of a server; `trained_on` are the devices of the training processes of its machine."""
    return tuple(sorted({numbered(device) for device in trained_on})) if devices == TRAINED_ON else devices


def serve_argument(devices: Sequence[str]) -> str:
    """The devices as `retouch reward serve --devices` takes them."""
    return ",".join(device.removeprefix("cuda:") for device in devices)
