"""`algorithm`: one class each."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, ValidationInfo, field_validator

from retouch.algorithms import ALGORITHMS
from retouch.config.base import (
    NonNegative,
    Positive,
    Section,
    Unit,
)
from retouch.registry import Chosen


class AlgorithmSection(Section):
    """What every algorithm has."""

    name: str
    """Registered name of the algorithm."""


class Objective(AlgorithmSection):
    """Where in the picture a loss is taken, and supervised rows without their caption."""

    region: Literal["all", "mask"] = "all"
    """"mask" takes errors, log-probabilities and KL over the repainted latents only."""
    region_dilation: Annotated[int, Field(ge=0)] = 0
    """Latent cells by which the region of "mask" reaches beyond the mask."""
    seam_weight: Positive = 1.0
    """Weight of the cells that region_dilation adds, beside 1 within the mask."""
    caption_dropout: Unit = 0.0
    """Share of supervised rows (SFT, the warm-up) trained on the empty prompt, and without a style adapter's reference,
    which classifier-free guidance steers away from (arXiv 2207.12598: 0.1); for families that have that guidance."""


class SftConfig(Objective):
    """Supervised fine-tuning on examples with a target."""

    name: Literal["sft"] = "sft"
    shifted_times: bool = True
    """Draw training times through the same shift as sampling."""


class RlConfig(Objective):
    """What every algorithm that trains on rewards has."""

    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps of SFT before the first rollout; they count towards training.max_steps."""
    warmup_shifted_times: bool = True
    """Draw the warm-up's times through the same shift as sampling."""
    inner_epochs: PositiveInt = 1
    """Passes over the rollouts of an epoch."""
    combine: Literal["normalize_then_sum", "sum_then_normalize"] = "normalize_then_sum"
    """Several rewards: advantages of each, weighted, so that the widest does not win; or of their weighted sum."""
    resample_rounds: Annotated[int, Field(ge=0)] = 0
    """Rounds of new groups for those whose rewards are all alike (DAPO's dynamic sampling, arXiv 2503.14476)."""


class AdvantageConfig(RlConfig):
    """From rewards to advantages."""

    advantage_clip: Positive = 5.0
    """Advantages are clipped to plus and minus this."""
    baseline: Literal["group", "batch"] = "group"
    """What an image is compared with: its group (per-prompt statistics) or the whole batch (PPO)."""
    scale: Literal["group", "batch", "none"] = "group"
    """Whose standard deviation divides the advantage; "batch" is Flow-GRPO's global std."""
    skip_zero_std_groups: Annotated[bool | None, Field(validate_default=True)] = None
    """Leave out groups whose rewards are all alike: with a group baseline they carry no signal. Null is true with a
    group baseline and false with that of the batch, where every image counts."""

    @field_validator("skip_zero_std_groups")
    @classmethod
    def _follows_the_baseline(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        return info.data.get("baseline") == "group" if value is None else value


class GrpoConfig(AdvantageConfig):
    """Group relative policy optimisation over denoising steps (Flow-GRPO, arXiv 2505.05470)."""

    name: Literal["grpo"] = "grpo"
    clip_range: Positive = 1e-4
    """c of the ratio clip. Log-probabilities are means over dims, so that 0.2 would never clip."""
    kl_weight: NonNegative = 0.0
    """Of the KL to the policy at the start of RL; 0 keeps no reference."""
    kl_mode: Literal["exact", "published"] = "exact"
    """"published" is Flow-GRPO's KL, smaller by the step size; its weights (.04, .01) are for it."""
    log_prob_mode: Literal["exact", "published"] = "exact"
    """"published" is the log-probability of the CPS code, -mean (x' - mean)² without the std; its clip ranges are for
    it."""
    old_log_probs: Literal["recorded", "recomputed"] = "recorded"
    """Of the sampler, for the ratios after the first update on a batch of rollouts (before it they are 1): as they were
    recorded while sampling, or "recomputed" in forwards of as many rows as training takes, one more for each trained
    step. Under bf16 how many rows a forward has changes the rounding, with guidance by hundreds of times clip_range."""
    guard: bool = False
    """GRPO-Guard (arXiv 2510.22319): ratios centred and scaled by the step's std, gradients balanced over the steps.
    Published clip range: 2e-6."""
    timestep_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Share of the stochastic steps that are trained, first ones first (the last, low-noise ones are spiky)."""


class PpoConfig(GrpoConfig):
    """PPO: GRPO's loss on advantages of the whole batch; works with group_size 1."""

    name: Literal["ppo"] = "ppo"
    baseline: Literal["group", "batch"] = "batch"
    """What an image is compared with; "batch" is PPO."""
    scale: Literal["group", "batch", "none"] = "batch"
    """Whose standard deviation divides the advantage."""


class DpoConfig(RlConfig):
    """Direct preference optimisation (Diffusion-DPO, arXiv 2311.12908), online or on given pairs."""

    name: Literal["dpo"] = "dpo"
    pairs: Literal["online", "offline"] = "online"
    """"online": the best and the worst rollout of each group; "offline": win_path and lose_path of the manifest."""
    beta: Positive = 2000.0
    """Of the implicit reward, for errors that are means over dims. Published: 2000-5000 (Diffusion-DPO), 100
    (flow_grpo)."""
    rollout_policy: Literal["current", "reference"] = "current"
    """Whose images are compared."""
    reference_refresh_every: Annotated[int, Field(ge=0)] | None = None
    """Optimizer steps after which the reference becomes the policy again; 0 keeps that of the start of RL. Null is 50
    online and 0 offline, as published."""
    timesteps_per_pair: PositiveInt = 1
    """Noised copies of a pair in one step, their times spread over the schedule."""

    @property
    def refresh_every(self) -> int:
        """`reference_refresh_every`, its default filled in."""
        if self.reference_refresh_every is None:
            return 50 if self.pairs == "online" else 0
        return self.reference_refresh_every


class NftConfig(AdvantageConfig):
    """DiffusionNFT (arXiv 2509.16117): positive and negative flow matching on the old policy's images."""

    name: Literal["nft"] = "nft"
    mix: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """Share of the policy in the implicit positive policy; the paper's beta. Published: .1 (OCR), 1 (GenEval)."""
    mode: Literal["normal", "positive_only", "negative_only", "one_only", "binary"] = "normal"
    """Which advantages train: all, those above 0, those below 0, those above 0 as 1 (else 0), or their signs."""
    old_policy: Literal["copy", "frozen", "ramp_half", "ramp_full"] = "ramp_half"
    """How the policy that samples follows the trained one after an epoch: at once, never, or with a decay that grows
    with the optimizer steps, to .5 or to .999. 0, 1 and 2 stand for frozen, ramp_half and ramp_full."""
    kl_weight: NonNegative = 0.01
    """Of the mean squared distance to what the policy at the start of RL predicts; 0 keeps no reference."""
    timesteps_per_image: PositiveInt = 2
    """Noised copies of an image in one step, their times spread over the schedule."""

    @field_validator("old_policy", mode="before")
    @classmethod
    def _aliases(cls, value: object) -> object:
        """Decay types of the Calligrapher guide; its 0 is frozen, where 0 of the paper's code is copy."""
        return {0: "frozen", 1: "ramp_half", 2: "ramp_full"}.get(value, value) if type(value) is int else value


Algorithm = Annotated[AlgorithmSection, Chosen(ALGORITHMS, "name")]
