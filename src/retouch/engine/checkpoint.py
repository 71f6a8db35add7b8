"""Checkpoints: weights, optimizer, random state and counters of a run, written and restored.

checkpoints/step-000040/
    weights/      in the file formats of the adapter or of diffusers, ready for use
    ema/          the EMA weights, the same way
    snapshots/    NAME.safetensors: reference, old
    optimizer.pt  rng.pt  state.json  [rollouts.safetensors]
    complete.json written last; see `saved`
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from retouch.engine.engine import Engine
from retouch.engine.policy import Policy
from retouch.engine.saved import (
    damaged,
    declare_complete,
    drop_unfinished,
    prune,
    put_in_place,
    read_state,
    reason_of,
    verify_files,
)
from retouch.errors import CheckpointError, ConfigError, DamagedFile, logging_long
from retouch.files.saved_tensors import load_saved
from retouch.process.process_wide import rng_state, set_rng_state
from retouch.types import Processes

SaveWeights = Callable[[Mapping[str, Tensor], Path], None]
"""(weights by parameter name, folder) -> files in a published format."""

LoadWeights = Callable[[Path], Mapping[str, Tensor]]
"""The inverse, exact."""

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Checkpoints:
    """Writes and reads the checkpoints of one run.

    Attributes:
        root: the run's `checkpoints` directory.
        keep: number of the newest to keep in addition to pinned ones; None keeps all.
    """

    root: Path
    save_weights: SaveWeights
    load_weights: LoadWeights
    keep: int | None = None
    _is_readable: bool = field(default=False, init=False)

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
        """Write checkpoint `step` -> its folder. A collective: every process calls it, the first one writes. Weights
        are gathered: any number of processes can resume from them.

        Args:
            state: JSON values that the recipe resumes from.
            tensors: of a mid-epoch checkpoint, the rollouts not trained on yet.
        """
        folder = self.root / f"step-{step:06d}"
        everyones = None if tensors is None else engine.tensors_on_first(tensors)  # each rank has its own
        writing = self.root / f".writing-{folder.name}"
        if engine.is_main:
            self.root.mkdir(parents=True, exist_ok=True)
            drop_unfinished(self.root)
            writing.mkdir()
        for name in (None, *policy.snapshots):  # one at a time: whole weights may fill the memory of a process
            self._save_policy(policy.whole(name, keep=engine.is_main), name, writing, engine)
        optimizer = engine.state_dict()
        if engine.is_main:
            torch.save(optimizer, writing / "optimizer.pt")
            self._require_readable(writing / "optimizer.pt", engine.config.factory)
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

    def _require_readable(self, file: Path, factory: str | None) -> None:
        """Read the first state of an `optimizer.factory` back: what torch loads without running it depends on the
        class, and at a resume the steps would be lost.

        Raises:
            ConfigError: the state holds something else.
        """
        if factory is None or self._is_readable:
            return
        try:
            load_saved(file, mmap=True)
        except DamagedFile as error:
            raise ConfigError(
                f"optimizer.factory: given {factory!r}, from whose state no run could resume: {error}; set a "
                "class whose state is tensors and plain values"
            ) from None
        self._is_readable = True

    def _save_policy(self, weights: Mapping[str, Tensor], name: str | None, writing: Path, engine: Engine) -> None:
        if not engine.is_main:
            return
        if name in (None, "ema"):
            self.save_weights(weights, writing / (name or "weights"))
            return
        (writing / "snapshots").mkdir(exist_ok=True)
        _save_tensors(weights, writing / "snapshots" / f"{name}.safetensors")

    def load(
        self, folder: Path, engine: Engine, policy: Policy, options: Iterable[str] = ()
    ) -> tuple[dict[str, Any], dict[str, Tensor] | None]:
        """Restore everything -> (state, rollouts).

        Args:
            options: names of `optimizer.options` that it was written under.

        Raises:
            CheckpointError: incomplete, damaged, weights of another model, or weights and moments with NaN or Inf.
        """
        verify_once(folder, engine)
        with _readable(folder):
            state = read_state(folder)
            # memory-mapped where moments go to a GPU, or every process would hold all of them on the CPU
            mapped = engine.device.type != "cpu"
            optimizer = cast("dict[str, Any]", load_saved(folder / "optimizer.pt", mmap=mapped))
            rng = cast("dict[str, Any]", load_saved(folder / "rng.pt"))
            rollouts = folder / "rollouts.safetensors"
            tensors = _rows_of_rank(rollouts, engine) if rollouts.exists() else None
            snapshots = {file.stem: load_file(file) for file in sorted((folder / "snapshots").glob("*.safetensors"))}
        try:
            weights = self.load_weights(folder / "weights")
            if (folder / "ema").is_dir():
                snapshots["ema"] = dict(self.load_weights(folder / "ema"))
        except ValueError as error:
            raise CheckpointError(f"{folder}: {error}") from None
        named = {"weights": weights, **snapshots, "optimizer": tensors_of(optimizer)}
        for name, tensors_in in named.items():
            require_finite(tensors_in, f"{folder}: {name}")
        try:
            policy.load(weights)
            for name, snapshot in snapshots.items():
                policy.load(snapshot, name)
        except ValueError as error:
            raise CheckpointError(f"{folder}: {error}; was model.train changed since?") from None
        engine.load_state_dict(optimizer, options)
        set_rng_state(rng)
        return state, tensors


def verify_once(folder: Path, processes: Processes) -> None:
    """`verify_files` by the first process, for all of them.

    Raises:
        CheckpointError: on every process.
    """
    problem: str | None = None
    if processes.rank == 0:
        try:
            with logging_long(logger, f"comparing the files of {folder} with their SHA-256"):
                verify_files(folder)
        except CheckpointError as error:
            problem = str(error)
    if (found := processes.gather_list([problem])[0]) is not None:
        raise CheckpointError(found)


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Raise CheckpointError for files that torch or safetensors cannot read."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError, DamagedFile) as error:
        raise damaged(folder, reason_of(error)) from None


def _rows_of_rank(file: Path, engine: Engine) -> dict[str, Tensor]:
    """This rank's rollouts; no others are read.

    Raises:
        CheckpointError: a mid-epoch checkpoint of another number of processes.
    """
    with safe_open(file, "pt") as tensors:
        names = list(tensors.keys())
        ranks = len({name.partition("/")[0] for name in names})
        if ranks != engine.world_size:
            raise CheckpointError(
                f"{file.parent}: a mid-epoch checkpoint of {ranks} process{'es' if ranks > 1 else ''}; this run has "
                f"{engine.world_size}; resume on {ranks}, or from a checkpoint without rollouts.safetensors"
            )
        prefix = f"{engine.rank}/"
        return {name.removeprefix(prefix): tensors.get_tensor(name) for name in names if name.startswith(prefix)}


def _save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    # safetensors rejects tensors that share storage
    save_file({name: t.detach().cpu().clone().contiguous() for name, t in tensors.items()}, path)


def require_finite(tensors: Mapping[str, Tensor], where: str) -> None:
    """Reject weights or moments that contain NaN or Inf.

    Raises:
        CheckpointError: with the first such tensor.
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
