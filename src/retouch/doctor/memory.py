"""Memory and disk that a run takes at least, from the shapes of its weights: counted, not measured."""

from __future__ import annotations

import importlib
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from retouch.config import derive
from retouch.config.derived import snapshots
from retouch.config.model_sections import TrainIpAdapter, TrainLora
from retouch.config.schema import RunConfig
from retouch.doctor.line import Line, size
from retouch.doctor.machine import Gpus
from retouch.doctor.model import PIPELINES, Found, Shapes

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}

_TIGHT = 0.9
"""Share of the memory that the counted part may take before the rest, which is not counted, is unlikely to fit."""


@dataclass(frozen=True)
class Counted:
    """Weights of a run.

    Attributes:
        frozen: of the network beside what is trained.
        host: of text encoders that wait on the CPU.
        whole: False where only the network's size is known.
    """

    trained: int
    frozen: int
    others: int
    host: int
    whole: bool


def count_weights(run: RunConfig, found: Found) -> Counted | None:
    """From the files; from the released network where they are not here; None where neither tells, and for a style
    adapter, whose weights are not in the files of the network."""
    if isinstance(run.model.train, TrainIpAdapter):
        return None
    network, *_ = PIPELINES[run.model.family][1]
    shapes = found.weights.get(network) or (_released(run.model.family) if found.missing else None)
    if shapes is None:
        return None
    sizes = {name: number(found.weights[name]) for name in found.weights if name != network}
    text = sum(count for name, count in sizes.items() if name.startswith("text_"))
    stays = not (run.model.offload_text_encoders or run.model.free_text_encoders)
    train = run.model.train
    lora = isinstance(train, TrainLora)
    return Counted(
        trained=lora_weights(run, shapes) if lora else number(shapes),
        frozen=number(shapes) if lora else 0,
        others=sum(sizes.values()) - (0 if stays else text),
        host=0 if stays else text,
        whole=len(sizes) == len(PIPELINES[run.model.family][1]) - 1 or run.model.embeddings is not None,
    )


def network_weights(run: RunConfig, found: Found) -> int | None:
    """Weights of the network, where they can be counted."""
    network, *_ = PIPELINES[run.model.family][1]
    return number(found.weights[network]) if network in found.weights else None


def number(shapes: Mapping[str, Sequence[int]]) -> int:
    """Weights of a network."""
    return sum(math.prod(shape) for shape in shapes.values())


def lora_weights(run: RunConfig, shapes: Shapes) -> int:
    """Weights of the adapters: rank times the two sides of every adapted matrix."""
    train = run.model.train
    assert isinstance(train, TrainLora)
    targets = tuple(train.targets or _family_targets(run.model.family))
    adapted = [
        shape
        for name, shape in shapes.items()
        if len(shape) > 1 and any(f".{name}".endswith(f".{target}.weight") for target in targets)
    ]
    return train.rank * sum(shape[0] + math.prod(shape[1:]) for shape in adapted)


def _family_targets(family: str) -> Sequence[str]:
    from retouch.models import FAMILIES

    return importlib.import_module(FAMILIES[family].partition(":")[0]).LORA_TARGETS


def _released(family: str) -> Shapes | None:
    """Shapes of the released network, without weights; None without torch."""
    try:
        import torch

        from retouch.models import family_class

        with torch.device("meta"):
            network = family_class(family).released_network()
    except ImportError:
        return None
    return {name: tuple(weight.shape) for name, weight in network.named_parameters()}


def device_bytes(run: RunConfig, weights: Counted, world_size: int = 1) -> int:
    """What a process holds on its device before any activation: state of what is trained, frozen weights, and on
    several processes the buckets in which gradients travel. Of a sharded network its share, of gradients that are not
    sharded all."""
    state, frozen = derive(run, world_size).state_bytes_per_weight * weights.trained, weights.frozen
    gradients = 4 * weights.trained if world_size > 1 else 0
    if run.training.sharding == "fsdp2":
        state, frozen = math.ceil(state / world_size), math.ceil(frozen / world_size)
        gradients = 0 if run.training.shard_gradients else gradients
    return state + gradients + _BYTES[run.model.dtype] * (frozen + weights.others)


