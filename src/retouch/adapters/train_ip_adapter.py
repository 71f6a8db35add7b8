"""A style adapter under training: which of its weights, and the files of a checkpoint.

A checkpoint holds the whole adapter as `ip-adapter.safetensors` and `ip-adapter.bin`, whichever part of it is trained:
other programs can load them. LoRA is merged into them; its factors are stored in a file of their own, for resuming.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from retouch.adapters.formats import (
    NAME,
    AdapterFile,
    AdapterFileError,
    describe_unused,
    folded,
    read_adapter,
    write_bin,
    write_safetensors,
)
from retouch.adapters.hosts import host_of
from retouch.adapters.ip_adapter import IpAdapter, new_adapter
from retouch.adapters.lora import add_lora
from retouch.adapters.shape import AdapterShape, is_trained, shape_in
from retouch.adapters.tensor_file import write_tensors
from retouch.config.errors import ConfigError
from retouch.files import plain_json
from retouch.files.complete import newest_weights, verify_weights

if TYPE_CHECKING:
    from retouch.families.base import FamilySpec, Train, TrainIpAdapter

logger = logging.getLogger(__name__)

FACTORS = f"{NAME}-lora.safetensors"
"""Factors of `weights: kv_lora`, by parameter name."""


def train_ip_adapter(network: Any, train: TrainIpAdapter, spec: FamilySpec, seed: int) -> IpAdapterWeights:
    """Put a new or given adapter into a frozen network, and set which of its weights require a gradient.

    Trained weights are fp32, frozen ones of the adapter have the network's precision.

    Raises:
        ConfigError: an initial adapter that is incomplete, or of other sizes than the run file's.
    """
    assert spec.adapter is not None and spec.reference_width is not None, "`check` refuses other families"
    given = initial_adapter(train, spec.family)
    wanted = wanted_shape(network, train, spec, spec.reference_width)
    if given is not None:
        require_shape(given, wanted, train.initial_adapter or "")
    network.requires_grad_(False)
    adapter = new_adapter(network, wanted.head, wanted.width, wanted.tokens, seed)
    if given is not None:
        adapter.load(given.tensors)
    scale = train.scale if train.scale is not None else given.scale if given is not None else 1.0
    adapter.set_scale(scale)
    adapter.set_value_norm(value_norm_of(train, given))
    # Trained weights stay fp32, in which small updates are not lost to rounding; frozen ones take the precision of the
    # network.
    for key, parameter in adapter.parameters().items():
        parameter.requires_grad_(is_trained(key, train.weights))
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(network.dtype)
    factor = None
    if train.weights == "kv_lora":
        add_lora(network, train.rank, train.alpha, tuple(sorted({_module_suffix(n) for n in _kv(adapter.names)})))
        factor = train.alpha / train.rank
    about = {
        "family": spec.family,
        "image_encoder": train.image_encoder or spec.adapter.image_encoder,
        "scale": adapter.scale,
        "value_norm": adapter.value_norm,
    }
    return IpAdapterWeights(adapter, train.weights, factor, about)


def initial_adapter(train: Train, family: str) -> AdapterFile | None:
    """The file that training starts from; None for a new adapter.

    Raises:
        ConfigError: no such file, no whole adapter in it, or one that records another family or `value_norm`.
        CheckpointError: a damaged checkpoint.
    """
    if train.kind != "ip_adapter" or train.initial_adapter is None:
        return None
    try:
        path = newest_weights(Path(train.initial_adapter).expanduser())
        verify_weights(path if path.is_dir() else path.parent)
        file = read_adapter(path)
    except AdapterFileError as error:
        raise ConfigError(f"model.train.initial_adapter: {error}") from None
    of = file.metadata.get("family", family)
    if of != family:
        raise ConfigError(
            f"model.train.initial_adapter: {train.initial_adapter} is of {of}, but model.family is {family}; give an "
            f"adapter of {family}, or set model.family={of}"
        )
    if None not in (train.value_norm, file.value_norm) and train.value_norm != file.value_norm:
        raise ConfigError(
            f"model.train.value_norm: given {train.value_norm}, but {train.initial_adapter} was trained with "
            f"{file.value_norm}; leave value_norm out"
        )
    return file


def value_norm_of(train: TrainIpAdapter, given: AdapterFile | None) -> bool:
    """Whether the values are normalized: by `model.train`, or by default as the initial adapter was trained."""
    if train.value_norm is None and given is not None:
        return bool(given.value_norm)
    return bool(train.value_norm)


def wanted_shape(network: Any, train: TrainIpAdapter, spec: FamilySpec, width: int) -> AdapterShape:
    """Shape of the adapter of `model.train` in a network, which may be on the meta device.

    Args:
        width: of the image encoder's vectors.
    """
    host = host_of(network)
    return shape_in(train, spec, width, host.token_width(), host.inner())


class IpAdapterWeights:
    """Style adapters as whole files; saving and loading are exact."""

    def __init__(self, adapter: IpAdapter, weights: str, factor: float | None, about: Mapping[str, Any]) -> None:
        self.adapter = adapter
        self.about = about
        self._weights = weights
        self._factor = factor  # alpha / rank of LoRA
        self._trained = {key: name for key, name in adapter.names.items() if is_trained(key, weights)}

    def save(self, state: Mapping[str, Tensor], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        tensors = self._whole(state)
        write_safetensors(folder / f"{NAME}.safetensors", tensors, self.about)
        write_bin(folder / f"{NAME}.bin", folded(AdapterFile(tensors, self.adapter.shape, self.about)).tensors)
        if self._factor is not None:
            factors = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in state.items()}
            write_tensors(factors, folder / FACTORS, {"format": "pt", "factor": json.dumps(self._factor)})

    def load(self, folder: Path) -> dict[str, Tensor]:
        """Read the weights that `save` wrote, or of a bare file a whole adapter in any layout."""
        path = folder / f"{NAME}.safetensors" if folder.is_dir() else folder
        if not path.is_file():
            raise ValueError(f"no {NAME}.safetensors in it, which model.train.kind=ip_adapter needs")
        file = read_adapter(path)
        if file.unused:
            logger.warning("%s: %s", path, describe_unused(file.unused))
        if problem := shape_problem(file.shape, self.adapter.shape):
            raise ValueError(f"has {describe(file)}{problem}")
        if self._scale_of(file, path) != self.adapter.scale:  # would load, and change the images
            raise ValueError(
                f"trained at scale {_one(self._scale_of(file, path))}, but model.train has {_one(self.adapter.scale)}"
            )
        trained = bool(file.value_norm)
        unrecorded = path.suffix != ".safetensors" and file.value_norm is None
        if trained != self.adapter.value_norm and not unrecorded:  # would load, and change the images
            raise ValueError(
                f"trained with value_norm={trained}, but model.train has {self.adapter.value_norm}; "
                f"set model.train.value_norm={str(trained).lower()}"
            )
        state = {name: file.tensors[key] for key, name in self._trained.items()}
        if self._factor is not None:
            state = self._load_factors(path.parent / FACTORS)
        for key, tensor in self._whole(state).items():
            if not _close(tensor, file.tensors[key], exact=self._factor is None or not key.startswith("ip_adapter.")):
                raise ValueError(
                    f"{key} is frozen, but differs from the network's: model.train.initial_adapter, or the seed of a "
                    "new adapter, is another than in training"
                )
        return state

    def _scale_of(self, file: AdapterFile, path: Path) -> list[float]:
        """The scale that an adapter was trained at. Its .bin has it multiplied into the values, unless these are
        normalized."""
        own = self.adapter.scale
        if path.suffix == ".safetensors" or self.adapter.value_norm:
            return file.metadata.get("scale", own)
        return file.scale

    def _whole(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All weights of the adapter: those of `state`, and the frozen ones."""
        tensors = self.adapter.tensors()
        if self._factor is None:
            return {key: state.get(self.adapter.names[key], t) for key, t in tensors.items()}
        merged = dict(tensors)
        for name in _kv(self.adapter.names):
            key = next(k for k, n in self.adapter.names.items() if n == name)
            module = name.removesuffix(".weight")
            weight = tensors[key].float()
            a, b = (state[f"{module}.lora_{x}.default.weight"].to(weight) for x in "AB")  # of a file: on the CPU
            merged[key] = weight + self._factor * (b @ a)
        return merged

    def _load_factors(self, path: Path) -> dict[str, Tensor]:
        if not path.is_file():
            raise ValueError(f"no {FACTORS} in it, which model.train.weights=kv_lora needs")
        try:
            with safe_open(path, "pt") as file:
                factor = plain_json.loads((file.metadata() or {}).get("factor", "null"))
            state = load_file(path)
        except SafetensorError as error:
            raise ValueError(f"damaged weights ({error})") from None
        if factor != self._factor:  # another would fit, and scale every update differently
            raise ValueError(
                f"alpha / rank was {factor}, but model.train has {self._factor}; set model.train.rank and alpha back"
            )
        modules = [name.removesuffix(".weight") for name in _kv(self.adapter.names)]
        expected = {f"{m}.lora_{x}.default.weight" for m in modules for x in "AB"}
        if state.keys() != expected:
            raise ValueError(f"{FACTORS}: {len(state.keys() ^ expected)} factors are missing or unknown")
        return state


