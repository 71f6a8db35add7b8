"""Train what a run file says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from retouch.registry import load_attribute
from retouch.training.files import require_files

if TYPE_CHECKING:
    from retouch.config import RunConfig


def train(config: RunConfig) -> Path:
    """Check that the run's files are there, then train -> the run directory."""
    require_files(config)
    return load_attribute(config.algorithm.trainer)(config)
