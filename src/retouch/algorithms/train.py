"""Train from a run file."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from retouch.algorithms import ALGORITHMS
from retouch.config.cost import DEFAULT_GPU, cost, cost_lines, known_peak
from retouch.machine import nvidia_smi
from retouch.observe.measuring import Measurement
from retouch.registry import load_attribute
from retouch.training.files import require_files

if TYPE_CHECKING:
    from retouch.config import RunConfig
    from retouch.training.build import Run

logger = logging.getLogger(__name__)


def train(config: RunConfig) -> Path:
    """Check that the run's files are there, then train -> the run directory."""
    require_files(config)
    if os.environ.get("RANK", "0") == "0":
        Measurement("cost of the run").take(log_cost, config)
    return load_attribute(config.algorithm.trainer)(config)


def log_cost(config: RunConfig) -> None:
    """Log the cost of a run on the GPUs of this machine, or on the default one where none is known."""
    gpu = next((name for name in nvidia_smi() if known_peak(name)), DEFAULT_GPU)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    logger.info("\n".join(cost_lines(config, cost(config, processes, gpu))))


def recipe(name: str) -> Callable[[Run], None]:
    """The training function of an algorithm that trains a built run."""
    return load_attribute(ALGORITHMS[name].recipe)
