"""Loading models and their components from a hub id or a folder in the diffusers layout, with errors that name what is
missing."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffusers
import torch
from diffusers import ConfigMixin
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from transformers.utils.logging import disable_progress_bar

from retouch.errors import why_unreadable
from retouch.families import FAMILIES
from retouch.files.hub import folder_offline, is_hub_id, read_variant, refusal, require_hub, snapshot, variant_hint
from retouch.files.model_files import (
    ModelFilesError,
    component_path,
    incomplete_weights,
    named_parts,
    pipeline_index,
    transformer_path,
)
from retouch.registry import load_attribute, load_named

if TYPE_CHECKING:
    from retouch.families.base import Model, OtherTransformer
    from retouch.types import DiffusionModel

logger = logging.getLogger(__name__)

disable_progress_bar()  # one bar a component, terminal or not

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def family_class(family: str) -> Any:
    """The model class of a family (`FamilySpec.model`)."""
    return load_attribute(FAMILIES[family].spec.model)


def load_model(config: Model, device: Any = "cpu", **options: Any) -> DiffusionModel:
    """Load the model of a run file; the network stays on the CPU until the engine places it.

    Args:
        options: of `retouch.families.diffusion.FamilyModel.from_config`.

    Raises:
        ModelFilesError: a component is missing or of another class.
        ConfigError: no such image encoder, or embeddings of another model.
    """
    with reading_variant(config.weights_variant):
        return _class_of(config).from_config(config, device, **options)


def load_network(config: Model, dtype: torch.dtype) -> Any:
    """The network that a run file trains, before anything is trained, and none of the other parts.

    Raises:
        ModelFilesError: it is missing or of another class.
    """
    with reading_variant(config.weights_variant):
        return _class_of(config).load_network(config, component_path(config.path, config.family), dtype)


_VARIANT: ContextVar[str | None] = ContextVar("weights_variant", default=None)


@contextmanager
def reading_variant(name: str | None) -> Iterator[None]:
    """Inside, components are read from the weight files of a variant (`model.weights_variant`); None: plain ones."""
    before = _VARIANT.set(name)
    try:
        yield
    finally:
        _VARIANT.reset(before)


def _class_of(config: Model) -> Any:
    return load_named(f"model of the FamilySpec of {config.family}", config.spec.model, "class")


def is_there(path: str, name: str) -> bool:
    """Whether a model has an optional component, by the model_index.json of the folder or hub id.

    Raises:
        ConfigError, ModelFilesError: as `pipeline_index`, or there is none on this machine.
    """
    index = pipeline_index(path)
    if index is None:
        raise ModelFilesError(
            f"model.path: {path} has no model_index.json on this machine, and the hub cannot be reached; download it "
            "anew, or set model.path to a local folder"
        )
    return name in named_parts(index)


def load_component(
    kind: Any, path: str, subfolder: str | None, dtype: torch.dtype | None, key: str = "model.path"
) -> Any:
    """`kind.from_pretrained` on one subfolder; None: on the top folder.

    Args:
        key: the key of the run file that named `path`.

    Raises:
        ConfigError: a hub id that is not on this machine, and the hub cannot be reached.
        ModelFilesError: missing, unreadable or incomplete files, naming the subfolder.
    """
    require_hub(key, path)
    keywords: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    is_network: bool = issubclass(kind, torch.nn.Module)
    if is_network:
        keywords["output_loading_info"] = True
    where = f"{key}: cannot load {f'{subfolder}/ of ' if subfolder else ''}{path} as {kind.__name__}"
    hub_id, path = path, folder_offline(path)
    variant = _VARIANT.get() if is_network else None
    try:
        read = partial(read_component, kind, path, subfolder, **keywords)
        loaded = read_variant(read, path, subfolder, variant)
    except Exception as error:
        if (problem := why_unreadable(error)) is None:
            raise
        raise ModelFilesError(f"{where}: {_remedied(problem, error, hub_id, path, subfolder, variant)}") from None
    if not is_network:
        return loaded
    network, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:  # both libraries fill these with random weights and go on
        raise ModelFilesError(f"{where}: {len(missing)} weights are missing, {missing[0]} among them; copy it anew")
    part = f"{subfolder}/ of {hub_id}" if subfolder else hub_id
    if isinstance(network, ConfigMixin) and (unused := sorted(info["unexpected_keys"])):
        told = (
            f"{len(unused)} weights of {part} have no place in the network of its config.json, {unused[0]} among them"
        )
        logger.warning("%s: %s; it may compute something else than in training; copy it anew", key, told)
    if unread := newer_settings(network):
        told = ", ".join(f"{name}={value!r}" for name, value in unread.items())
        logger.warning(
            "%s: config.json of %s was written by diffusers %s and sets %s, which the installed %s does not read: the "
            "network may compute something else; install the newer diffusers",
            key,
            part,
            network.config["_diffusers_version"],
            told,
            diffusers.__version__,
        )
    return network


def newer_settings(network: Any) -> dict[str, Any]:
    """Settings in the config.json of a network of diffusers that its class does not know, if a newer version than the
    installed one wrote them: diffusers loads it without them, and its own warning is silenced here. An older version's
    are left out: released files have keys that never were settings."""
    config: Any = network.config if isinstance(network, ConfigMixin) else {}
    if _release(str(config.get("_diffusers_version", ""))) <= _release(diffusers.__version__):
        return {}
    known = inspect.signature(type(network).__init__).parameters
    return {
        name: value
        for name, value in config.items()
        if name not in known and not name.startswith("_") and value not in (None, False)
    }


def _release(version: str) -> tuple[int, ...]:
    """First three numbers of a version: 0.43.0.dev0 is newer than 0.42.1."""
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def _remedied(
    problem: str, error: Exception, hub_id: str, path: str, subfolder: str | None, variant: str | None
) -> str:
    """The problem of a component with its remedy: what the hub refuses, or the file whose download was cut, where
    libraries name another cause."""
    if (refused := refusal(error, hub_id)) is not None:
        return refused
    top = path if Path(path).is_dir() else snapshot(hub_id) if is_hub_id(hub_id) else None
    if top is not None and (cut := incomplete_weights(Path(top) / (subfolder or ""), variant)) is not None:
        return f"{cut}; copy or download it anew"
    if Path(path).is_dir():
        return f"{problem}{variant_hint(path, subfolder)}"
    return f"{problem}; check the id and the network (gated models need HF_TOKEN)"


def read_component(kind: Any, path: str, subfolder: str | None, **keywords: Any) -> Any:
    """Read the files of a component with `kind.from_pretrained`; errors are those of the library."""
    with _quiet():
        return kind.from_pretrained(path, subfolder=subfolder, **keywords)


def stored_dtype(path: str, subfolder: str | None, variant: str | None) -> torch.dtype | None:
    """The one dtype of the weights of a network on this machine; None for several, and for files of another kind."""
    folder = _folder_here(path, subfolder)
    files = [] if folder is None else _weight_files(folder, variant)
    kinds: set[str] = set()
    for file in files:
        try:
            with safe_open(file, "pt") as tensors:
                kinds |= {tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
        except (OSError, SafetensorError):
            return None  # loading it reports what is wrong
    return _STORED.get(kinds.pop()) if len(kinds) == 1 else None


_STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def _weight_files(folder: Path, variant: str | None) -> list[Path]:
    """Those that `read_variant` reads: of the variant, or without any the plain ones."""
    of: dict[str, list[Path]] = {}
    for file in folder.glob("*.safetensors"):
        _, _, kind = re.sub(r"-\d+-of-\d+", "", file.stem).partition(".")
        of.setdefault(kind, []).append(file)
    return of.get(variant or "") or of.get("", [])


def transformer_folder(other: OtherTransformer) -> Path | None:
    """Folder with the weights of `model.transformer`; None for a hub id that is not on this machine.

    Raises:
        ModelFilesError: no such folder, or one without the config of a network.
    """
    return _folder_here(*transformer_path(other))


def _folder_here(path: str, subfolder: str | None) -> Path | None:
    """The folder of a component; None for a hub id that is not on this machine."""
    if Path(path).is_dir():
        return Path(path) / (subfolder or "")
    found = try_to_load_from_cache(path, f"{subfolder}/config.json" if subfolder else "config.json")
    return Path(found).parent if isinstance(found, str) else None


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the libraries' own reports of missing and unused weights: they are reported here."""
    loggers = [logging.getLogger(name) for name in ("transformers", "diffusers")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
