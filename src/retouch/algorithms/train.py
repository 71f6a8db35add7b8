"""Train from a run file."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from retouch.algorithms import ALGORITHMS
from retouch.observe.sinks import require_sinks
from retouch.registry import load_attribute
from retouch.training.beginning import require_can_begin_here
from retouch.training.files import require_files

if TYPE_CHECKING:
    from retouch.config import RunConfig
    from retouch.training.build import Run

logger = logging.getLogger(__name__)


def train(config: RunConfig) -> Path:
    """Check that the run's files and trackers are there and that it may begin, then train -> the run directory."""
    require_files(config)
    require_can_begin_here(config)
    if os.environ.get("RANK", "0") == "0":  # the import of torch takes seconds, and the model may take minutes
        require_sinks(config)
        logger.info("%s: loading torch, then %s", config.name, config.model.family)
    return load_attribute(config.algorithm.trainer)(config)


def recipe(name: str) -> Callable[[Run], None]:
    """The training function of an algorithm that trains a built run."""
    return load_attribute(ALGORITHMS[name].recipe)
