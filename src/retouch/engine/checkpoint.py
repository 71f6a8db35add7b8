"""Checkpoints: a directory that appears by one rename and is complete or does not count.

    checkpoints/step-000040/
        weights/      in the file formats of the adapter or of diffusers, ready for use
        ema/          the same, averaged
        snapshots/    NAME.safetensors: reference, old
        optimizer.pt  rng.pt  state.json  [rollouts.safetensors]
        complete.json written last: size and SHA-256 of every other file

Pickles are read by `saved_tensors.load_saved` alone.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from retouch.engine.engine import Engine
from retouch.engine.integrity import (
    COMPLETE,
    REMEDY,
    CheckpointError,
    read_complete,
    record_files,
    require_finite,
    tensors_of,
    verify_files,
)
from retouch.engine.policy import Policy
from retouch.saved_tensors import DamagedFile, load_saved
from retouch.types import Processes

logger = logging.getLogger(__name__)

_NAME = re.compile(r"(\.replaced-)?step-(\d{6,})")


SaveWeights = Callable[[Mapping[str, Tensor], Path], None]
"""(weights by parameter name, folder) -> files in a published format."""

LoadWeights = Callable[[Path], Mapping[str, Tensor]]
"""The inverse, exact."""


class Checkpoints:
    """Writes and reads the checkpoints of one run.

    Args:
        root: the run's `checkpoints` directory.
        keep: how many of the newest stay; None keeps all. Pinned ones always stay.
    """

    def __init__(
        self, root: Path, save_weights: SaveWeights, load_weights: LoadWeights, keep: int | None = None
    ) -> None:
        self.root = root
        self._save_weights = save_weights
        self._load_weights = load_weights
        self.keep = keep

    def save(
        self,
        step: int,
        engine: Engine,
        policy: Policy,
        state: Mapping[str, Any],
        tensors: Mapping[str, Tensor] | None = None,
        *,
        pinned: bool = False,
    ) -> Path:
        """Write checkpoint `step`; an existing complete one of that step is replaced. Every process must ask; the first
        one writes, whole weights where they are sharded, so that any number of processes can go on from it.

        Args:
            state: JSON values the recipe goes on from.
            tensors: rollouts not trained on yet, when the checkpoint lies inside an epoch.
        """
        folder = self.root / f"step-{step:06d}"
        everyones = None if tensors is None else engine.gather_list([dict(tensors)])  # each rank has rows of its own
        writing = self.root / f".writing-{folder.name}"
        if engine.is_main:
            self.root.mkdir(parents=True, exist_ok=True)
            drop_unfinished(self.root)
            writing.mkdir()
        for name in (None, *policy.snapshots):  # one after the other: whole weights may fill the memory of a process
            self._save_policy(policy.whole(name, keep=engine.is_main), name, writing, engine)
        optimizer = engine.state_dict()
        if engine.is_main:
            torch.save(optimizer, writing / "optimizer.pt")
            torch.save(rng_state(), writing / "rng.pt")
            if everyones is not None:
                rows = {f"{rank}/{name}": t for rank, own in enumerate(everyones) for name, t in own.items()}
                _save_tensors(rows, writing / "rollouts.safetensors")
            (writing / "state.json").write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
            declare_complete(writing, step, pinned=pinned)
            put_in_place(writing, folder)
            prune(self.root, self.keep)
        engine.barrier()
        return folder

    def _save_policy(self, weights: Mapping[str, Tensor], name: str | None, writing: Path, engine: Engine) -> None:
        if not engine.is_main:
            return
        if name in (None, "ema"):
            self._save_weights(weights, writing / (name or "weights"))
            return
        (writing / "snapshots").mkdir(exist_ok=True)
        _save_tensors(weights, writing / "snapshots" / f"{name}.safetensors")

    def load(self, folder: Path, engine: Engine, policy: Policy) -> tuple[dict[str, Any], dict[str, Tensor] | None]:
        """Restore everything -> (state, rollouts).

        Raises:
            CheckpointError: incomplete, damaged, or weights of another model.
        """
        verify_once(folder, engine)
        with _readable(folder):
            state = read_state(folder)
            # mapped where moments go to a GPU: read whole, all of them would stand in the memory of every process
            mapped = engine.device.type != "cpu"
            optimizer = cast("dict[str, Any]", load_saved(folder / "optimizer.pt", mmap=mapped))
            rng = cast("dict[str, Any]", load_saved(folder / "rng.pt"))
            rollouts = folder / "rollouts.safetensors"
            tensors = _rows_of_rank(load_file(rollouts), engine, folder) if rollouts.exists() else None
            snapshots = {file.stem: load_file(file) for file in sorted((folder / "snapshots").glob("*.safetensors"))}
        try:
            weights = self._load_weights(folder / "weights")
            if (folder / "ema").is_dir():
                snapshots["ema"] = dict(self._load_weights(folder / "ema"))
        except ValueError as error:
            raise CheckpointError(f"{folder}: {error}") from None
        for name, tensors_in in {"weights": weights, **snapshots, "optimizer": tensors_of(optimizer)}.items():
            require_finite(tensors_in, f"{folder}: {name}")
        try:
            policy.load(weights)
            for name, snapshot in snapshots.items():
                policy.load(snapshot, name)
        except ValueError as error:
            raise CheckpointError(f"{folder}: {error}; was model.train changed since?") from None
        engine.load_state_dict(optimizer)
        set_rng_state(rng)
        return state, tensors


def declare_complete(writing: Path, step: int, *, pinned: bool) -> None:
    """Record every file in `complete.json`, after they are on the disk."""
    flush(writing)
    complete = {"step": step, "pinned": pinned, "files": record_files(writing)}
    (writing / COMPLETE).write_text(json.dumps(complete, indent=2) + "\n", encoding="utf-8")
    flush(writing)


def verify_once(folder: Path, processes: Processes) -> None:
    """`verify_files` by the first process, for all of them.

    Raises:
        CheckpointError: on every process.
    """
    problem: str | None = None
    if processes.rank == 0:
        try:
            verify_files(folder)
        except CheckpointError as error:
            problem = str(error)
    if (found := processes.gather_list([problem])[0]) is not None:
        raise CheckpointError(found)


def complete_checkpoints(root: Path) -> list[Path]:
    """Complete checkpoints, lowest step first; one that was moved aside counts until another of its step is there."""
    named = [(match, folder) for folder in root.glob("*step-*") if (match := _NAME.fullmatch(folder.name))]
    found = [(match, folder) for match, folder in named if (folder / "complete.json").is_file()]
    aside_first = sorted(found, key=lambda pair: pair[0][1] is None)
    of_step = {int(match[2]): folder for match, folder in aside_first}
    return [of_step[step] for step in sorted(of_step)]


def read_state(folder: Path) -> dict[str, Any]:
    """What the recipe saved.

    Raises:
        CheckpointError: not there, or damaged.
    """
    with _readable(folder):
        return cast("dict[str, Any]", json.loads((folder / "state.json").read_text(encoding="utf-8")))


def is_pinned(folder: Path) -> bool:
    """Whether pruning leaves it: the ends of warm-up and run."""
    try:
        return bool(read_complete(folder).get("pinned"))
    except CheckpointError as error:
        logger.warning("%s: kept, because %s cannot be read (%s)", folder, COMPLETE, error)
        return True


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Files of a checkpoint that are missing or damaged, whatever torch, safetensors or json call it, as one error."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError, DamagedFile, json.JSONDecodeError, UnicodeDecodeError) as error:
        reason = str(error).partition("\n")[0].partition(". ")[0] or type(error).__name__
        raise CheckpointError(f"{folder}: damaged ({reason}); {REMEDY}") from None


def _rows_of_rank(tensors: Mapping[str, Tensor], engine: Engine, folder: Path) -> dict[str, Tensor]:
    """This rank's rollouts of those of all ranks.

    Raises:
        CheckpointError: written by another number of processes.
    """
    ranks = len({key.partition("/")[0] for key in tensors})
    if ranks != engine.world_size:
        raise CheckpointError(
            f"{folder}: lies inside an epoch of {ranks} process{'es' if ranks > 1 else ''}, but there are "
            f"{engine.world_size}; resume on as many, or from a checkpoint without rollouts.safetensors"
        )
    prefix = f"{engine.rank}/"
    return {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}


def _save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    # safetensors refuses tensors that share storage; clones never do
    save_file({name: t.detach().cpu().clone().contiguous() for name, t in tensors.items()}, path)


def prune(root: Path, keep: int | None) -> None:
    """Delete all but the newest `keep` checkpoints, those that are pinned aside; None keeps all."""
    if keep is None:
        return
    loose = [folder for folder in complete_checkpoints(root) if not is_pinned(folder)]
    for folder in loose[:-keep]:
        discard(folder)


def put_in_place(written: Path, folder: Path) -> None:
    """By one rename. A checkpoint of the same step is moved aside before, where it still counts, and deleted when the
    new one is there."""
    aside = folder.with_name(f".replaced-{folder.name}")
    if folder.exists():
        if aside.exists():
            discard(aside)
        folder.rename(aside)
    written.rename(folder)
    if aside.exists():
        discard(aside)


def discard(folder: Path) -> None:
    """Delete a checkpoint; under another name first, so that no rest of it is taken for a complete one."""
    leaving = folder.with_name(f".writing-gone-{folder.name}")
    shutil.rmtree(leaving, ignore_errors=True)
    folder.rename(leaving)
    shutil.rmtree(leaving)


def drop_unfinished(root: Path) -> None:
    """Delete what a run that was killed while it wrote left behind, and what its successor has replaced."""
    for leftover in root.glob(".writing-*"):
        shutil.rmtree(leftover)
    for aside in root.glob(".replaced-*"):
        if (root / aside.name.removeprefix(".replaced-") / "complete.json").is_file():
            discard(aside)


def flush(folder: Path) -> None:
    """Push files to the disk before the rename that declares them complete."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as stream:
                os.fsync(stream.fileno())


def rng_state() -> dict[str, Any]:
    """Global generators; the run's own draws need none (they derive from seeds), libraries may."""
    name, keys, position, has_gauss, cached = np.random.get_state()
    version, internal, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all(),
        "numpy": [name, torch.from_numpy(np.asarray(keys, np.int64)), position, has_gauss, cached],  # pyright: ignore
        "python": [version, list(internal), gauss],
    }


def set_rng_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
