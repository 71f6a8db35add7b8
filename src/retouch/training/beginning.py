"""Whether a run may begin in its run directory, or go on there. Imports no torch: it is checked before."""

from __future__ import annotations

import os
from pathlib import Path

from retouch.config import ConfigError, RunConfig
from retouch.config.check import require_trainable
from retouch.files.complete import complete_checkpoints
from retouch.observe.run_dir import RunDir
from retouch.training.resume import require_it_fits


def require_can_begin_here(config: RunConfig) -> None:
    """`require_can_begin` in the directory that the run file names, on the first process of a launcher alone: the
    others may see what it has created by then."""
    if os.environ.get("RANK", "0") == "0":
        require_can_begin(config, RunDir(config))


def require_can_begin(config: RunConfig, run_dir: RunDir) -> None:
    """Refuse a run directory that holds another run, or to which another process writes, and a `resume` that is no
    checkpoint, or one that the run file does not fit: before minutes go into loading a model.

    Raises:
        ConfigError, CheckpointError: naming the key.
    """
    given = config.resume
    is_new = given == "auto" and not (run_dir.path / "config.yaml").is_file()  # as every first start of a scheduler
    require_trainable(config.model_copy(update={"resume": None}) if is_new else config)
    run_dir.require_free()
    if given is None:
        run_dir.require_new()
    elif given != "auto":
        _require_checkpoint(given)
    require_it_fits(config, run_dir)


def _require_checkpoint(given: str) -> None:
    """Reject a `resume` that is no checkpoint; the message names the newest one below it."""
    folder = Path(given).expanduser()
    if (folder / "complete.json").is_file():
        return
    near = [*complete_checkpoints(folder), *complete_checkpoints(folder / "checkpoints")]
    what = "no checkpoint (it has no complete.json)" if folder.is_dir() else "no such checkpoint"
    remedy = f"give {near[-1]}" if near else "give a checkpoints/step-... folder"
    raise ConfigError(f"resume: given {given!r}: {what}; {remedy}, or auto")
