"""`retouch doctor`: check the environment, and whether it can run a given file.

Nothing is trained, and networks are built without weights. A missing package is reported once, by its extra's line.
"""

from __future__ import annotations

from collections.abc import Sequence

from retouch.config.run import RunConfig
from retouch.doctor.adapter import adapter_lines, distillation_lines
from retouch.doctor.capacity import checkpoint_line, memory_line
from retouch.doctor.data import data_lines, login_lines, needs_no_t5, start_lines
from retouch.doctor.launch import launch_extras
from retouch.doctor.line import Line
from retouch.doctor.machine import disk_here, extra_lines, find_gpus, gpu_lines
from retouch.doctor.memory import network_weights
from retouch.doctor.model import find_model, model_lines
from retouch.doctor.networks import build_networks
from retouch.doctor.rewards import needed_extras, reward_lines
from retouch.families.prompts import PromptCheck


def diagnose(run: RunConfig | None = None, world_size: int = 1) -> list[Line]:
    """Every check of the machine, and of a run on `world_size` processes."""
    gpus = find_gpus()
    lines = [*extra_lines(needed_extras(run) if run else None, launch_extras(run))]
    if run is None:
        return [*lines, *gpu_lines(gpus, world_size), disk_here()]
    found = find_model(run.model, embedded=needs_no_t5(run))
    networks = build_networks(run.model, found)
    check_prompts = PromptCheck(run, local=True) if found.folder and not found.problems else None
    return [
        *lines,
        *gpu_lines(gpus, world_size, network_weights(run, networks)),
        *model_lines(run.model, found),
        *adapter_lines(run.model, networks),
        *distillation_lines(run.model),
        memory_line(run, networks, gpus, world_size),
        checkpoint_line(run, networks),
        *data_lines(run, world_size, check_prompts),
        *start_lines(run),
        *login_lines(run),
        *reward_lines(run),
    ]


def table(lines: Sequence[Line]) -> str:
    """The lines, and the number of them to fix."""
    rows = [f"{line.status:8} {line.what:22} {line.says}" for line in lines]
    broken = sum(line.status == "fix" for line in lines)
    verdict = f"{broken} to fix" if broken else "nothing to fix"
    return "\n".join([*rows, verdict])
