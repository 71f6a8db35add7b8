"""Components without their weights, on the meta device: for counting and comparing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from retouch.errors import first_line
from retouch.families.base import FamilySpec
from retouch.families.loading import ModelFilesError
from retouch.files import plain_json


def on_meta(make: Callable[[], Any]) -> Any:
    """The result of `make` on the meta device: shapes without values."""
    with torch.device("meta"):
        return make()


def without_data() -> FakeTensorMode:
    """Inside, operations give tensors of the right shapes on the CPU, as kernels there would, and compute nothing."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def to_run_without_data(network: nn.Module, mode: FakeTensorMode, dtype: Callable[[nn.Parameter], torch.dtype]) -> None:
    """A network on the meta device as one that runs inside `mode`; in place.

    A tensor that is neither weight nor buffer, as the frequencies of Qwen-Image's positions, comes along: the first
    forward would count its copy.

    Args:
        dtype: of each weight.
    """
    with mode:
        for module in network.modules():
            for name, weight in module._parameters.items():
                if weight is not None:
                    made = torch.empty(weight.shape, dtype=dtype(weight))
                    module._parameters[name] = nn.Parameter(made, weight.requires_grad)
            for place in (module._buffers, vars(module)):
                for name, tensor in place.items():
                    if isinstance(tensor, torch.Tensor):
                        place[name] = torch.empty(tensor.shape, dtype=tensor.dtype)


def released_networks(spec: FamilySpec) -> dict[str, Any]:
    """Component -> network of its released size on the meta device, where the family has its config."""
    return {name: _from_config(spec.networks[name], config) for name, config in spec.released.items()}


def _from_config(kind: str, config: Mapping[str, Any]) -> Any:
    if hasattr(diffusers, kind):
        return on_meta(lambda: getattr(diffusers, kind)(**config))
    made = getattr(transformers, kind)
    return on_meta(lambda: made(made.config_class(**config)))


def component_on_meta(folder: Path, kind: str) -> Any:
    """A network of diffusers or transformers by the config.json in its folder.

    Args:
        kind: name of the class that it must be of.

    Raises:
        ModelFilesError: no config, one of another class, or one that this class cannot be built from.
    """
    try:
        config = plain_json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if (found := other_class(config, kind)) is not None:
            raise ValueError(f"it is of a {found}")
        if hasattr(diffusers, kind):
            made: Any = getattr(diffusers, kind)
            return on_meta(lambda: made.from_config(config))
        made = getattr(transformers, kind)
        return on_meta(lambda: made(made.config_class.from_pretrained(folder)))
    except (OSError, ValueError, TypeError, RuntimeError, AttributeError) as error:
        raise ModelFilesError(
            f"model.path: {folder}/config.json makes no {kind}: {first_line(error)}; copy the model anew"
        ) from None


def other_class(config: Mapping[str, Any], kind: str) -> str | None:
    """The class that a config.json names, if no `kind` is loaded from its files; None if one is, as from a class of
    transformers with a head on it (Z-Image's `Qwen3Model` lies on the hub as a `Qwen3ForCausalLM`)."""
    found = config.get("_class_name") or next(iter(config.get("architectures") or []), kind)
    if found == kind:
        return None
    configs = [getattr(getattr(transformers, name, None), "config_class", None) for name in (found, kind)]
    has_head = found not in MODEL_MAPPING_NAMES.values()
    return None if has_head and configs[0] is not None and configs[0] is configs[1] else found