def describe(adapter: AdapterFile | IpAdapter) -> str:
    """Sizes of an adapter as text."""
    shape = adapter.shape
    return f"{shape.tokens} tokens by {shape.head} from vectors of width {shape.width} for {len(shape.inner)} blocks"


def _one(scale: Sequence[float]) -> str:
    """Factors of blocks as they are written in a run file."""
    return f"{scale[0]:g}" if len(set(scale)) == 1 else f"[{', '.join(f'{s:g}' for s in scale)}]"


def _kv(names: Mapping[str, str]) -> list[str]:
    return [name for key, name in names.items() if key.startswith("ip_adapter.")]


def _module_suffix(parameter: str) -> str:
    """ "processor.to_k_ip" of "….processor.to_k_ip.weight"."""
    return "processor." + parameter.rpartition(".processor.")[2].removesuffix(".weight")


def _close(a: Tensor, b: Tensor, *, exact: bool) -> bool:
    a, b = a.detach().cpu(), b.to(a.dtype)
    return torch.equal(a, b) if exact else torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def require_shape(file: AdapterFile, wanted: AdapterShape, path: str) -> None:
    """Reject an initial adapter of other sizes.

    Raises:
        ConfigError: which option of `model.train` to set, or that the file is for another network.
    """
    if problem := shape_problem(file.shape, wanted):
        raise ConfigError(f"model.train.initial_adapter: {path} has {describe(file)}{problem}")


def shape_problem(own: AdapterShape, wanted: AdapterShape) -> str | None:
    """Why an adapter does not fit, and the option to set, as the end of a sentence; None if it fits."""
    if own.head != wanted.head:
        if own.head == "mlp+query_former" and wanted.head == "mlp":
            return "; set model.train.query_former=true: without it half of its style is lost"
        if wanted.head == "mlp+query_former" and own.head == "mlp":
            return f", but model.train requires {wanted.head}; set model.train.query_former=false"
        return f", but the network takes {wanted.head}; give an adapter of this family"
    if (own.inner, own.token_width) != (wanted.inner, wanted.token_width):
        return (
            f" of width {own.inner[0]} with tokens of width {own.token_width}, but the network has "
            f"{len(wanted.inner)} blocks of width {wanted.inner[0]} and takes tokens of width {wanted.token_width}; "
            "give an adapter for this model"
        )
    if own.tokens != wanted.tokens:
        return f"; set model.train.tokens={own.tokens}"
    if own.width != wanted.width:
        return f", but model.train.image_encoder makes vectors of width {wanted.width}; set the one it is for"
    return None
