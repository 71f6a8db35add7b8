"""Loading components from a hub id or a folder in the diffusers layout, with errors that say what is missing."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.utils.logging import disable_progress_bar

if TYPE_CHECKING:
    from retouch.config.model_sections import Model

disable_progress_bar()  # one bar a component, terminal or not

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class ModelFilesError(ValueError):
    """Model files that are not there or not what the run file says."""


def component_path(path: str, family: str) -> str:
    """A hub id or folder as given; "tiny" is the trained base that comes with the package.

    Raises:
        ModelFilesError: a local-looking path that does not exist.
    """
    if path == "tiny":
        if not tiny_path(family).is_dir():
            raise ModelFilesError(f"model.path: given 'tiny', but no tiny base of {family} comes with the package")
        return str(tiny_path(family))
    looks_local = path.startswith((".", "/", "~")) or path.count("/") != 1
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "model_index.json").is_file():
            raise ModelFilesError(
                f"model.path: {folder} has no model_index.json; give the top folder of a diffusers model"
            )
        return str(folder)
    if looks_local:
        raise ModelFilesError(f"model.path: {path}: no such folder; give a folder in the diffusers layout or a hub id")
    return path


def open_pipeline(config: Model, pipeline: str) -> tuple[str, torch.dtype, torch.dtype]:
    """Where the model of a run file is, the dtype of the network that is trained (fp32 where all of it is), and that of
    what is frozen.

    Raises:
        ModelFilesError: no such folder, or one of another pipeline class.
    """
    path = component_path(config.path, config.family)
    require_pipeline(path, pipeline)
    frozen = DTYPES[config.dtype]
    return path, torch.float32 if config.train.kind == "full" else frozen, frozen


def require_pipeline(path: str, expected: str) -> None:
    """Refuse a local folder of another family before anything of it is loaded.

    Raises:
        ModelFilesError: its model_index.json names another pipeline class than `expected`.
    """
    index = Path(path) / "model_index.json"
    if not index.is_file():  # a hub id: its components are checked as they load
        return
    try:
        found = json.loads(index.read_text(encoding="utf-8")).get("_class_name", expected)
    except ValueError as error:
        raise ModelFilesError(f"model.path: {index} is damaged ({error}); copy the model anew") from None
    if found != expected:
        raise ModelFilesError(
            f"model.path: {path} is a {found}; model.family needs a {expected}; set another path, or the family of it"
        )


def tiny_path(family: str) -> Path:
    """Folder of the tiny base of a family inside the installed package."""
    return Path(str(resources.files("retouch.models") / "tiny_bases" / family))


def load_component(kind: Any, path: str, subfolder: str, dtype: torch.dtype | None) -> Any:
    """`kind.from_pretrained` on one subfolder.

    Raises:
        ModelFilesError: missing, unreadable or incomplete files, naming the subfolder.
    """
    keywords: dict[str, Any] = (
        {} if dtype is None else {"torch_dtype" if kind.__module__.startswith("diffusers") else "dtype": dtype}
    )
    is_network: bool = issubclass(kind, torch.nn.Module)
    if is_network:
        keywords["output_loading_info"] = True
    where = f"model.path: cannot load {subfolder}/ of {path} as {kind.__name__}"
    try:
        with _quiet():
            loaded = kind.from_pretrained(path, subfolder=subfolder, **keywords)
    except (OSError, ValueError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        hint = "" if Path(path).is_dir() else "; check the id and the network (gated models need HF_TOKEN)"
        raise ModelFilesError(f"{where}: {first.rstrip('. ')}{hint}") from None
    if not is_network:
        return loaded
    network, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:  # both libraries fill these with random weights and go on
        raise ModelFilesError(f"{where}: {len(missing)} weights are missing, {missing[0]} among them; copy it anew")
    return network


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the libraries' own reports of missing weights: they become one error here."""
    loggers = [logging.getLogger(name) for name in ("transformers", "diffusers")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
