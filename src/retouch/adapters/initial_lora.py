"""The LoRA that training starts from: files of this package, diffusers, PEFT and kohya (sd-scripts, ComfyUI).

    diffusers   transformer.transformer_blocks.0.attn.to_q.lora_A.weight     alpha in the metadata; without it, the rank
    PEFT        base_model.model.transformer_blocks.0.attn.to_q.lora_A.weight    alpha in adapter_config.json
    kohya       lora_unet_down_blocks_0_..._to_q.lora_down.weight            alpha in .alpha tensors
    DanceGRPO   as diffusers, without metadata                               alpha in lora_config.json

    XLabs       double_blocks.0.processor.qkv_lora1.down.weight              alpha is the rank

Modules may have the names of the original networks. Those of U-Nets (kohya's SDXL files:
`lora_unet_input_blocks_4_1_...`) are known here. Those of transformers (kohya's FLUX files:
`lora_unet_double_blocks_0_img_attn_qkv`, where one weight is several of diffusers) go through the converters of
diffusers, which multiply the alpha / rank of `.alpha` tensors into the factors: alpha is then the rank.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffusers
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from retouch.adapters.lora import ADAPTER, FILE, adapted_modules
from retouch.adapters.unet_names import original_names
from retouch.config.errors import ConfigError
from retouch.errors import first_line
from retouch.files import plain_json
from retouch.files.complete import newest_weights, verify_weights

if TYPE_CHECKING:
    from retouch.families.base import FamilySpec, Train, TrainLora

logger = logging.getLogger(__name__)

KEY = "model.train.initial_adapter"

PEFT_CONFIG, PEFT_FILE = "adapter_config.json", "adapter_model.safetensors"

FASTVIDEO_CONFIG = "lora_config.json"
"""Config of FastVideo and DanceGRPO beside a file of diffusers, which has no metadata: alpha is there alone."""

_MOVES_BASE = re.compile(r"pissa|olora|corda|loftq|lora_ga")
"""Start of the initializations of PEFT that take the first update out of the weights of the base."""

_FACTORS = {
    "lora_A.weight": "A", f"lora_A.{ADAPTER}.weight": "A", "lora_down.weight": "A", "lora.down.weight": "A",
    "lora_B.weight": "B", f"lora_B.{ADAPTER}.weight": "B", "lora_up.weight": "B", "lora.up.weight": "B",
    "down.weight": "A", "up.weight": "B",
    "alpha": "alpha",
}  # fmt: skip
"""Ending of a key -> which part of an adapter the tensor is."""

_KEY = re.compile("|".join(re.escape(f".{ending}") + "$" for ending in _FACTORS))

_OF_TEXT_ENCODERS = re.compile(r"(base_model\.model\.)?(lora_te\d?_|text_encoder(_\d)?\.)")
"""Start of the keys of text encoders, by all programs."""


@dataclass(frozen=True)
class LoraFile:
    """A LoRA in memory, checked.

    Attributes:
        factors: module name -> (A [rank, in], B [out, rank]).
        alpha: updates are alpha / rank · B A.
    """

    factors: Mapping[str, tuple[Tensor, Tensor]]
    rank: int
    alpha: float

    def parameters(self) -> dict[str, Tensor]:
        """The factors in fp32, by the parameter names of a network with LoRA."""
        return {
            f"{module}.lora_{x}.{ADAPTER}.weight": factor.float()
            for module, pair in self.factors.items()
            for x, factor in zip("AB", pair, strict=True)
        }


def require_initial_lora(train: Train) -> None:
    """Refuse an initial LoRA whose file is missing or unreadable, before the model is loaded.

    Raises:
        ConfigError: naming the file.
    """
    if train.kind == "lora" and train.initial_adapter is not None:
        _tensors_of(lora_file(train.initial_adapter))


def initial_lora(network: nn.Module, train: TrainLora, spec: FamilySpec) -> dict[str, Tensor]:
    """The initial LoRA for a network, fp32 by parameter name; {} where training starts without one. Adapted modules
    that the file does not have are left out: they start as a no-op.

    Args:
        network: before LoRA is added to it; may be on the meta device.

    Raises:
        ConfigError: no such file, one of another network, or one of another rank, alpha or other modules than
            `model.train` sets.
    """
    if train.initial_adapter is None:
        return {}
    path = lora_file(train.initial_adapter)
    file = read_lora(path, spec, {name: module for name, module in network.named_modules() if name})
    if (file.rank, file.alpha) != (train.rank, train.alpha):
        raise ConfigError(
            f"model.train: given rank {train.rank} and alpha {train.alpha:g}, but {path} has rank {file.rank} and "
            f"alpha {file.alpha:g}; set model.train.rank={file.rank} model.train.alpha={file.alpha:g}"
        )
    adapted = adapted_modules(network, train.targets or spec.lora_targets)
    beyond = [module for module in file.factors if module not in adapted]
    if beyond:
        suffixes = sorted({_suffix(module) for module in (*adapted, *file.factors)})
        raise ConfigError(
            f"model.train.targets: {path} adapts {beyond[0]} (and {len(beyond) - 1} more), which the targets leave "
            f"out; set model.train.targets=[{', '.join(suffixes)}]"
        )
    new = len(adapted) - len(file.factors)
    if new:
        logger.info("%s: %s adapts %d modules; %d more start as a no-op", KEY, path, len(file.factors), new)
    return file.parameters()


def lora_file(given: str) -> Path:
    """The file that `initial_adapter` names: itself, or the one in a folder of weights, a checkpoint (EMA weights where
    it has them) or the newest checkpoint of a run directory.

    Raises:
        ConfigError: no such file.
        CheckpointError: a damaged checkpoint.
    """
    path = Path(given).expanduser()
    if path.is_dir():
        path = newest_weights(path)
        named = [path / name for name in (FILE, PEFT_FILE) if (path / name).is_file()]
        files = named[:1] or sorted(path.glob("*.safetensors"))
        if len(files) != 1:
            found = f"{len(files)} safetensors files" if files else "no safetensors file"
            raise ConfigError(f"{KEY}: given {given!r}; {path} holds {found}; set {KEY} to a LoRA file")
        path = files[0]
    if not path.is_file():
        raise ConfigError(f"{KEY}: given {given!r}; no such file or folder; set {KEY} to a LoRA file or a checkpoint")
    if path.suffix != ".safetensors":
        raise ConfigError(f"{KEY}: given {given!r}; expected a .safetensors file; convert it to safetensors")
    verify_weights(path.parent)
    return path


def read_lora(path: Path, spec: FamilySpec, modules: Mapping[str, nn.Module]) -> LoraFile:
    """Read a file of any of the layouts.

    Args:
        modules: of the network by name; their weights may be on the meta device.

    Raises:
        ConfigError: damaged, of another construction than LoRA, of another network, or of several ranks or alphas.
            Nothing is loaded in part.
    """
    tensors, metadata = _tensors_of(path)
    alpha = _recorded_alpha(path, spec.network_name, tensors, metadata)
    for_text = next((key for key in tensors if _OF_TEXT_ENCODERS.match(key)), None)
    if for_text is not None:
        raise ConfigError(
            f"{KEY}: {path} holds {for_text}, which is of a text encoder; give a LoRA of {spec.family} without parts "
            "for text encoders"
        )
    names = _names(modules, spec.network_name)
    named = _by_module(tensors, names)
    if named is None:
        if spec.network_name != "unet":  # every layout of a U-Net is known here
            # converters multiply the alpha / rank of `.alpha` tensors in, and know nothing of an alpha in a config
            alpha = None if any(_part_of(key) == "alpha" for key in tensors) else alpha
            tensors = _converted(path, spec, tensors)
        named = _by_module(tensors, names)
        if named is None:
            unknown = next(key for key in tensors if _KEY.sub("", key) not in names)
            raise ConfigError(
                f"{KEY}: {path} holds {unknown}, which is no LoRA factor of {spec.networks[spec.network_name]}; give "
                f"a LoRA of {spec.family}"
            )
    factors: dict[str, tuple[Tensor, Tensor]] = {}
    for module, parts in named.items():
        if not {"A", "B"} <= parts.keys():
            raise ConfigError(f"{KEY}: {path} has only one factor of {module}; copy it anew")
        a, b, shape = parts["A"], parts["B"], _shape_of(modules[module])
        if shape is None or not _fits(a.shape, b.shape, shape):
            raise ConfigError(
                f"{KEY}: {path} has factors {list(a.shape)} and {list(b.shape)} for {module}, whose weight is "
                f"{None if shape is None else list(shape)}; give a LoRA of this model"
            )
        if not all(bool(factor.float().isfinite().all()) for factor in (a, b)):  # fp8 has no isfinite
            raise ConfigError(f"{KEY}: {path} contains NaN or Inf in the factors of {module}; give another")
        factors[module] = (a, b)
    rank = _only_one(path, "rank", (a.shape[0] for a, _ in factors.values()))
    if alpha is None:
        alphas = (parts["alpha"].item() if "alpha" in parts else rank for parts in named.values())
        alpha = _only_one(path, "alpha", alphas)
    return LoraFile(factors, int(rank), float(alpha))


def _tensors_of(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a LoRA file.

    Raises:
        ConfigError: damaged, or of another construction.
    """
    try:
        tensors = load_file(path)
        with safe_open(path, "pt") as file:
            metadata = dict(file.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{KEY}: {path}: damaged ({first_line(error)}); copy it anew") from None
    other = next((key for key in tensors if _KEY.search(key) is None), None)
    if other is not None or not tensors:
        what = f"holds {other}, which is no LoRA factor" if other else "holds no tensors"
        raise ConfigError(f"{KEY}: {path} {what}; DoRA, LoKr, biases and norms are not supported: give a LoRA")
    for key, tensor in tensors.items():
        single = key.endswith(".alpha")  # some programs write integers
        if tensor.numel() != 1 or tensor.is_complex() if single else not tensor.is_floating_point():
            expected = "one real number" if single else "floating-point numbers"
            raise ConfigError(
                f"{KEY}: {path} holds {key} of {list(tensor.shape)} {tensor.dtype}; expected {expected}; give another"
            )
    return tensors, metadata


def _recorded_alpha(path: Path, network: str, keys: Iterable[str], metadata: Mapping[str, str]) -> float | None:
    """alpha by the metadata of diffusers, or the config of PEFT, FastVideo or DanceGRPO; None where none is there.

    Raises:
        ConfigError: a config that sets more than one alpha, another construction, or a base that was changed.
    """
    stored = metadata.get("lora_adapter_metadata")
    of_peft = path.name == PEFT_FILE or any(key.startswith("base_model.model.") for key in keys)
    config = path.parent / (PEFT_CONFIG if of_peft else FASTVIDEO_CONFIG)
    beside = (of_peft or stored is None) and config.is_file()
    try:
        text = config.read_text(encoding="utf-8") if beside else stored or "{}"
        found: dict[str, Any] = plain_json.loads(text)
        if beside and not of_peft:
            found = found.get("lora_params", {})
        # a pipeline writes the name of the network before each option; the network itself and PEFT do not
        about = {name.removeprefix(f"{network}."): value for name, value in found.items()}
        alpha = float(about["lora_alpha"]) if "lora_alpha" in about else None
    except (ValueError, TypeError, AttributeError, OverflowError):  # no object, or no number
        damaged = config if beside else path
        raise ConfigError(f"{KEY}: {damaged}: its LoRA config is damaged; copy it anew") from None
    for option in ("use_dora", "use_rslora", "lora_bias", "alpha_pattern"):
        if about.get(option):
            raise ConfigError(f"{KEY}: {path} was trained with {option}, which is not supported; give another LoRA")
    if _MOVES_BASE.match(init := str(about.get("init_lora_weights"))):
        raise ConfigError(
            f"{KEY}: {path} began with init_lora_weights={init}, which changed the base: on the released one it is "
            "another model; convert it with save_pretrained(path_initial_model_for_weight_conversion=...) of PEFT"
        )
    return alpha


def _names(modules: Iterable[str], network: str) -> dict[str, str]:
    """Name in a file, without the ending for a factor -> module."""
    modules = list(modules)
    known = {**original_names(modules), **{module: module for module in modules}}
    starts = (f"{network}.", f"base_model.model.{network}.", "base_model.model.", "diffusion_model.", "")
    dotted = {f"{start}{name}": module for start in starts for name, module in known.items()}
    joined = {name.replace(".", "_"): module for name, module in known.items()}
    return dotted | {f"lora_{start}_{name}": m for start in ("unet", "transformer") for name, m in joined.items()}


def _by_module(tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, dict[str, Tensor]] | None:
    """Module -> its tensors "A", "B" and "alpha"; None where a key is of no module of the network."""
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        module = names.get(_KEY.sub("", key))
        if module is None:
            return None
        found.setdefault(module, {})[_part_of(key)] = tensor
    return found


def _part_of(key: str) -> str:
    ending = _KEY.search(key)
    assert ending is not None, "_tensors_of refuses other keys"
    return _FACTORS[ending.group()[1:]]


def _converted(path: Path, spec: FamilySpec, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By the names of diffusers.

    Raises:
        ConfigError: diffusers does not know the layout, or would leave some tensors out.
    """
    loader: Any = getattr(diffusers, spec.pipeline)
    problem = f"{KEY}: {path} cannot be read as a LoRA of {spec.family}"
    if wrong := next((key for key in tensors if _is_converted_wrongly(spec, tensors, key)), None):
        raise ConfigError(
            f"{problem}: diffusers 0.42 converts {wrong} wrongly, without its alpha or with shift and scale exchanged; "
            "give a LoRA without that layer"
        )
    if not hasattr(loader, "lora_state_dict"):
        raise ConfigError(f"{problem}: {spec.pipeline} has no LoRA converter; give a file in diffusers' layout")
    try:
        found: dict[str, Tensor] = dict(loader.lora_state_dict(dict(tensors)))
    except Exception as error:  # converters raise whatever an unexpected name leads to
        told = " ".join(str(error).split())[:300]  # the keys stand behind its first line
        raise ConfigError(f"{problem}: {type(error).__name__}: {told}") from None
    if unread := next((key for key in found if _KEY.search(key) is None), None):
        raise ConfigError(f"{problem}: it holds {unread}, which is no LoRA factor; give a LoRA of this network alone")
    if (left := _rows(tensors) - _rows(found)) != 0:
        raise ConfigError(
            f"{problem} as a whole: {_first_left_out(loader, tensors)} and perhaps more ({left} rows of updates) have "
            "no place in this network; give a LoRA of this network alone"
        )
    return found


def _is_converted_wrongly(spec: FamilySpec, tensors: Mapping[str, Tensor], key: str) -> bool:
    """Whether a key is of the final layer of FLUX in the original names, and a converter of diffusers changes its
    update: FLUX.1's drops an alpha, and FLUX.2's does not exchange the halves of the modulation, which the conversion
    of the base does."""
    if not spec.pipeline.startswith("Flux") or "final_layer" not in key:
        return False
    if spec.pipeline.startswith("Flux2"):
        return "adaLN" in key
    module = _KEY.sub("", key)
    ranks = [len(t) for name, t in tensors.items() if _KEY.sub("", name) == module and _part_of(name) == "A"]
    return _part_of(key) == "alpha" and ranks != [tensors[key].item()]


def _rows(tensors: Mapping[str, Tensor]) -> int:
    """Output features that a LoRA changes. A converter splits and copies factors, and keeps this number."""
    return sum(tensor.shape[:1].numel() for key, tensor in tensors.items() if _part_of(key) == "B")


def _first_left_out(loader: Any, tensors: Mapping[str, Tensor]) -> str:
    """Name of the first module whose tensors a converter drops where it gets them alone."""
    stems = list(dict.fromkeys(_KEY.sub("", key) for key in tensors))
    for stem in stems:
        own = {key: tensor for key, tensor in tensors.items() if _KEY.sub("", key) == stem}
        try:
            if not loader.lora_state_dict(dict(own)):
                return stem
        except Exception:  # as in `_converted`
            continue
    return stems[0]


def _only_one(path: Path, what: str, values: Iterable[float]) -> float:
    found = sorted({*values})
    if len(found) > 1:
        raise ConfigError(
            f"{KEY}: {path} has more than one {what} ({found[0]:g} to {found[-1]:g}); only LoRAs of one {what} can be "
            "trained on: give another"
        )
    return found[0]


def _shape_of(module: nn.Module) -> tuple[int, ...] | None:
    """(out, in, ...) of the weight; None without one."""
    if isinstance(module, nn.Linear):  # also one that stores its weight in another shape
        return module.out_features, module.in_features
    weight = getattr(module, "weight", None)
    return None if weight is None else tuple(weight.shape)


def _fits(a: tuple[int, ...], b: tuple[int, ...], weight: tuple[int, ...]) -> bool:
    """Whether B A has the shape of a weight: A is [rank, in, ...], B [out, rank] with ones for a convolution."""
    ones = (1,) * (len(weight) - 2)
    return len(a) == len(b) == len(weight) and a[1:] == weight[1:] and b == (weight[0], a[0], *ones)


def _suffix(module: str) -> str:
    """ "attn.to_q" of "transformer_blocks.0.attn.to_q"."""
    return re.sub(r"^.*?\.\d+\.", "", module)
