"""Options of DPO."""

from __future__ import annotations

import math
from collections.abc import Set
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from retouch.algorithms.base import SAMPLES, RlConfig
from retouch.config.base import Count, Positive
from retouch.config.reads import ReadIf, Reading

if TYPE_CHECKING:
    from retouch.config.run import RunConfig


class DpoConfig(RlConfig):
    """Direct preference optimization (Diffusion-DPO, arXiv 2311.12908), online or on given pairs."""

    FREE_IN_EPOCH: ClassVar[Set[str]] = {"beta", "rollout_policy", "reference_refresh_every", "timesteps_per_pair"}
    READS: ClassVar[Set[Reading]] = {*RlConfig.READS, "parts"}
    recipe: ClassVar[str] = "retouch.algorithms.dpo.recipe:train"

    name: Literal["dpo"] = "dpo"
    pairs: Literal["online", "offline"] = "online"
    """"online": the best and the worst rollout of each group; "offline": win_path and lose_path of the manifest."""
    beta: Positive = 2000.0
    """Scale of the implicit reward, for errors that are means over dims. Published: 2000-5000 (Diffusion-DPO), 100
    (flow_grpo)."""
    rollout_policy: Annotated[Literal["current", "reference"], SAMPLES] = "current"
    """Weights that sample the images."""
    reference_refresh_every: Annotated[
        Annotated[int, Field(ge=0)] | None,
        ReadIf(
            "with `kl_reference: initial`",
            lambda own: own.kl_reference == "initial" or not own.reference_refresh_every,
            "but algorithm.kl_reference=base keeps the base as the reference; leave one of them out",
        ),
    ] = None
    """Optimizer steps after which the reference becomes the policy again; 0 keeps that of the start of RL. Null is 50
    online and 0 offline, as published, and 0 with kl_reference=base."""
    timesteps_per_pair: Count = 1
    """Noised copies of a pair in one step, their times spread over the schedule."""

    @property
    def refresh_every(self) -> int:
        """`reference_refresh_every`, its default filled in."""
        if self.reference_refresh_every is None:
            return 50 if self.pairs == "online" and self.kl_reference == "initial" else 0
        return self.reference_refresh_every

    @property
    def given_images(self) -> frozenset[str]:
        return frozenset({"win", "lose"} if self.pairs == "offline" else ())

    @property
    def trains_on_rewards(self) -> bool:
        return self.pairs == "online"

    @property
    def snapshots(self) -> frozenset[str]:
        return frozenset({"reference"})

    def parts_of_row(self, run: RunConfig) -> tuple[int, int]:
        return self.timesteps_per_pair, 2

    def forwards_per_image(self, run: RunConfig, optimizer_steps: int, guided: int, backward: int) -> float:
        per_member = self.timesteps_per_pair * (1 + backward)
        if self.given_images:
            return float(per_member)
        return guided * run.rollout.num_steps + per_member * self.inner_epochs * 2 / run.rollout.group_size

    def rows_per_device(self, run: RunConfig, world_size: int) -> int:
        return math.ceil(run.rollout.global_groups_per_batch * run.rollout.batches_per_epoch / world_size)

    def check(self, run: RunConfig, key: str = "") -> None:
        if self.trains_on_rewards and run.rollout.group_size == 1:
            raise ValueError(
                "rollout.group_size: given 1, but dpo pairs the best with the worst image of a group; set group_size "
                "to 2 or more (4-16 is usual)"
            )
        super().check(run, key)
        if self.given_images:
            self.require_given_images(run, "takes win_path and lose_path of a manifest", ", or algorithm.pairs=online")
