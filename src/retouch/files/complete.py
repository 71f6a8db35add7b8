"""Which checkpoints are complete, and whether their files are those that were written. No torch.

`complete.json`, written last, has the size and SHA-256 of every other file: a damaged file is reported by name before
anything is loaded.
"""

from __future__ import annotations

import hashlib
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

from retouch.errors import CheckpointError
from retouch.files import plain_json
from retouch.files.disk import read_bounded, real_place

COMPLETE = "complete.json"

_MOST_BYTES = 64 << 20
"""Size of a `complete.json`, at most."""

REMEDY = "copy it again, or delete it to resume from the one before"

_NAME = re.compile(r"(\.replaced-)?step-(\d{6,})")

_READ = {".safetensors", ".pt", ".bin"}
"""Endings of files with tensors, none of which may be added to a checkpoint."""


def damaged(folder: Path, reason: object) -> CheckpointError:
    """The error for a checkpoint whose files were changed."""
    return CheckpointError(f"{folder}: damaged ({reason}); {REMEDY}")


def complete_checkpoints(root: Path) -> list[Path]:
    """Complete checkpoints, lowest step first. One that is being replaced counts until its replacement exists."""
    named = [(match, folder) for folder in root.glob("*step-*") if (match := _NAME.fullmatch(folder.name))]
    found = [(match, folder) for match, folder in named if (folder / "complete.json").is_file()]
    aside_first = sorted(found, key=lambda pair: pair[0][1] is None)
    of_step = {int(match[2]): folder for match, folder in aside_first}
    return [of_step[step] for step in sorted(of_step)]


def record_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Path within the folder -> size in bytes and SHA-256, of every file."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != COMPLETE]
    with ThreadPoolExecutor(4) as pool:  # hashing releases the interpreter's lock
        digests = list(pool.map(_digest, paths))
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": digest}
        for path, digest in zip(paths, digests, strict=True)
    }


def read_complete(folder: Path) -> dict[str, Any]:
    """The content of `complete.json`: `step`, `pinned`, `files`. Older versions list the names of files alone.

    Raises:
        CheckpointError: missing, or damaged.
    """
    path = folder / COMPLETE
    if not path.is_file():
        raise CheckpointError(f"{folder}: no {COMPLETE}, so it is not a complete checkpoint; give another")
    try:
        found: object = plain_json.loads(read_bounded(path, _MOST_BYTES))
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict):
        raise damaged(folder, f"{COMPLETE} cannot be read")
    return cast("dict[str, Any]", found)


def verify_files(folder: Path, part: str = "") -> None:
    """Compare the files of a checkpoint with `complete.json`.

    Args:
        part: only this file, or the files of this folder in it.

    Raises:
        CheckpointError: a file that is missing, was changed, or holds tensors and was added.
    """
    try:
        _verify(folder, part)
    except OSError as error:  # a bad sector or a stale handle
        raise damaged(folder, error) from None


def verify_weights(weights: Path) -> None:
    """Compare a folder of weights with the `complete.json` of the checkpoint that it is in; without one, there is
    nothing to compare. Raises as `verify_files`."""
    weights = real_place(weights)
    if (weights.parent / COMPLETE).is_file():
        verify_files(weights.parent, weights.name)


def newest_weights(folder: Path) -> Path:
    """The weights of a checkpoint (EMA weights where it has them), or those of the newest complete checkpoint of a run
    directory; any other folder itself."""
    folder = next(reversed(complete_checkpoints(folder / "checkpoints")), folder)
    if (folder / COMPLETE).is_file():
        folder = next((folder / name for name in ("ema", "weights") if (folder / name).is_dir()), folder)
    return folder


def _verify(folder: Path, part: str) -> None:
    files: object = read_complete(folder).get("files")
    if isinstance(files, list):
        _verify_names(folder, cast("list[object]", files))
        return
    if not isinstance(files, dict) or not files:
        raise damaged(folder, f"{COMPLETE} lists no files")
    recorded = cast("dict[str, object]", files)
    names = [name for name in recorded if not part or name == part or name.startswith(f"{part}/")]
    # The checks go from what costs nothing to what reads every byte: a folder that was cut off fails before it is
    # hashed. A file of tensors that is not recorded is damage too, because it belongs to nothing that was completed.
    for name in names:
        if not (folder / name).is_file():
            raise damaged(folder, f"{name} is missing")
    for name in [*_tensor_files(folder / part, folder), *([] if names else [part])]:
        if name not in recorded:
            raise damaged(folder, f"{name} is not in {COMPLETE}")
    entries = {name: cast("dict[str, Any]", e) if isinstance(e := recorded[name], dict) else {} for name in names}
    for name, entry in entries.items():
        if (folder / name).stat().st_size != entry.get("bytes"):
            raise damaged(folder, f"{name}: its size differs from {COMPLETE}")
    with ThreadPoolExecutor(4) as pool:
        for name, digest in zip(names, pool.map(_digest, [folder / name for name in names]), strict=True):
            if digest != entries[name].get("sha256"):
                raise damaged(folder, f"{name}: its SHA-256 differs from {COMPLETE}")


def _verify_names(folder: Path, names: list[object]) -> None:
    """Require the files and folders that an older version listed without sizes."""
    for name in names or [None]:
        if not isinstance(name, str):
            raise damaged(folder, f"{COMPLETE} lists no files")
        if not (folder / name).is_file() and not (folder / name).is_dir():
            raise damaged(folder, f"{name} is missing")


def _tensor_files(part: Path, folder: Path) -> list[str]:
    """Names within a checkpoint of the files with tensors in a folder of it."""
    return [path.relative_to(folder).as_posix() for path in sorted(part.rglob("*")) if path.suffix in _READ]


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
