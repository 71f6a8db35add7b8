"""What a complete checkpoint holds: size and SHA-256 of every file, in the `complete.json` that is written last.

A file that is missing, has another size or other bytes is named before anything is loaded: a flipped bit of a weight
would otherwise train on without a trace.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from retouch.errors import CheckpointError

COMPLETE = "complete.json"

REMEDY = "copy it again, or delete it to resume from the one before"


def record_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Path within the folder -> size in bytes and SHA-256, of every file."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != COMPLETE]
    with ThreadPoolExecutor(4) as pool:  # hashing leaves the interpreter's lock
        digests = list(pool.map(_digest, paths))
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": digest}
        for path, digest in zip(paths, digests, strict=True)
    }


def read_complete(folder: Path) -> dict[str, Any]:
    """What `complete.json` says: `step`, `pinned`, `files`.

    Raises:
        CheckpointError: not there, or damaged.
    """
    path = folder / COMPLETE
    if not path.is_file():
        raise CheckpointError(f"{folder}: no {COMPLETE}, so it is not a complete checkpoint; give another")
    try:
        found: object = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("files", []), list | dict):  # pyright: ignore[reportUnknownMemberType]
        raise CheckpointError(f"{folder}: damaged ({COMPLETE} cannot be read); {REMEDY}")
    return cast("dict[str, Any]", found)


def verify_files(folder: Path, part: str = "") -> None:
    """Compare the files of a checkpoint with what was written.

    Args:
        part: a folder in it, to compare no others.

    Raises:
        CheckpointError: a file that is missing or was changed since.
    """
    try:
        _verify(folder, part)
    except OSError as error:  # a bad sector, a stale handle: on this process alone
        raise CheckpointError(f"{folder}: damaged ({error}); {REMEDY}") from None


def _verify(folder: Path, part: str) -> None:
    files: object = read_complete(folder).get("files", [])
    recorded = cast("dict[str, Any]", files) if isinstance(files, dict) else None
    listed = cast("list[str]", files) if recorded is None else list(recorded)  # older checkpoints list names alone
    names = [str(name) for name in listed if not part or str(name).startswith(f"{part}/")]
    for name in names:
        if not (folder / name).exists():
            raise CheckpointError(f"{folder}: damaged ({name} is missing); {REMEDY}")
    if recorded is None:
        return
    for name in names:
        entry = recorded[name]
        if not isinstance(entry, dict) or (folder / name).stat().st_size != cast("dict[str, Any]", entry).get("bytes"):
            raise CheckpointError(f"{folder}: damaged ({name}: its size differs from {COMPLETE}); {REMEDY}")
    with ThreadPoolExecutor(4) as pool:
        for name, digest in zip(names, pool.map(_digest, [folder / name for name in names]), strict=True):
            if digest != recorded[name].get("sha256"):
                raise CheckpointError(f"{folder}: damaged ({name}: its SHA-256 differs from {COMPLETE}); {REMEDY}")


def require_finite(tensors: Mapping[str, Tensor], where: str) -> None:
    """Refuse weights or moments that contain NaN or Inf.

    Raises:
        CheckpointError: with the first tensor that does.
    """
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"{where}: {name} contains NaN or Inf; set resume to an earlier checkpoint")


def tensors_of(value: object, name: str = "") -> dict[str, Tensor]:
    """Every tensor in nested dicts and lists, by its path."""
    if isinstance(value, Tensor):
        return {name: value}
    items: Any = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    )
    return {key: tensor for k, inside in items for key, tensor in tensors_of(inside, f"{name}.{k}".lstrip(".")).items()}


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
