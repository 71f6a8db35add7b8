"""Loading components from a hub id or a folder in the diffusers layout, with errors that say what is missing."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class ModelFilesError(ValueError):
    """Model files that are not there or not what the run file says."""


def component_path(path: str, family: str) -> str:
    """A hub id or folder as given; "tiny" is the trained base that comes with the package.

    Raises:
        ModelFilesError: a local-looking path that does not exist.
    """
    if path == "tiny":
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


def tiny_path(family: str) -> Path:
    """Folder of the tiny base of a family inside the installed package."""
    return Path(str(resources.files("retouch.models") / "tiny_bases" / family))


def load_component(kind: Any, path: str, subfolder: str, dtype: torch.dtype | None) -> Any:
    """`kind.from_pretrained` on one subfolder.

    Raises:
        ModelFilesError: missing or unreadable files, naming the subfolder.
    """
    keywords: dict[str, Any] = (
        {} if dtype is None else {"torch_dtype" if kind.__module__.startswith("diffusers") else "dtype": dtype}
    )
    try:
        return kind.from_pretrained(path, subfolder=subfolder, **keywords)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelFilesError(f"model.path: cannot load {subfolder}/ of {path} as {kind.__name__}: {first}") from None
