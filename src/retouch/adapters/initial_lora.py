"""The LoRA that training starts from: files of this package, diffusers, PEFT and kohya (sd-scripts, ComfyUI).

    diffusers   transformer.transformer_blocks.0.attn.to_q.lora_A.weight     alpha in the metadata; without it, the rank
    PEFT        base_model.model.transformer_blocks.0.attn.to_q.lora_A.weight    alpha in adapter_config.json
    kohya       lora_unet_down_blocks_0_..._to_q.lora_down.weight            alpha in .alpha tensors

Keys with the module names of the original networks (kohya's FLUX files: `lora_unet_double_blocks_0_img_attn_qkv`) go
through the converters of diffusers, which multiply alpha / rank into the factors: alpha is then the rank.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffusers
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from retouch import plain_json
from retouch.adapters.lora import ADAPTER, FILE, adapted_modules
from retouch.complete import newest_weights, verify_weights
from retouch.config.errors import ConfigError
from retouch.errors import first_line

if TYPE_CHECKING:
    from retouch.families.base import FamilySpec, Train, TrainLora

logger = logging.getLogger(__name__)

KEY = "model.train.initial_adapter"

PEFT_CONFIG, PEFT_FILE = "adapter_config.json", "adapter_model.safetensors"

_FACTORS = {
    "lora_A.weight": "A", f"lora_A.{ADAPTER}.weight": "A", "lora_down.weight": "A", "lora.down.weight": "A",
    "lora_B.weight": "B", f"lora_B.{ADAPTER}.weight": "B", "lora_up.weight": "B", "lora.up.weight": "B",
    "alpha": "alpha",
}  # fmt: skip
"""Ending of a key -> which part of an adapter the tensor is."""

_KEY = re.compile("|".join(re.escape(f".{ending}") + "$" for ending in _FACTORS))


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
    alpha = _recorded_alpha(path, spec.network_name, metadata)
    named = _by_module(tensors, spec.network_name, modules)
    if named is None:
        converted = _converted(path, spec, tensors)
        named, alpha = _by_module(converted, spec.network_name, modules), None
        if named is None:
            unknown = next(k for k in converted if _module_of(k, spec.network_name, modules, {}) is None)
            raise ConfigError(
                f"{KEY}: {path} holds {unknown}, which is no LoRA factor of {spec.networks[spec.network_name]}; give "
                f"a LoRA of {spec.family} without parts for text encoders"
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


def _recorded_alpha(path: Path, network: str, metadata: Mapping[str, str]) -> float | None:
    """alpha by the metadata of diffusers or the config of PEFT; None where neither is there.

    Raises:
        ConfigError: a config that sets more than one alpha, or another construction.
    """
    config = path.parent / PEFT_CONFIG
    of_peft = path.name == PEFT_FILE and config.is_file()
    start = "" if of_peft else f"{network}."
    try:
        text = config.read_text(encoding="utf-8") if of_peft else metadata.get("lora_adapter_metadata", "{}")
        found: dict[str, Any] = plain_json.loads(text)
        about = {name.removeprefix(start): value for name, value in found.items() if name.startswith(start)}
        alpha = float(about["lora_alpha"]) if "lora_alpha" in about else None
    except (ValueError, TypeError, AttributeError, OverflowError):  # no object, or no number
        damaged = path if start else config
        raise ConfigError(f"{KEY}: {damaged}: its LoRA config is damaged; copy it anew") from None
    for option in ("use_dora", "use_rslora", "lora_bias", "alpha_pattern"):
        if about.get(option):
            raise ConfigError(f"{KEY}: {path} was trained with {option}, which is not supported; give another LoRA")
    return alpha


def _by_module(
    tensors: Mapping[str, Tensor], network: str, modules: Collection[str]
) -> dict[str, dict[str, Tensor]] | None:
    """Module -> its tensors "A", "B" and "alpha"; None where a key is of no module of the network."""
    underscored = {module.replace(".", "_"): module for module in modules}
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        module = _module_of(key, network, modules, underscored)
        if module is None:
            return None
        ending = _KEY.search(key)
        assert ending is not None, "_tensors_of refuses other keys"
        found.setdefault(module, {})[_FACTORS[ending.group()[1:]]] = tensor
    return found


def _module_of(key: str, network: str, modules: Collection[str], underscored: Mapping[str, str]) -> str | None:
    stem = _KEY.sub("", key)
    for start in (f"{network}.", f"base_model.model.{network}.", "base_model.model.", "diffusion_model.", ""):
        if stem.startswith(start) and stem.removeprefix(start) in modules:
            return stem.removeprefix(start)
    for start in ("lora_unet_", "lora_transformer_"):
        if stem.startswith(start) and stem.removeprefix(start) in underscored:
            return underscored[stem.removeprefix(start)]
    return None


def _converted(path: Path, spec: FamilySpec, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By the names of diffusers.

    Raises:
        ConfigError: diffusers does not know the layout, or would leave some tensors out.
    """
    loader: Any = getattr(diffusers, spec.pipeline)
    problem = f"{KEY}: {path} cannot be read as a LoRA of {spec.family}"
    if not hasattr(loader, "lora_state_dict"):
        raise ConfigError(f"{problem}: {spec.pipeline} has no LoRA converter; give a file in diffusers' layout")
    try:
        with _warnings_of_diffusers() as warnings:
            found = loader.lora_state_dict(dict(tensors))
    except Exception as error:  # converters raise whatever an unexpected name leads to
        raise ConfigError(f"{problem}: {type(error).__name__}: {str(error).splitlines()[:1]}") from None
    if warnings:
        raise ConfigError(f"{problem} as a whole: {warnings[0]}; give a LoRA of this network alone")
    return dict(found[0] if isinstance(found, tuple | list) else found)


@contextmanager
def _warnings_of_diffusers() -> Iterator[list[str]]:
    """First lines of what diffusers logs inside, instead of its log: a converter warns of the tensors that it drops."""
    found: list[str] = []
    handler, log = logging.Handler(logging.WARNING), logging.getLogger("diffusers")
    handler.emit = lambda record: found.append(record.getMessage().splitlines()[0])
    before, log.handlers, propagate = log.handlers, [handler], log.propagate
    log.propagate = False
    try:
        yield found
    finally:
        log.handlers, log.propagate = before, propagate


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