def checkpoint_bytes(run: RunConfig, weights: Counted) -> int:
    """A checkpoint: weights, two moments and each snapshot, in fp32."""
    return 4 * (3 + len(snapshots(run))) * weights.trained


def memory_line(run: RunConfig, found: Found, gpus: Gpus, world_size: int) -> Line:
    """The counted part against the smallest device, or against the machine's memory where there is no GPU."""
    weights = count_weights(run, found)
    if weights is None:
        unknown = (
            "weights of a style adapter" if run.model.train.kind == "ip_adapter" else "shapes of the network's weights"
        )
        return Line("warning", "memory", f"not counted: the {unknown} are not known")
    if not weights.trained:
        return Line("fix", "memory", "model.train.targets match no weight of the network; leave targets out")
    need = device_bytes(run, weights, world_size)
    if gpus.usable:
        has, free, where = min(g.memory for g in gpus.usable), min(g.free for g in gpus.usable), "a GPU"
    else:
        need = world_size * (need + _BYTES[run.model.dtype] * weights.host)
        has = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        free, where = has, "this machine"
    parts = "" if weights.whole else " (the network alone; text encoders and VAE are not here to be counted)"
    counted = (
        f"{size(need)} counted for {weights.trained:,} trained and {weights.frozen:,} frozen weights of the network"
        f"{parts}, {size(has)} in {where}; activations come on top"
    )
    if need > has:
        full = run.model.train.kind == "full"
        less = "model.train.kind=lora, ema=null" if full else "a smaller model.train.rank, model.dtype=bf16"
        less += ", training.sharding=fsdp2 on several devices" if run.training.sharding == "none" else ""
        return Line("fix", "memory", f"{counted}; set {less} or model.offload_text_encoders=true, or take a larger one")
    if need > free:
        return Line("fix", "memory", f"{counted}; only {size(free)} is free: end what holds the rest (nvidia-smi)")
    if need > _TIGHT * has:
        return Line(
            "warning",
            "memory",
            f"{counted}; set training.gradient_checkpointing=true, optimizer.steps_per_forward=1 and small batches",
        )
    return Line("ok", "memory", counted)


def checkpoint_line(run: RunConfig, found: Found) -> Line:
    """Free disk where the run directory will be, against the checkpoints that will lie there."""
    place = Path(run.logging.dir).expanduser().absolute()
    exists = next(parent for parent in (place, *place.parents) if parent.exists())
    if not exists.is_dir() or not os.access(exists, os.W_OK):
        return Line("fix", "disk", f"{place}: {exists} is no folder that can be written to; set logging.dir")
    free = shutil.disk_usage(exists).free
    weights = count_weights(run, found)
    if weights is None:
        return Line("ok", "disk", f"{size(free)} free in {exists}; the size of a checkpoint is not known")
    one, kept = checkpoint_bytes(run, weights), kept_checkpoints(run)
    counted = f"{size(free)} free in {exists}; a checkpoint takes {size(one)}, {kept} are kept"
    if free < 2 * one:  # a new one is written before an old one goes
        return Line("fix", "disk", f"{counted}, and two must fit at a time; free some, or set logging.dir")
    if free < kept * one:
        return Line("warning", "disk", f"{counted}; set training.keep_checkpoints, or logging.dir")
    return Line("ok", "disk", counted)


def kept_checkpoints(run: RunConfig) -> int:
    """Checkpoints at the end of the run: the regular ones, and those of the end of the warm-up and of the run."""
    training = run.training
    regular = training.max_steps // training.checkpoint_every if training.checkpoint_every else 0
    return min(regular, training.keep_checkpoints or regular) + 2
