"""Text states that examples bring as files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from retouch.errors import first_line
from retouch.families.loading import ModelFilesError
from retouch.files.saved_tensors import DamagedFile, load_saved

GIVEN = {"text": "prompt_embeds", "pooled": "pooled_prompt_embeds"}
"""Name in the condition -> key in a file of embeddings."""


def given_embeddings(path: Path) -> dict[str, Tensor]:
    """Read a torch file with T5's states [S, D] or [1, S, D], or a dict with them as `prompt_embeds` and optionally
    `pooled_prompt_embeds` [D] or [1, D] -> `text` [S, D] and, if present, `pooled` [D].

    Raises:
        ModelFilesError: not such a file.
    """
    try:
        found: Any = load_saved(path)
    except (OSError, DamagedFile) as error:
        raise ModelFilesError(f"{path}: no torch file of tensors ({first_line(error)})") from None
    tensors: dict[Any, Any] = {"prompt_embeds": found} if isinstance(found, Tensor) else found
    given: dict[str, Tensor] = {}
    for (name, key), rank in zip(GIVEN.items(), (2, 1), strict=True):
        tensor = tensors.get(key) if isinstance(tensors, dict) else None  # pyright: ignore[reportUnnecessaryIsInstance]
        if isinstance(tensor, Tensor):
            tensor = tensor[0] if tensor.ndim == rank + 1 and len(tensor) == 1 else tensor
            if tensor.ndim != rank:
                raise ModelFilesError(f"{path}: {key} is {list(tensor.shape)}; it must have {rank} dimensions")
            given[name] = tensor
    if "text" not in given:
        raise ModelFilesError(f"{path}: holds no tensor, and no dict with prompt_embeds")
    return given
