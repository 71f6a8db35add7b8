"""Opening a run of any algorithm: its directory, its rewards, the first lines of its log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from retouch.config import Derived, RunConfig
from retouch.config.check import warnings_of
from retouch.config.presets import preset_lines
from retouch.observe import RunDir
from retouch.observe.log import header, log_cost
from retouch.rewards.table import RewardTable
from retouch.training.scoring import wait_for_rewards

if TYPE_CHECKING:
    from retouch.algorithms.vlm_grpo.config import VlmDerived

logger = logging.getLogger(__name__)


class OpenedRun(Protocol):
    """The parts of a run that are opened."""

    @property
    def config(self) -> RunConfig: ...
    @property
    def derived(self) -> Derived | VlmDerived: ...
    @property
    def rewards(self) -> RewardTable: ...
    @property
    def dir(self) -> RunDir: ...
    @property
    def eval_data(self) -> Sequence[Any]: ...
    @property
    def eval_is_held_out(self) -> bool: ...


def open_run(
    run: OpenedRun, gather: Callable[[Sequence[Any]], list[Any]], folder: Path | None, step: int, *, evaluated: bool
) -> None:
    """Create the run directory, or continue in it, and wait until the rewards can be scored. The directory is locked
    before, when the checkpoint is chosen.

    Args:
        folder: the checkpoint that the run resumes from; None for a new run.
        step: of the checkpoint.
        evaluated: whether the evaluation of that step stands.

    Raises:
        ConfigError, RewardOutage: the run cannot begin.
    """
    run.dir.open(None if folder is None else step, evaluated=evaluated, checkpoint=folder)
    if run.rewards.entries:
        run.rewards.start(gather)
        wait_for_rewards(run.rewards, run.config.reward_client)


def log_header(run: OpenedRun, trained: int, folder: Path | None) -> None:
    """Log what the run is, what it costs, and what may be wrong with it.

    Args:
        trained: number of trained parameters.
    """
    logger.info("%s", header(run.config, run.derived, trained, folder))
    if run.dir.main:
        log_cost(run.config, run.derived.world_size)
    warnings, examples = warnings_of(run.config, run.derived.world_size), len(run.eval_data)
    if examples < run.config.evaluation.num_examples:
        warnings += run.config.evaluation.gold_warnings(run.config, examples)
    for line in warnings if run.dir.main else ():
        logger.warning("%s", line)
    for line in preset_lines(run.config):
        logger.info("%s", line)
    if not run.eval_is_held_out:
        logger.warning("evaluating on training examples, not on a held-out set; set evaluation.data")
