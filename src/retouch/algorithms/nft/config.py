"""Options of DiffusionNFT."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from retouch.algorithms.base import AdvantageConfig, RlConfig
from retouch.config.base import Count, NonNegative
from retouch.config.reads import Reading
from retouch.families import FAMILIES

if TYPE_CHECKING:
    from retouch.config.presets import Preset, PresetKeys
    from retouch.config.run import RunConfig


class NftConfig(AdvantageConfig):
    """DiffusionNFT (arXiv 2509.16117): positive and negative flow matching on the old policy's images."""

    FREE_IN_EPOCH: ClassVar[Set[str]] = {"mix", "mode", "old_policy", "kl_weight", "timesteps_per_image"}
    READS: ClassVar[Set[Reading]] = {*RlConfig.READS, "presets", "parts", "gradients"}
    recipe: ClassVar[str] = "retouch.algorithms.nft.recipe:train"

    name: Literal["nft"] = "nft"
    mix: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """Share of the policy in the implicit positive policy; the paper's beta. Published: .1 (OCR), 1 (GenEval)."""
    mode: Literal["normal", "positive_only", "negative_only", "one_only", "binary"] = "normal"
    """Which advantages train: all, those above 0, those below 0, those above 0 as 1 (else 0), or their signs."""
    old_policy: Literal["copy", "frozen", "ramp_half", "ramp_full"] = "ramp_half"
    """Update of the sampling policy from the trained one after an epoch: "copy" copies it, "frozen" keeps the old one,
    "ramp_half" and "ramp_full" average them with a decay that grows with the optimizer steps, to .5 or to .999. 0, 1
    and 2 stand for frozen, ramp_half and ramp_full. With "copy" the first optimizer step of an epoch takes no forward
    of the old policy, which still equals the trained weights."""
    kl_weight: NonNegative = 0.01
    """Weight of the mean squared distance to the prediction of the reference policy (`kl_reference`); 0 keeps no
    reference."""
    timesteps_per_image: Count = 2
    """Noised copies of an image in one step, their times spread over the schedule."""

    @field_validator("old_policy", mode="before")
    @classmethod
    def _aliases(cls, value: object) -> object:
        """Decay types of the Calligrapher guide; its 0 is frozen, where 0 of the paper's code is copy."""
        return {0: "frozen", 1: "ramp_half", 2: "ramp_full"}.get(value, value) if type(value) is int else value

    @property
    def snapshots(self) -> frozenset[str]:
        return frozenset({"old", "reference"} if self.kl_weight else {"old"})

    def parts_of_row(self, run: RunConfig) -> tuple[int, int]:
        return self.timesteps_per_image, 1

    def decoder_backwards(self, run: RunConfig) -> int:
        return int(any(entry.gradient_weight for entry in run.rewards.values()))

    def forwards_per_image(self, run: RunConfig, optimizer_steps: int, guided: int, backward: int) -> float:
        old = 1.0  # none in the first of an epoch's steps if the old policy is then the trained one
        if self.old_policy == "copy":
            old -= 1 / optimizer_steps
        reference = 1 if self.kl_weight else 0
        noised = self.timesteps_per_image * self.inner_epochs * (old + reference + backward)
        return guided * run.rollout.num_steps + noised

    @classmethod
    def preset_keys(
        cls, preset: Preset, family: str, rollout: Mapping[str, Any], written: Mapping[str, Any]
    ) -> PresetKeys:
        """The paper samples without guidance, and divides by the standard deviation of the batch; the reference trains
        on 9 noised copies of an image and on groups with zero reward variance, fast on 2 copies."""
        sampled: dict[str, Any] = {"num_steps": 10 if preset == "reference" else 6}
        if FAMILIES[family].spec.doubles_for_guidance:
            sampled["guidance_scale"] = 1.0
        if preset == "fast":
            return {"rollout": sampled, "algorithm": {"timesteps_per_image": 2, "kl_weight": 0.0}}
        trained: dict[str, Any] = {"timesteps_per_image": 9, "kl_weight": 1e-4}
        if not written.get("resample_rounds"):  # which replaces groups that are left out
            trained["skip_zero_std_groups"] = False
        return {"rollout": sampled, "algorithm": trained | {"scale": "batch"}}
