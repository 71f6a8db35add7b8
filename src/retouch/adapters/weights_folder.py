"""The folder of weights inside a checkpoint or a run directory."""

from __future__ import annotations

from pathlib import Path


def newest_weights(folder: Path) -> Path:
    """The weights of a checkpoint (EMA weights where it has them), or those of the newest complete checkpoint of a run
    directory; any other folder itself."""
    checkpoints = [path for path in sorted(folder.glob("checkpoints/step-*")) if (path / "complete.json").is_file()]
    if checkpoints:
        folder = checkpoints[-1]
    if not (folder / "complete.json").is_file():
        return folder
    return next((folder / name for name in ("ema", "weights") if (folder / name).is_dir()), folder)
