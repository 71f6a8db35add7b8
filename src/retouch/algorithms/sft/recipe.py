"""Supervised fine-tuning: the denoising loss on examples with a target image, see `retouch.training.supervised`."""

from __future__ import annotations

from retouch.algorithms.sft.config import SftConfig
from retouch.training.build import Run
from retouch.training.session import Session
from retouch.training.supervised import supervised_phase


def train(run: Run) -> None:
    """Train to max_steps."""
    algorithm, lr = run.config.algorithm, run.config.optimizer.lr
    assert isinstance(algorithm, SftConfig)
    with Session(run) as session:
        supervised_phase(session, run.config.training.max_steps, lr, algorithm, shifted=algorithm.shifted_times)
        session.finish()
