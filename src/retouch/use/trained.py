"""Where trained weights are: a run directory, a checkpoint or a weights folder. No torch."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from retouch.config import ConfigError, RunConfig, load_run
from retouch.config.training import has_rl
from retouch.engine.saved import sound_state
from retouch.errors import CheckpointError
from retouch.files.complete import COMPLETE, complete_checkpoints, verify_files, verify_weights
from retouch.files.disk import real_place

logger = logging.getLogger(__name__)

ADAPTER = "ip-adapter"
"""Stem of the files of a style adapter (`retouch.adapters.formats.NAME`, which imports torch)."""


_AFTER_RL = "after RL"


@dataclass(frozen=True)
class Trained:
    """A run file and the folders of its weights by name, oldest first; the base has none. `run` is the run directory,
    if the run file lies in one. `after_rl` names the weights that rewards have trained."""

    config: RunConfig
    weights: Mapping[str, Path]
    run: Path | None = None
    after_rl: frozenset[str] = frozenset()

    @property
    def newest(self) -> Path | None:
        """The newest weights; None: the base."""
        return next(reversed(list(self.weights.values())), None)

    @classmethod
    def find(
        cls,
        run: Path | None,
        config: Path | None,
        weights: Path | None,
        raw: bool | None,
        unread: Collection[str] = (),
        trust: bool = False,
    ) -> Trained:
        """Find the weights of a run directory (after the supervised warm-up, and the newest), or combine a run file
        and a weights folder.

        Args:
            raw: of a checkpoint the raw weights (True) or the EMA weights (False); None: those of the run's
                `evaluation.weights`.
            unread: sections of the run file that are not needed; see `load_run`.
            trust: use the code and the hosts that a run file in a run directory names.

        Raises:
            ConfigError, CheckpointError: no run directory, no weights, or code or hosts without consent.
        """
        if config is not None:
            loaded = load_run(config, unread=unread, trust=trust or None)
            return cls(loaded, {}) if weights is None else cls._given(loaded, weights, raw, None)
        assert run is not None
        if not (run / "config.yaml").is_file():
            raise ConfigError(f"--run: given {run}; expected a run directory (it has no config.yaml)")
        loaded = load_run(run / "config.yaml", trust=trust)
        if weights is not None:
            return cls._given(loaded, weights, raw, run)
        folders = complete_checkpoints(run / "checkpoints")
        if not folders:
            raise CheckpointError(f"{run} has no complete checkpoint yet")
        named = {_stage(f, loaded): f for f in folders[:-1]}  # the newest of each stage
        chosen = {"warmed up": named["warmed up"]} if "warmed up" in named else {}
        chosen[_stage(folders[-1], loaded)] = folders[-1]
        after_rl = frozenset(chosen) & {_AFTER_RL}
        return cls(loaded, {name: _chosen(folder, loaded, raw) for name, folder in chosen.items()}, run, after_rl)

    @classmethod
    def _given(cls, config: RunConfig, weights: Path, raw: bool | None, run: Path | None) -> Trained:
        """Weights of a checkpoint, a folder or a file; those that lie in no checkpoint, or in one without a readable
        state, are the end of the run."""
        weights = real_place(weights)
        name, chosen = "trained", _chosen(weights, config, raw)
        by_rl = has_rl(config)
        checkpoint = next((one for one in (weights, *weights.parents[:2]) if (one / COMPLETE).is_file()), None)
        if checkpoint is not None:
            with suppress(CheckpointError):
                by_rl = _stage(checkpoint, config) == _AFTER_RL
        return cls(config, {name: chosen}, run, frozenset({name} if by_rl else ()))


def weights_folder(path: Path, *, raw: bool) -> Path:
    """The weights in a checkpoint (EMA weights if it has them and not `raw`), or the weights folder itself.

    Raises:
        CheckpointError: neither.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such checkpoint or weights folder")
    if (path / "weights").is_dir():
        part = "ema" if (path / "ema").is_dir() and not raw else "weights"
        verify_files(path, part)
        return path / part
    if not list(path.glob("*.safetensors")):
        raise CheckpointError(f"{path}: neither a checkpoint nor a folder of weights")
    verify_weights(path)
    return path


def chosen_weights(path: Path, raw: bool | None, *, evaluated_raw: bool) -> Path:
    """`weights_folder` by what the caller chose; None takes those that the run evaluated.

    Raises:
        CheckpointError: no weights, or no EMA weights where they are chosen.
    """
    folder = weights_folder(path, raw=evaluated_raw if raw is None else raw)
    if raw is None and folder != path and folder.name == "weights" and (path / "ema").is_dir():
        logger.info("raw weights, as evaluation.weights sets; --ema takes the EMA weights of %s", path)
    if raw is False and folder.name == "weights":
        raise CheckpointError(f"{path} has no EMA weights; leave --ema out")
    return folder


def _chosen(path: Path, config: RunConfig, raw: bool | None) -> Path:
    """The folder of weights to load; of a style adapter also a bare file, or a folder with only its .bin."""
    # Other programs pass a style adapter on as one file, or a folder with its .bin alone. Everything else is a
    # checkpoint or its folder of weights, of which the run file or the caller chooses raw or EMA.
    adapter = path / f"{ADAPTER}.bin" if path.is_dir() and not (path / "weights").is_dir() else path
    if adapter.is_file() and not list(path.glob("*.safetensors")):
        if config.model.train.kind != "ip_adapter":
            raise CheckpointError(
                f"{path}: a file of weights, which only a run with model.train.kind=ip_adapter takes; give the folder "
                "of the weights, or for a LoRA set model.train.initial_adapter in the run file"
            )
        if raw is not None:
            raise CheckpointError(f"{path}: a file has no raw or EMA weights to choose; leave --raw and --ema out")
        verify_weights(adapter.parent)
        return adapter
    return chosen_weights(path, raw, evaluated_raw=config.evaluation.weights == "raw")


def _stage(folder: Path, config: RunConfig) -> str:
    """The last stage of a checkpoint's training: "warmed up", "after RL", or "trained"."""
    progress = sound_state(folder)["progress"]
    if progress["phase"] != "rl":
        return "trained"
    supervised = config.algorithm.supervised_steps(config)
    return "warmed up" if progress["step"] == supervised > 0 else _AFTER_RL
