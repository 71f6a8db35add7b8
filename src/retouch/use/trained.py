"""Trained weights, and a model that any of them can be loaded into."""

from __future__ import annotations

import gc
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from retouch.adapters.train_ip_adapter import initial_adapter
from retouch.adapters.trainee import Trainee, make_trainable
from retouch.config import ConfigError, RunConfig, load_run
from retouch.engine import CheckpointError, Engine, Policy
from retouch.engine.checkpoint import complete_checkpoints, read_state
from retouch.engine.integrity import verify_files
from retouch.families.registry import load_model
from retouch.types import DiffusionModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trained:
    """A run file and where weights for it are, by name, oldest first ("base" has none)."""

    config: RunConfig
    weights: Mapping[str, Path]

    @property
    def newest(self) -> Path | None:
        """The weights to use; None: the base."""
        return next(reversed(list(self.weights.values())), None)

    @classmethod
    def find(
        cls,
        run: Path | None,
        config: Path | None,
        weights: Path | None,
        raw: bool | None,
        unread: Collection[str] = (),
    ) -> Trained:
        """From a run directory (its warmed-up and newest checkpoints), or a run file and a weights folder.

        Args:
            raw: of a checkpoint the raw weights, or the averaged ones; None: those that the run evaluates
                (`evaluation.weights`), so that its curves can be gone on with.
            unread: sections of a run file that are not read from; see `load_run`.

        Raises:
            ConfigError, CheckpointError: nothing there.
        """
        if config is not None:
            loaded = load_run(config, unread=unread)
            return cls(loaded, {} if weights is None else {"trained": _evaluated(weights, loaded, raw)})
        assert run is not None
        if not (run / "config.yaml").is_file():
            raise ConfigError(f"--run: {run} is not a run directory (no config.yaml)")
        loaded = load_run(run / "config.yaml")
        folders = complete_checkpoints(run / "checkpoints")
        if weights is not None:
            return cls(loaded, {"trained": _evaluated(weights, loaded, raw)})
        if not folders:
            raise CheckpointError(f"{run} has no complete checkpoint yet")
        named = {_stage(f, loaded): f for f in folders[:-1]}  # of each stage the newest
        chosen = {"warmed up": named["warmed up"]} if "warmed up" in named else {}
        chosen[_stage(folders[-1], loaded)] = folders[-1]
        return cls(loaded, {name: _evaluated(folder, loaded, raw) for name, folder in chosen.items()})


class Loaded:
    """A model ready to sample: as the base that was loaded, then with any of several weights."""

    def __init__(self, config: RunConfig, *, keep_base: bool = False, embedded: bool = False) -> None:
        """Load the base.

        Args:
            keep_base: keep a copy of its weights on the CPU, to come back to it after others.
            embedded: as of `load_model`.
        """
        self.config = config
        self.engine = Engine(config.training, config.optimizer, config.seed)
        initial_adapter(config.model.train, config.model.family)
        self.model: DiffusionModel = load_model(config.model, self.engine.device, embedded=embedded)
        self.trainee: Trainee = make_trainable(self.model.network, config.model.train, self.model.spec, config.seed)
        self.network: nn.Module = self.engine.prepare(self.model.network, gradient_checkpointing=False)
        self.policy = Policy(self.model.network)
        state = self.policy.state() if keep_base else {}
        self._base: dict[str, Tensor] = {n: t.detach().to("cpu", copy=True) for n, t in state.items()}
        self._is_base = True

    @property
    def guidance_scale(self) -> float:
        given = self.config.rollout.guidance_scale
        return self.model.spec.guidance_scale if given is None else given

    def load(self, weights: Path | None) -> None:
        """Use the weights of a folder; None: the base.

        Raises:
            CheckpointError: weights of another model.
            RuntimeError: the base after others, and no copy of it.
        """
        if weights is None:
            if not self._is_base and not self._base:
                raise RuntimeError("other weights took the place of the base; Loaded(config, keep_base=True) keeps it")
            if not self._is_base:
                self.policy.load(self._base)
            self._is_base = True
            return
        try:
            self.policy.load(self.trainee.load(weights))
        except (ValueError, OSError) as error:
            raise CheckpointError(f"{weights}: {error}") from None
        self._is_base = False


def free_memory() -> None:
    """Give back the memory of models that are not in use: their networks and hooks refer to each other, so that they
    stay until the garbage collector finds them."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def weights_folder(path: Path, *, raw: bool) -> Path:
    """The weights inside a checkpoint (averaged ones where it has them, unless `raw`), or the folder itself.

    Raises:
        CheckpointError: nothing of the kind.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such checkpoint or weights folder")
    if (path / "weights").is_dir():
        part = "ema" if (path / "ema").is_dir() and not raw else "weights"
        verify_files(path, part)
        return path / part
    if not list(path.glob("*.safetensors")):
        raise CheckpointError(f"{path}: holds neither a checkpoint nor weights")
    return path


def _evaluated(path: Path, config: RunConfig, raw: bool | None) -> Path:
    folder = weights_folder(path, raw=config.evaluation.weights == "raw" if raw is None else raw)
    if raw is None and folder != path and folder.name == "weights" and (path / "ema").is_dir():
        logger.info("raw weights, as evaluation.weights says; --ema takes the averaged ones that %s has, too", path)
    if raw is False and folder.name == "weights":
        raise CheckpointError(f"{path} has no averaged weights; leave --ema out")
    return folder


def _stage(folder: Path, config: RunConfig) -> str:
    """What the weights of a checkpoint went through: "warmed up", "after RL", or "trained"."""
    progress = read_state(folder)["progress"]
    if config.algorithm.name == "sft" or progress["phase"] != "rl":
        return "trained"
    supervised = config.algorithm.supervised_steps(config)
    return "warmed up" if progress["step"] == supervised > 0 else "after RL"
