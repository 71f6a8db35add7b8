"""Where a run stands: the numbers of its state, which also has weights and the rows of the epoch under way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from torch import Tensor

from retouch.algorithms.base import RlConfig
from retouch.config import RunConfig

Phase = Literal["sft", "warmup", "rl"]

SAVED_AS = {"counts_in_loss": "weight", "optimizer_step": "step_of", "step_in_epoch": "position"}
"""Name of a tensor of `EpochRows`, or of a number of `Progress` -> its name in checkpoints, where no name changes."""


def saved(state: object) -> dict[str, Any]:
    """The fields of a dataclass under their names in checkpoints.

    Raises:
        ValueError: two fields have one name there, as those of a plug-in might.
    """
    names = {name: SAVED_AS.get(name, name) for name in vars(state)}
    if len(set(names.values())) < len(names):
        raise ValueError(f"{type(state).__name__}: two fields have one name in checkpoints; rename one of {names}")
    return {names[name]: value for name, value in vars(state).items()}


def restored(kind: type[Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a dataclass by their names in checkpoints -> the same under their own."""
    names = {SAVED_AS.get(f.name, f.name): f.name for f in fields(kind)}
    return {names.get(name, name): value for name, value in state.items()}


class EpochRows(Protocol):
    """A dataclass of tensors, one row for each sample (DPO: pair)."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    position: Tensor
    seed: Tensor
    counts_in_loss: Tensor
    optimizer_step: Tensor


Rows = TypeVar("Rows", bound=EpochRows)


@dataclass
class Progress:
    """Where a run stands.

    Attributes:
        step: optimizer steps taken.
        phase: what the next step belongs to.
        epoch: rollout epoch under way or next.
        step_in_epoch: optimizer steps taken within it.
        updates: optimizer steps that changed the weights (EMA counts these).
        updates_in_epoch: those of `step_in_epoch` that did.
        on_policy: the weights at the start of the epoch are those that sample its rollouts; false with an old policy
            that differs from them.
    """

    step: int = 0
    phase: Phase = "warmup"
    epoch: int = 0
    step_in_epoch: int = 0
    updates: int = 0
    updates_in_epoch: int = 0
    on_policy: bool = True


def first_phase(config: RunConfig) -> Phase:
    """The phase of a new run."""
    supervised = config.algorithm.supervised_steps(config)
    return "rl" if not supervised else "warmup" if isinstance(config.algorithm, RlConfig) else "sft"
