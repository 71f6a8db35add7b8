"""Where a run stands: the numbers of its state, which also has weights and the rows of the epoch under way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from torch import Tensor

from retouch.algorithms.base import RlConfig
from retouch.config import RunConfig

Phase = Literal["sft", "warmup", "rl"]


class EpochRows(Protocol):
    """A dataclass of tensors, one row for each sample (DPO: pair)."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    position: Tensor
    seed: Tensor
    weight: Tensor
    step_of: Tensor


Rows = TypeVar("Rows", bound=EpochRows)


@dataclass
class Progress:
    """Where a run stands.

    Attributes:
        step: optimizer steps taken.
        phase: what the next step belongs to.
        epoch: rollout epoch under way or next.
        position: optimizer steps taken within it.
        updates: optimizer steps that changed the weights (EMA counts these).
        updates_in_epoch: those of `position` that did.
        on_policy: the weights at the start of the epoch are those that sample its rollouts; false with an old policy
            that differs from them.
    """

    step: int = 0
    phase: Phase = "warmup"
    epoch: int = 0
    position: int = 0
    updates: int = 0
    updates_in_epoch: int = 0
    on_policy: bool = True


def first_phase(config: RunConfig) -> Phase:
    """The phase of a new run."""
    supervised = config.algorithm.supervised_steps(config)
    return "rl" if not supervised else "warmup" if isinstance(config.algorithm, RlConfig) else "sft"
