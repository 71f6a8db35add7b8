"""Checkpoint directories: list complete ones, verify their files, and read their state. No torch.

A checkpoint is written under another name and appears by one rename. `complete.json`, written last, has the size and
SHA-256 of every other file: a damaged file is reported by name before anything is loaded.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from retouch import plain_json
from retouch.errors import CheckpointError

logger = logging.getLogger(__name__)

COMPLETE = "complete.json"

REMEDY = "copy it again, or delete it to resume from the one before"

_NAME = re.compile(r"(\.replaced-)?step-(\d{6,})")


def damaged(folder: Path, reason: object) -> CheckpointError:
    """The error for a checkpoint whose files were changed."""
    return CheckpointError(f"{folder}: damaged ({reason}); {REMEDY}")


# --- which checkpoints there are ---


def complete_checkpoints(root: Path) -> list[Path]:
    """Complete checkpoints, lowest step first. One that is being replaced counts until its replacement exists."""
    named = [(match, folder) for folder in root.glob("*step-*") if (match := _NAME.fullmatch(folder.name))]
    found = [(match, folder) for match, folder in named if (folder / "complete.json").is_file()]
    aside_first = sorted(found, key=lambda pair: pair[0][1] is None)
    of_step = {int(match[2]): folder for match, folder in aside_first}
    return [of_step[step] for step in sorted(of_step)]


def is_pinned(folder: Path) -> bool:
    """Whether `prune` keeps it: checkpoints at the end of the supervised warm-up and of the run."""
    try:
        return bool(read_complete(folder).get("pinned"))
    except CheckpointError as error:
        logger.warning("%s: kept, because %s cannot be read (%s)", folder, COMPLETE, error)
        return True


def prune(root: Path, keep: int | None) -> None:
    """Delete all but the newest `keep` checkpoints and the pinned ones; None keeps all."""
    if keep is None:
        return
    loose = [folder for folder in complete_checkpoints(root) if not is_pinned(folder)]
    for folder in loose[:-keep]:
        discard(folder)


# --- how one appears and goes ---


def declare_complete(writing: Path, step: int, *, pinned: bool) -> None:
    """Write `complete.json` once every other file is on the disk."""
    flush(writing)
    complete = {"step": step, "pinned": pinned, "files": record_files(writing)}
    (writing / COMPLETE).write_text(json.dumps(complete, indent=2) + "\n", encoding="utf-8")
    flush(writing)


def put_in_place(written: Path, folder: Path) -> None:
    """Rename a written checkpoint to its name. An existing one of that step is renamed first, still counts under that
    name, and is deleted afterwards."""
    aside = folder.with_name(f".replaced-{folder.name}")
    if folder.exists():
        if aside.exists():
            discard(aside)
        folder.rename(aside)
    written.rename(folder)
    if aside.exists():
        discard(aside)


def discard(folder: Path) -> None:
    """Delete a checkpoint. It is renamed first: if deletion is interrupted, the remaining files do not count."""
    leaving = folder.with_name(f".writing-gone-{folder.name}")
    shutil.rmtree(leaving, ignore_errors=True)
    folder.rename(leaving)
    shutil.rmtree(leaving)


def drop_unfinished(root: Path) -> None:
    """Delete unfinished checkpoints of a killed run, and those that were replaced."""
    for leftover in root.glob(".writing-*"):
        shutil.rmtree(leftover)
    for aside in root.glob(".replaced-*"):
        if (root / aside.name.removeprefix(".replaced-") / "complete.json").is_file():
            discard(aside)


def flush(folder: Path) -> None:
    """Push the files of a folder to the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as stream:
                os.fsync(stream.fileno())


# --- whether its files are as written ---


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
    """The content of `complete.json`: `step`, `pinned`, `files`.

    Raises:
        CheckpointError: missing, or damaged.
    """
    path = folder / COMPLETE
    if not path.is_file():
        raise CheckpointError(f"{folder}: no {COMPLETE}, so it is not a complete checkpoint; give another")
    try:
        found: object = plain_json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("files", []), list | dict):  # pyright: ignore[reportUnknownMemberType]
        raise damaged(folder, f"{COMPLETE} cannot be read")
    return cast("dict[str, Any]", found)


def verify_files(folder: Path, part: str = "") -> None:
    """Compare the files of a checkpoint with `complete.json`.

    Args:
        part: only the files of this folder in it.

    Raises:
        CheckpointError: a file that is missing or was changed.
    """
    try:
        _verify(folder, part)
    except OSError as error:  # a bad sector or a stale handle
        raise damaged(folder, error) from None


def _verify(folder: Path, part: str) -> None:
    files: object = read_complete(folder).get("files", [])
    recorded = cast("dict[str, Any]", files) if isinstance(files, dict) else None
    listed = cast("list[str]", files) if recorded is None else list(recorded)  # older checkpoints list names alone
    names = [str(name) for name in listed if not part or str(name).startswith(f"{part}/")]
    for name in names:
        if not (folder / name).exists():
            raise damaged(folder, f"{name} is missing")
    if recorded is None:
        return
    for name in names:
        entry = recorded[name]
        if not isinstance(entry, dict) or (folder / name).stat().st_size != cast("dict[str, Any]", entry).get("bytes"):
            raise damaged(folder, f"{name}: its size differs from {COMPLETE}")
    with ThreadPoolExecutor(4) as pool:
        for name, digest in zip(names, pool.map(_digest, [folder / name for name in names]), strict=True):
            if digest != recorded[name].get("sha256"):
                raise damaged(folder, f"{name}: its SHA-256 differs from {COMPLETE}")


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# --- its state ---

Count = Annotated[int, Field(ge=0, lt=2**48)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")  # other versions may write more


class _Progress(_Part):
    step: Count
    phase: Literal["sft", "warmup", "rl"]
    epoch: Count = 0
    position: Count = 0
    updates: Count = 0
    updates_in_epoch: Count | None = None
    on_policy: bool = True


class _Rewards(_Part):
    asked: Count
    failed: Count
    golden: dict[str, list[Annotated[float, Field(allow_inf_nan=False)]]]


class _State(_Part):
    progress: _Progress
    config: Annotated[str, Field(max_length=2**20)]
    evaluated_at: Count | None = None
    rows_per_forward: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    rewards: _Rewards | None = None
    base: dict[str, str | None] | None = None


def read_state(folder: Path) -> dict[str, Any]:
    """The content of `state.json`: the recipe's counters and the run file.

    Raises:
        CheckpointError: missing, or damaged.
    """
    try:
        found: object = plain_json.loads((folder / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise damaged(folder, reason_of(error)) from None
    if not isinstance(found, dict):
        raise damaged(folder, "state.json holds no object")
    return cast("dict[str, Any]", found)


def reason_of(error: Exception) -> str:
    """The first sentence of an error."""
    return str(error).partition("\n")[0].partition(". ")[0] or type(error).__name__


def require_sound(state: Mapping[str, Any], folder: Path) -> None:
    """Reject a `state.json` that no run could have written.

    Raises:
        CheckpointError: with the first value that is wrong.
    """
    try:
        found = _State.model_validate(state)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "state"
        raise damaged(folder, f"state.json: {where}: {first['msg']}") from None
    step = read_complete(folder).get("step")
    if step != found.progress.step:
        raise damaged(folder, f"state.json counts {found.progress.step} steps, {COMPLETE} {step}")
