"""A diffusers pipeline with the trained network in its place.

The network is loaded as a run loads it: of `model.transformer`, with a few-step LoRA merged into it. The other parts
are copied as the files of the base, unread: classes of the released pipelines need packages that training does without
(torchvision), and a text encoder can be larger than the network.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffusers
import torch
from torch import Tensor, nn

from retouch import plain_json
from retouch.adapters.lora import folded_lora
from retouch.adapters.trainee import FullWeights
from retouch.errors import ModelFilesError, why_unreadable
from retouch.families.loading import DTYPES, load_network
from retouch.hub import require_hub
from retouch.model_files import INDEX, component_path, components

if TYPE_CHECKING:
    from retouch.families.base import DistillationLora, ModelSection

logger = logging.getLogger(__name__)

KEPT = 0.95
"""Share of a LoRA's update that its fused weights keep; with less, the export warns. In bf16 that is an update of less
than some 0.4 % of the weights, by their norms."""


def save_pipeline(model: ModelSection, weights: Path, out: Path) -> None:
    """Write the pipeline of a run file with trained weights, as diffusers loads it.

    Raises:
        ConfigError, ModelFilesError: the base, or one of its parts, is missing or unreadable.
        ValueError: weights that are missing or do not fit.
    """
    name = model.spec.network_name
    network = load_network(model, DTYPES[model.dtype])
    if model.train.kind == "full":
        _load_full(network, weights)
    else:
        _report_rounding(fuse(network, folded_lora(weights, name)[0]), model.dtype)
    network.save_pretrained(str(out / name), safe_serialization=True)
    _copy_parts(_base_folder(model, network), name, out)
    if model.merged_lora is not None:
        _set_schedule(model.merged_lora, out)
    if model.weights_variant is not None:
        logger.info("parts that were not trained keep their files: load it with variant=%r", model.weights_variant)


def _load_full(network: nn.Module, weights: Path) -> None:
    """Replace every weight of a network.

    Raises:
        ValueError: weights that are missing or do not fit.
    """
    state, known = FullWeights(network).load(weights), network.state_dict()
    wrong = [name for name, _ in network.named_parameters() if name not in state]
    wrong += [name for name, tensor in state.items() if name not in known or known[name].shape != tensor.shape]
    if wrong:  # diffusers initializes them at random without an error
        raise ValueError(f"{weights}: {len(wrong)} weights are missing or do not fit, {wrong[0]} among them")
    network.load_state_dict(known | state)


@torch.no_grad()
def fuse(network: nn.Module, lora: Mapping[str, Tensor]) -> float:
    """Add a LoRA to the weights of a network, in their dtype -> the share of the update that rounding keeps, 1 for all.

    The share is the projection of the change of the weights on the update, over all of them: a weight changes by whole
    steps of its dtype, and by none where the update is less than half a step.

    Args:
        lora: of `folded_lora`.

    Raises:
        ValueError: a factor of a weight that the network does not have.
    """
    kept = whole = 0.0
    for name, a in lora.items():
        module, factor, rest = name.partition(".lora_A.")
        if not factor:
            continue
        weight = _weight(network, module)
        update = (lora[f"{module}.lora_B.{rest}"].float().flatten(1) @ a.float().flatten(1)).view_as(weight)
        before = weight.float().clone()
        weight.copy_(before + update)
        kept += float(((weight.float() - before) * update).sum(dtype=torch.float64))
        whole += float(update.square().sum(dtype=torch.float64))
    return kept / whole if whole else 1.0


def _weight(network: nn.Module, module: str) -> nn.Parameter:
    try:
        return network.get_parameter(f"{module}.weight")
    except AttributeError:
        raise ValueError(f"the LoRA adapts {module}, which {type(network).__name__} does not have") from None


def _report_rounding(kept: float, dtype: str) -> None:
    if not math.isfinite(kept) or kept < KEPT:
        logger.warning(
            "model.dtype: given %s, in which the fused weights keep %.0f %% of the LoRA's update: it is small beside "
            "the steps of that precision; for all of it use --to diffusers-lora",
            dtype,
            100 * kept,
        )


def _base_folder(model: ModelSection, network: nn.Module) -> Path:
    """The folder of the base; of a hub id its snapshot, with what a run did not need of it.

    Raises:
        ConfigError: a hub id that is not on this machine, and the hub cannot be reached.
        ModelFilesError: the hub does not have it.
    """
    path = component_path(model.path, model.family)
    if Path(path).is_dir():
        return Path(path)
    require_hub("model.path", path)
    given: dict[str, Any] = {model.spec.network_name: network}  # not downloaded
    try:
        return Path(diffusers.DiffusionPipeline.download(path, **given))
    except Exception as error:
        if (problem := why_unreadable(error)) is None:
            raise
        raise ModelFilesError(f"model.path: cannot download the other parts of {path}: {problem}") from None


def _copy_parts(folder: Path, trained: str, out: Path) -> None:
    """Copy the parts of a pipeline that were not trained, and its index.

    Raises:
        ModelFilesError: one that the index names is missing.
    """
    for name in components(folder):
        if name == trained:
            continue
        if not (folder / name).is_dir():
            raise ModelFilesError(
                f"model.path: {folder} has no {name}/, which its {INDEX} names; copy the model anew, or export another "
                "format"
            )
        for file in sorted(path for path in (folder / name).rglob("*") if path.is_file()):
            place = out / file.relative_to(folder)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, place)  # files of the hub's cache are links
    shutil.copyfile(folder / INDEX, out / INDEX)


def _set_schedule(lora: DistillationLora, out: Path) -> None:
    """Write the shift of a few-step LoRA into the scheduler, as training samples with it, and log how to sample."""
    logger.info("%s is part of the network: sample with its number of steps and without guidance", lora.path)
    if lora.shift is None:
        return
    file = out / "scheduler" / "scheduler_config.json"
    config = plain_json.loads(file.read_text(encoding="utf-8"))
    config |= {"use_dynamic_shifting": False, "shift": lora.shift, "shift_terminal": None}
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
