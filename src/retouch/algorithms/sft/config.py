"""Options of supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from retouch.algorithms.base import Objective
from retouch.config.reads import ReadIn, Reading

if TYPE_CHECKING:
    from retouch.config.run import RunConfig


class SftConfig(Objective):
    """Supervised fine-tuning on examples with a target."""

    READS: ClassVar[Set[Reading]] = {"diffusion"}
    WARNS_UNREAD: ClassVar[bool] = True
    recipe: ClassVar[str] = "retouch.algorithms.sft.recipe:train"

    name: Literal["sft"] = "sft"
    shifted_times: Annotated[
        bool,
        ReadIn(
            "by flow models",
            lambda own, run: run.model.spec.prediction == "flow",
            "but {run.model.family} samples without a shift; leave shifted_times out",
        ),
    ] = True
    """Sample training times through the same shift as sampling."""

    @property
    def trains_on_rewards(self) -> bool:
        return False

    def unread(self, run: RunConfig, key: str, what: Reading) -> str:
        if what == "warm_up":
            return f"it is of a warm-up before RL; {self.name} trains with optimizer.lr; set that"
        return f"{self.name} samples no images to train on; leave it out"

    def supervised_steps(self, run: RunConfig) -> int:
        return run.training.max_steps
