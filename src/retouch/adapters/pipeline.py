"""A diffusers pipeline with the trained network in its place.

Under a LoRA the network is loaded as a run loads it: of `model.transformer`, with a few-step LoRA merged into it. Full
weights are a whole network, and that of the base is not read. The other parts are copied as the files of the base,
unread: classes of the released pipelines need packages that training does without (torchvision), and a text encoder can
be larger than the network.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffusers
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from retouch.adapters.lora import folded_lora
from retouch.errors import ModelFilesError, why_unreadable
from retouch.families.loading import DTYPES, load_network
from retouch.families.meta import component_on_meta
from retouch.files import plain_json
from retouch.files.hub import require_hub
from retouch.files.model_files import INDEX, component_path, components

if TYPE_CHECKING:
    from retouch.families.base import DistillationLora, ModelSection

logger = logging.getLogger(__name__)

KEPT = 0.95
"""Share of a LoRA's update that its fused weights keep; with less, the export warns. In bf16 that is an update of less
than some 0.4 % of the weights, by their norms."""


_WITHOUT_WEIGHTS = ("tokenizer", "processor_config", "preprocessor_config")
"""How names of files begin in the folder of a part that has no weights."""


def save_pipeline(model: ModelSection, weights: Path, out: Path) -> None:
    """Write the pipeline of a run file with trained weights, as diffusers loads it.

    Raises:
        ConfigError, ModelFilesError: the base, or one of its parts, is missing or unreadable.
        ValueError: weights that are missing or do not fit.
    """
    name = model.spec.network_name
    if model.train.kind == "full":
        network = _full_network(model, weights)
    else:
        network = load_network(model, DTYPES[model.dtype])
        _report_rounding(fuse(network, folded_lora(weights, name)[0]), model.dtype)
    network.save_pretrained(str(out / name), safe_serialization=True)
    _copy_parts(_base_folder(model, network), name, out)
    if model.merged_lora is not None:
        _set_schedule(model.merged_lora, out)
    if model.weights_variant is not None:
        logger.info("parts that were not trained keep their files: load it with variant=%r", model.weights_variant)


def _full_network(model: ModelSection, weights: Path) -> Any:
    """The network of full weights in the dtype of the run file. Neither the network of the base nor all weights in fp32
    are in memory beside it: of 12 B weights these are 24 and 48 GB.

    Raises:
        ValueError: weights that are missing, damaged, or do not fit, or that the dtype cannot hold.
    """
    try:
        network = component_on_meta(weights, model.spec.networks[model.spec.network_name])
    except ModelFilesError as error:  # these files are of the checkpoint and not of a model that can be copied anew
        raise ValueError(str(error).removeprefix("model.path: ").removesuffix("; copy the model anew")) from None
    known, dtype = network.state_dict(), DTYPES[model.dtype]
    state: dict[str, Tensor] = {}
    wrong: set[str] = set()
    for name, tensor in _tensors(weights):
        if name in known and known[name].shape == tensor.shape:
            state[name] = tensor.to(_dtype_in(network, name, dtype) if tensor.is_floating_point() else tensor.dtype)
            if not bool(state[name].isfinite().all()):
                raise ValueError(
                    f"{weights}: {name} overflows in model.dtype {model.dtype}; use --to safetensors, which keeps fp32"
                )
        else:
            wrong.add(name)
    parameters = {name for name, _ in network.named_parameters(remove_duplicate=False)}
    wrong |= parameters - state.keys()
    if wrong:  # diffusers initializes them at random without an error
        raise ValueError(f"{weights}: {len(wrong)} weights are missing or do not fit, {min(wrong)} among them")
    if known.keys() - state.keys():  # earlier versions saved no buffers, such as the table of positions of SD3
        state = load_network(model, dtype).state_dict() | state
    network.load_state_dict(state, assign=True)
    return network


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The full weights in a folder, with one of its files in memory at a time.

    Raises:
        ValueError: no such files, or a damaged one.
    """
    files = sorted(folder.glob("diffusion_pytorch_model*.safetensors"))
    if not files:
        raise ValueError("no diffusion_pytorch_model*.safetensors in it, which model.train.kind=full needs")
    for file in files:
        try:
            tensors = load_file(file)
        except SafetensorError as error:
            raise ValueError(f"damaged weights ({error})") from None
        while tensors:
            yield tensors.popitem()


