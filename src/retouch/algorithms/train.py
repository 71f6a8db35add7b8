"""The algorithms: each file reads from top to bottom as its paper's."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from retouch.training.files import require_files

if TYPE_CHECKING:
    from retouch.config import RunConfig
    from retouch.training.build import Run

RECIPES = {
    "sft": "retouch.algorithms.sft.recipe:train",
    "grpo": "retouch.algorithms.grpo.recipe:train",
    "ppo": "retouch.algorithms.grpo.recipe:train",
    "dpo": "retouch.algorithms.dpo.recipe:train",
    "nft": "retouch.algorithms.nft.recipe:train",
}
"""`algorithm.name` -> module:function."""


def recipe(name: str) -> Callable[[Run], None]:
    """The training function of an algorithm."""
    module, _, function = RECIPES[name].partition(":")
    return getattr(importlib.import_module(module), function)


def train(config: RunConfig) -> Path:
    """Build what a run file names and train it -> the run directory."""
    require_files(config)
    if config.algorithm.name == "vlm_grpo":  # trl brings its own loop, processes and precision
        from retouch.algorithms.vlm_grpo.recipe import train

        return train(config)
    from retouch.training.build import build

    run = build(config)
    try:
        recipe(config.algorithm.name)(run)
    finally:
        run.close()
    return run.dir.path
