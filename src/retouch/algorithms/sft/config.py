"""Options of supervised fine-tuning."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from retouch.algorithms.base import Objective

if TYPE_CHECKING:
    from retouch.config.run import RunConfig


class SftConfig(Objective):
    """Supervised fine-tuning on examples with a target."""

    recipe: ClassVar[str] = "retouch.algorithms.sft.recipe:train"
    shift_key: ClassVar[str] = "shifted_times"

    name: Literal["sft"] = "sft"
    shifted_times: bool = True
    """Sample training times through the same shift as sampling."""

    @property
    def trains_on_rewards(self) -> bool:
        return False

    def supervised_steps(self, run: RunConfig) -> int:
        return run.training.max_steps