def _dtype_in(network: Any, name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a weight in a network that diffusers loads in `dtype`: some classes keep parts in fp32."""
    kept = network._keep_in_fp32_modules or ()
    return torch.float32 if any(part in kept for part in name.split(".")) else dtype


@torch.no_grad()
def fuse(network: nn.Module, lora: Mapping[str, Tensor]) -> float:
    """Add a LoRA to the weights of a network, in their dtype -> the share of the update that rounding keeps, 1 for all.

    The share is the projection of the change of the weights on the update, over all of them: a weight changes by whole
    steps of its dtype, and by none where the update is less than half a step.

    Args:
        lora: of `folded_lora`.

    Raises:
        ValueError: a factor of a weight that the network does not have, or a sum that its dtype cannot hold.
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
        if not bool(weight.isfinite().all()):
            raise ValueError(f"{module}.weight overflows in {weight.dtype} with the LoRA; use --to diffusers-lora")
        kept += float(((weight.float() - before) * update).sum(dtype=torch.float64))
        whole += float(update.square().sum(dtype=torch.float64))
    return kept / whole if whole else 1.0


def _weight(network: nn.Module, module: str) -> nn.Parameter:
    try:
        return network.get_parameter(f"{module}.weight")
    except AttributeError:
        raise ValueError(f"the LoRA adapts {module}, which {type(network).__name__} does not have") from None


def _report_rounding(kept: float, dtype: str) -> None:
    if kept < KEPT:
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
        return Path(_downloaded(path, given, model.weights_variant))
    except Exception as error:
        if (problem := why_unreadable(error)) is None:
            raise
        raise ModelFilesError(f"model.path: cannot download the other parts of {path}: {problem}") from None


def _downloaded(path: str, given: Mapping[str, Any], variant: str | None) -> Any:
    """The snapshot of a hub id: with the files of a variant, or with plain ones where it has none of the variant."""
    download: Any = diffusers.DiffusionPipeline.download
    if variant is not None:
        with suppress(ValueError):  # diffusers finds no such files
            return download(path, variant=variant, **given)
    return download(path, **given)


def _copy_parts(folder: Path, trained: str, out: Path) -> None:
    """Copy the parts of a pipeline that were not trained, and its index.

    Raises:
        ModelFilesError: one that the index names is missing, or is a network without weights.
    """
    for name in components(folder):
        if name == trained:
            continue
        if not (folder / name).is_dir():
            raise ModelFilesError(
                f"model.path: {folder} has no {name}/, which its {INDEX} names; copy the model anew, or export another "
                "format"
            )
        if _lacks_weights(folder / name):
            raise ModelFilesError(
                f"model.path: {folder / name} has a config.json and no weights; copy the model anew, or export another "
                "format"
            )
        for file in sorted(path for path in (folder / name).rglob("*") if path.is_file()):
            place = out / file.relative_to(folder)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, place)  # files of the hub's cache are links
    shutil.copyfile(folder / INDEX, out / INDEX)


def _lacks_weights(part: Path) -> bool:
    """Whether a part is a network without its weights. Tokenizers and processors may have a config.json too."""
    names = [file.name for file in part.rglob("*") if file.is_file()]
    if "config.json" not in names or any(name.startswith(_WITHOUT_WEIGHTS) for name in names):
        return False
    return not any(name.endswith((".safetensors", ".bin")) for name in names)


def _set_schedule(lora: DistillationLora, out: Path) -> None:
    """Write the shift of a few-step LoRA into the scheduler, as training samples with it, and log how to sample."""
    logger.info("%s is part of the network: sample with its number of steps and without guidance", lora.path)
    if lora.shift is None:
        return
    file = out / "scheduler" / "scheduler_config.json"
    config = plain_json.loads(file.read_text(encoding="utf-8"))
    config |= {"use_dynamic_shifting": False, "shift": lora.shift, "shift_terminal": None}
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
