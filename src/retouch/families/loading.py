"""Loading components from a hub id or a folder in the diffusers layout, with errors that say what is missing."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.utils.logging import disable_progress_bar

from retouch.hub import require_hub
from retouch.model_files import ModelFilesError, component_path, require_pipeline, tiny_path

if TYPE_CHECKING:
    from retouch.families.sections import Model

__all__ = [
    "DTYPES",
    "ModelFilesError",
    "component_path",
    "load_component",
    "open_pipeline",
    "require_pipeline",
    "tiny_path",
]

disable_progress_bar()  # one bar a component, terminal or not

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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


def load_component(kind: Any, path: str, subfolder: str, dtype: torch.dtype | None) -> Any:
    """`kind.from_pretrained` on one subfolder.

    Raises:
        ConfigError: a hub id that is not on this machine, without a hub.
        ModelFilesError: missing, unreadable or incomplete files, naming the subfolder.
    """
    require_hub("model.path", path)
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
