"""Checkpoint directories: put complete ones in place, delete others, and read their state. No torch.

A checkpoint is written under another name and appears by one rename; `complete` compares its files.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from retouch.config import yaml12
from retouch.errors import CheckpointError
from retouch.files import plain_json
from retouch.files.complete import COMPLETE, complete_checkpoints, damaged, read_complete, record_files, verify_files
from retouch.files.disk import read_bounded

logger = logging.getLogger(__name__)


# --- which are kept ---


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
    _delete(leaving)
    folder.rename(leaving)
    _delete(leaving)


def _delete(path: Path) -> None:
    """Delete a folder, or a file in its place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def drop_unfinished(root: Path) -> None:
    """Delete unfinished checkpoints of a killed run, and those that were replaced."""
    for leftover in root.glob(".writing-*"):
        _delete(leftover)
    for aside in root.glob(".replaced-*"):
        if (root / aside.name.removeprefix(".replaced-") / "complete.json").is_file():
            discard(aside)


def flush(folder: Path) -> None:
    """Push the files of a folder to the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as stream:
                os.fsync(stream.fileno())


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


STATE = "state.json"

_MOST_BYTES = 64 << 20
"""Size of a `state.json`, at most."""


def sound_state(folder: Path) -> dict[str, Any]:
    """The content of `state.json`, which was compared with `complete.json` and is of a run.

    Raises:
        CheckpointError: missing, damaged, or nothing that a run could have written.
    """
    verify_files(folder, STATE)
    state = read_state(folder)
    require_sound(state, folder)
    return state


def read_state(folder: Path) -> dict[str, Any]:
    """The content of `state.json`: the recipe's counters and the run file.

    Raises:
        CheckpointError: missing, or damaged.
    """
    try:
        found: object = plain_json.loads(read_bounded(folder / STATE, _MOST_BYTES))
    except (OSError, ValueError) as error:
        raise damaged(folder, reason_of(error)) from None
    if not isinstance(found, dict):
        raise damaged(folder, f"{STATE} holds no object")
    return cast("dict[str, Any]", found)


def saved_run_file(state: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The run file of a checkpoint, as a mapping.

    Raises:
        CheckpointError: none.
    """
    try:
        found: object = yaml12.parse(state["config"])
    except yaml.YAMLError as error:
        raise damaged(folder, f"{STATE}: config is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise damaged(folder, f"{STATE}: config is no run file")
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
