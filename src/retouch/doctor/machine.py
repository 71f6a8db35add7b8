"""Versions, extras, GPUs and disk. torch is imported only if it is installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from retouch.doctor.line import GIB, Line, size
from retouch.errors import first_line
from retouch.process.machine import installed_version, nvidia_smi

EXTRAS = {
    "train": ("torch", "diffusers", "transformers", "accelerate", "peft", "safetensors", "huggingface_hub"),
    "serve": ("fastapi", "uvicorn", "starlette"),
    "ocr": ("rapidocr", "onnxruntime"),
    "readers": ("tesserocr", "ddddocr"),
    "vlm": ("trl", "datasets"),
    "deepspeed": ("deepspeed",),
    "quantize": ("bitsandbytes",),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
    "ui": ("gradio",),
}
"""Extra -> modules that the package imports from it."""

_REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?(?:>=([0-9.]+))?[^;]*(?:;.*extra == ['\"](\w+)['\"])?")

_LOW_DISK = 10 * GIB
"""Free space below which there is a warning: models are downloaded."""

_TINY = 20_000_000
"""Number of weights that a CPU can train; the tiny bases have one or two million."""


@dataclass(frozen=True)
class Gpu:
    """Memory in bytes, and the part of it that is free."""

    name: str
    memory: int
    free: int


@dataclass(frozen=True)
class Gpus:
    """GPUs that torch can use.

    Attributes:
        installed: names that `nvidia-smi` lists.
        problem: why torch could not be imported.
        failing: number of a GPU that torch lists but cannot use -> its error.
    """

    usable: list[Gpu]
    installed: list[str]
    torch: str | None
    problem: str | None = None
    failing: Mapping[int, str] = field(default_factory=dict[int, str])


def extra_lines(needed: Collection[str] | None, optional: Mapping[str, str]) -> Iterator[Line]:
    """The versions of this package, of Python and of the system; then check that the packages of the base and of each
    extra are installed and recent enough.

    Args:
        needed: extras that the run needs; None without a run.
        optional: extras that it may need -> what for.
    """
    version = importlib.metadata.version("retouch")
    yield Line("ok", "retouch", f"{version}, Python {sys.version.split()[0]}, {platform.platform()}")
    # A missing package is to fix only where it is known to be needed: without a run file the user may train anything,
    # and with one most extras may stay away.
    for extra in ("", *EXTRAS):
        problems = [problem for name, least in _required(extra) if (problem := _problem(name, least))]
        what = f"extra {extra}" if extra else "base packages"
        remedy = f'pip install -U "retouch[{extra}]"' if extra else "pip install -U retouch"
        if not problems:
            yield Line(
                "ok", what, ", ".join(f"{name} {importlib.metadata.version(name)}" for name, _ in _required(extra))
            )
        elif not extra or (needed is not None and extra in needed):
            yield Line("fix", what, f"{'; '.join(problems)}: {remedy}")
        elif needed is None:
            yield Line("warning", what, f"{'; '.join(problems)}; for that part: {remedy}")
        elif extra in optional:
            yield Line("warning", what, f"{'; '.join(problems)}; {optional[extra]}: {remedy}")
        else:
            yield Line("ok", what, f"{'; '.join(problems)}, but the run does not need it")
    for extra in sorted({*(needed or ())} - {*EXTRAS}):
        yield Line(
            "fix", f"extra {extra}", f"retouch has no such extra; set extras of the reward to {', '.join(EXTRAS)}"
        )


def _required(extra: str) -> list[tuple[str, str]]:
    """(name, minimum version or "") of the packages of an extra, or of the base for ""."""
    matches = [_REQUIREMENT.match(text) for text in importlib.metadata.requires("retouch") or []]
    return [(match[1], match[2] or "") for match in matches if match and (match[3] or "") == extra]


def _problem(name: str, least: str) -> str | None:
    if not (found := installed_version(name, "")):
        return f"{name} is not installed"
    return f"{name} is {found}, at least {least} is needed" if _numbers(found) < _numbers(least) else None


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version.partition("+")[0])]


def find_gpus() -> Gpus:
    """The GPUs by torch and by `nvidia-smi`."""
    installed = nvidia_smi()
    if importlib.util.find_spec("torch") is None:
        return Gpus([], installed, None)
    try:
        import torch
    except (ImportError, OSError) as error:  # a library of another version or machine
        return Gpus([], installed, None, f"torch is installed but cannot be imported: {first_line(error)}")
    usable: list[Gpu] = []
    failing: dict[int, str] = {}
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        try:
            free, total = torch.cuda.mem_get_info(i)
            usable.append(Gpu(torch.cuda.get_device_name(i), total, free))
        except RuntimeError as error:  # full, in use by one process alone, or broken
            failing[i] = first_line(error)
    return Gpus(usable, installed, str(torch.__version__), failing=failing)


def gpu_lines(gpus: Gpus, world_size: int, weights: int | None = None) -> Iterator[Line]:
    """Lines on the GPUs, and whether there is one for each process.

    Args:
        weights: number of weights of the trained network, if known.
    """
    # Each cause has its own remedy: a broken torch, a GPU that fails and too few GPUs come first, and then why there
    # are none. No GPU is fine only for a network that trains on the CPU within minutes.
    if gpus.problem:
        yield Line("fix", "torch", f"{gpus.problem}; reinstall it")
    for i, problem in gpus.failing.items():
        yield Line(
            "fix",
            f"GPU {i}",
            f"torch cannot use it: {problem}; end what holds it (nvidia-smi), or hide it (CUDA_VISIBLE_DEVICES)",
        )
    for i, gpu in enumerate(gpus.usable):
        yield Line("ok", f"GPU {i}", f"{gpu.name}, {size(gpu.memory)}, {size(gpu.free)} of it free")
    if gpus.usable and world_size > (count := len(gpus.usable)):
        machines, rest = divmod(world_size, count)
        alone = "lower --num_processes (here --world-size), or check CUDA_VISIBLE_DEVICES"
        if rest or count == 1:
            yield Line("fix", "GPUs", f"{count} for {world_size} processes; {alone}")
        else:
            told = f"{count} for {world_size} processes, which takes {machines} machines like this one"
            yield Line("warning", "GPUs", f"{told}; without others, {alone}")
    if gpus.usable or gpus.problem or gpus.failing:
        return
    if gpus.installed and gpus.torch:
        yield Line(
            "fix",
            "GPUs",
            f"nvidia-smi lists {', '.join(gpus.installed)}, but torch {gpus.torch} can use none; install a torch built "
            "for the driver's CUDA version, and check CUDA_VISIBLE_DEVICES",
        )
    elif gpus.installed:
        yield Line("ok", "GPUs", f"nvidia-smi lists {', '.join(gpus.installed)}; torch is not installed")
    elif weights is not None and weights <= _TINY:
        yield Line("ok", "GPUs", f"none; a network of {weights:,} weights does not need one")
    else:
        yield Line("warning", "GPUs", "none: everything runs on the CPU, which is fast enough for tiny bases only")


def disk_here() -> Line:
    """Free space of the working directory."""
    free = shutil.disk_usage(Path.cwd()).free
    if free < _LOW_DISK:
        return Line("warning", "disk", f"{size(free)} free in {Path.cwd()}; models and checkpoints need more")
    return Line("ok", "disk", f"{size(free)} free in {Path.cwd()}")
