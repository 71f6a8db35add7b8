"""Whether memory and disk suffice for a run, as `retouch.doctor.memory` counts: two lines of `retouch doctor`."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from retouch.config import dump_run, parse_run
from retouch.config.derived import kept_checkpoints
from retouch.config.errors import ConfigError
from retouch.config.load import overlaid
from retouch.config.run import RunConfig
from retouch.doctor.line import Line, size
from retouch.doctor.memory import checkpoint_bytes, count_weights, device_bytes, host_bytes, why_unknown
from retouch.doctor.networks import Networks
from retouch.process.machine import container_limit

if TYPE_CHECKING:
    from retouch.doctor.machine import Gpus

_TIGHT = 0.9
"""Share of the memory above which the counted part leaves too little for the rest, such as activations."""


_LESS = (
    *("model.quantize=nf4", "model.train.kind=lora", "model.train.rank=4", "model.train.tokens=16"),
    *("model.train.weights=kv_lora", "ema=null evaluation.weights=raw", "model.dtype=bf16"),
    *("model.offload_text_encoders=true", "training.sharding=fsdp2", "training.sharding=zero2"),
)
"""Options of a run file that may take less memory."""


def memory_line(run: RunConfig, networks: Networks, gpus: Gpus, world_size: int) -> Line:
    """Compare the counted part with the smallest device, or with the machine's memory if there is no GPU."""
    try:
        weights = count_weights(run, networks)
    except ConfigError as error:
        return Line("fix", "memory", str(error))
    if weights is None:
        return Line("warning", "memory", f"not counted: {why_unknown(run, networks)}")
    if not weights.trained:
        return Line("fix", "memory", "model.train.targets match no weight of the network; leave targets out")
    from retouch.doctor.scorers import scorers_beside

    scorers, unknown = scorers_beside(run, world_size)
    beside = sum(count for _, count in scorers.values())
    need = device_bytes(run, weights, world_size) + beside
    # Each process has a GPU of its own, of which the smallest decides; others may use the rest. Without GPUs all
    # processes share the memory of the machine, or of the container if that has less, and what would wait there for a
    # GPU counts as well.
    if used := gpus.usable[:world_size]:
        has, free, where = min(g.memory for g in used), min(g.free for g in used), "a GPU"
    else:
        need = world_size * (need + host_bytes(run, weights))
        machine, container = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), container_limit()
        free = has = min(machine, container or machine)
        where = "this machine" if has == machine else "this container or job"
    parts = "" if weights.whole else " (text encoders, VAE or image encoder are not here to be counted)"
    frozen = weights.frozen + weights.adapter
    parts += f", {size(beside)} of networks of {', '.join(scorers)}" if scorers else ""
    parts += f" (without the networks of {', '.join(unknown)}, whose sizes are not known)" if unknown else ""
    counted = (
        f"{size(need)} counted for {weights.trained:,} trained and {frozen:,} frozen weights of the network"
        f"{parts}, {size(has)} in {where}; activations come on top"
    )
    counted += f" (not known: {assumed})" if (assumed := run.model.assumed_sizes) is not None else ""
    if need > has:
        less = _less(run, networks, world_size, on_gpus=bool(used))
        remedy = f"set {', '.join(less)}, or take a larger one" if less else "take a larger one"
        return Line("fix", "memory", f"{counted}; {remedy}")
    if need > free:
        return Line("fix", "memory", f"{counted}; only {size(free)} is free: end what holds the rest (nvidia-smi)")
    if need > _TIGHT * has:
        return Line(
            "warning",
            "memory",
            f"{counted}; set training.gradient_checkpointing=true, optimizer.steps_per_forward=1 and small batches",
        )
    return Line("ok", "memory", counted)


def _less(run: RunConfig, networks: Networks, world_size: int, *, on_gpus: bool) -> list[str]:
    """Those of `_LESS` that the run file may have and with which less is counted, with "or instead" before one that
    excludes some before it; on GPUs sharding of a run on one process as on two."""
    processes, found = max(2, world_size) if on_gpus else world_size, list[str]()
    together = dict[str, Any]()  # the changes of those found, which are accepted at once

    def counted(chosen: RunConfig) -> int:
        weights = count_weights(chosen, networks)
        assert weights is not None, "of the same networks"
        return device_bytes(chosen, weights, processes) + (0 if on_gpus else host_bytes(chosen, weights))

    now, written = counted(run), yaml.safe_load(dump_run(run))
    for options in _LESS:
        changes = {key: yaml.safe_load(value) for key, _, value in (o.partition("=") for o in options.split())}
        if run.model.train.kind != "full" and "model.train.kind" in changes:
            continue  # a style adapter is another task
        if "training.sharding" in changes and any("sharding" in other for other in found):
            continue
        with suppress(ConfigError):
            if counted(parse_run(overlaid(written, changes, warns=False))) < now:
                named = options + " on several devices" * ("sharding" in options and world_size == 1)
                fits = _is_accepted(overlaid(written, together | changes, warns=False))
                found.append(named if fits else f"or instead {named}")
                together |= changes if fits else {}
    return found


def _is_accepted(written: dict[str, Any]) -> bool:
    try:
        parse_run(written)
    except ConfigError:
        return False
    return True


def checkpoint_line(run: RunConfig, networks: Networks) -> Line:
    """Compare the free disk at the run directory with the size of the checkpoints of the run."""
    place = Path(run.logging.dir).expanduser().absolute()
    exists = next(parent for parent in (place, *place.parents) if parent.exists())
    if not exists.is_dir() or not os.access(exists, os.W_OK):
        return Line("fix", "disk", f"{place}: {exists} is no folder that can be written to; set logging.dir")
    free = shutil.disk_usage(exists).free
    try:
        weights = count_weights(run, networks)
    except ConfigError:  # reported in the line above
        weights = None
    if weights is None:
        return Line("ok", "disk", f"{size(free)} free in {exists}; the size of a checkpoint is not known")
    one, kept = checkpoint_bytes(run, weights), kept_checkpoints(run)
    counted = f"{size(free)} free in {exists}; a checkpoint takes {size(one)}, {kept} are kept"
    if free < 2 * one:  # a new one is written before an old one goes
        return Line("fix", "disk", f"{counted}, and two must fit at a time; free some, or set logging.dir")
    if free < kept * one:
        return Line("warning", "disk", f"{counted}; set training.keep_checkpoints, or logging.dir")
    return Line("ok", "disk", counted)
