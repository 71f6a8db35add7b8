"""Options of GRPO and PPO."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from retouch.algorithms.base import AdvantageConfig, RlConfig
from retouch.config.base import NonNegative, Positive
from retouch.config.derived import stochastic_steps, window_starts
from retouch.config.reads import ReadIf, Reading
from retouch.core.rules import STEP_RULES, StepRule, rules_of
from retouch.families import FAMILIES

if TYPE_CHECKING:
    from retouch.config.presets import Preset, PresetKeys
    from retouch.config.run import RunConfig

FAST_WINDOW: dict[str, Any] = {"size": 2, "range": [0.0, 0.67]}
"""Two trained steps in the first two thirds: late, low-noise steps change little and have spiky ratios."""


NEVER_CLIPS = 0.01
"""Clip range that no ratio of mean log-probabilities reaches; the usual 0.1 to 0.3 are for sums over few actions."""


class GrpoConfig(AdvantageConfig):
    """Group relative policy optimization over denoising steps (Flow-GRPO, arXiv 2505.05470)."""

    FREE_IN_EPOCH: ClassVar[Set[str]] = {
        "advantage_clip", "clip_range", "kl_weight", "kl_mode", "old_log_probs", "step_weight",
    }  # fmt: skip
    READS: ClassVar[Set[Reading]] = {*RlConfig.READS, "step_rule", "presets", "parts"}
    recipe: ClassVar[str] = "retouch.algorithms.grpo.recipe:train"
    VALUE_ALIASES: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "kl_mode": {"published": "flow_grpo"},
        "log_prob_mode": {"published": "cps"},
    }

    name: Literal["grpo"] = "grpo"
    clip_range: Annotated[
        Positive,
        ReadIf(
            "with `kl_mask_threshold: null`",
            lambda own: own.kl_mask_threshold is None,
            "but algorithm.kl_mask_threshold replaces the clip; leave one of them out",
        ),
    ] = 1e-4
    """c of the ratio clip. Log-probabilities are means over dims, for which the usual 0.2 would never clip."""
    kl_weight: NonNegative = 0.0
    """Weight of the KL to the reference policy (`kl_reference` of every algorithm); 0 keeps no reference."""
    kl_mode: Annotated[
        Literal["exact", "flow_grpo"],
        ReadIf(
            "with `kl_weight` above 0",
            lambda own: own.kl_weight,
            "but algorithm.kl_weight is 0: there is no KL; set kl_weight (Flow-GRPO: 0.04), or leave kl_mode out",
        ),
    ] = "exact"
    """"flow_grpo" is Flow-GRPO's KL, smaller by the step size; its weights (.04, .01) are for it."""
    log_prob_mode: Literal["exact", "cps"] = "exact"
    """"cps" is the log-probability of the CPS code, -mean (x' - mean)² without the std; its clip ranges are for it."""
    old_log_probs: Literal["recorded", "recomputed"] = "recorded"
    """Old log-probabilities of the ratios after the first update on a batch of rollouts (before it ratios are 1): as
    recorded while sampling, or "recomputed" with the batch size of training, one more forward for each trained step.
    Under bf16 the batch size of a forward changes the rounding, with guidance by hundreds of times clip_range."""
    guard: bool = False
    """GRPO-Guard (arXiv 2510.22319): ratios centred and scaled by the step's std, gradients balanced over the steps.
    Published clip range: 2e-6."""
    kl_mask_threshold: Positive | None = None
    """Flow-DPPO's mask (arXiv 2606.11025) in place of the ratio clip: a trained step whose KL to the step that sampled,
    mean (mean - old mean)² / (2 std²), exceeds this has no gradient if its ratio has already moved in the direction of
    its advantage. Published: 1e-5."""
    step_weight: Literal["none", "std"] = "none"
    """"std" weighs a trained step by its std over the mean of the steps but the last (TempFlow-GRPO, arXiv
    2508.04324): noisy steps, whose samples differ most, count most."""
    timestep_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Share of the stochastic steps that are trained, first ones first (the last, low-noise ones have spiky ratios)."""

    @property
    def snapshots(self) -> frozenset[str]:
        return frozenset({"reference"} if self.kl_weight else ())

    @property
    def recorded_log_probs(self) -> Literal["exact", "cps"]:
        return self.log_prob_mode

    @property
    def records_means(self) -> bool:
        return self.guard or self.kl_mask_threshold is not None

    @property
    def never_clips(self) -> bool:
        """Whether no ratio leaves the clip range, in any step of an epoch."""
        return self.log_prob_mode == "exact" and self.kl_mask_threshold is None and self.clip_range >= NEVER_CLIPS

    def step_rule(self, run: RunConfig) -> StepRule:
        return STEP_RULES[_rule_name(run)]

    def trained_steps(self, run: RunConfig) -> int:
        share = stochastic_steps(run) * self.timestep_fraction
        return max(1, math.ceil(share - 1e-9))  # 25 x 0.28 is 7.000000000000001

    def parts_of_row(self, run: RunConfig) -> tuple[int, int]:
        return self.trained_steps(run), run.model.forwards_of_guidance(run.guidance_scale)

    def forwards_per_image(self, run: RunConfig, optimizer_steps: int, guided: int, backward: int) -> float:
        from retouch.config.derived import sampling_forwards, shared_training_steps

        steps = self.trained_steps(run)
        trained = steps - shared_training_steps(run, optimizer_steps // self.inner_epochs)
        reference = steps - shared_training_steps(run, 1) if self.kl_weight else 0
        again = trained if self.old_log_probs == "recomputed" and optimizer_steps > 1 else 0
        return guided * (sampling_forwards(run) + again + reference + self.inner_epochs * trained * backward)

    def warnings(self, run: RunConfig) -> Iterator[str]:
        yield from super().warnings(run)
        if self.never_clips:
            yield (
                f"algorithm.clip_range: given {self.clip_range:g}, which never clips: log-probabilities are means over "
                "latent dimensions, whose ratios stay close to 1; set algorithm.clip_range=1e-4, or 1e-5 with "
                "rollout.window"
            )

    def check(self, run: RunConfig, key: str = "") -> None:
        super().check(run, key)
        self._check_noise(run)
        self._check_window(run)
        self._check_distilled(run)
        self._check_modes(run)

    def _check_noise(self, run: RunConfig) -> None:
        """Check that the step rule fits the model's prediction, and its strength the rule."""
        rollout, name, prediction = run.rollout, _rule_name(run), run.model.spec.prediction
        rule = STEP_RULES[name]
        if rule.prediction != prediction:
            raise ValueError(
                f"rollout.step_rule: given {name!r}, but {run.model.family} predicts "
                f"{'a velocity' if prediction == 'flow' else 'the noise'}; set one of {', '.join(rules_of(prediction))}"
            )
        value = getattr(rollout, rule.strength)
        if rule.is_share and value is not None and value > 1:
            raise ValueError(
                f"rollout.{rule.strength}: given {value}, but for step_rule {name} it is a share in (0, 1]; set "
                f"{rule.default:g}, its default, or another step_rule"
            )

    def _check_window(self, run: RunConfig) -> None:
        """Check that there are stochastic steps, and as many as the window needs."""
        rollout, name, window = run.rollout, _rule_name(run), run.rollout.window
        last = rollout.num_steps - STEP_RULES[name].ends_without_noise
        if last < 1:
            raise ValueError(
                f"rollout.num_steps: given 1, but step_rule {name} adds no noise in the last step; set num_steps to 2 "
                "or more, or another step_rule"
            )
        if window is None:
            return
        low, high = (round(share * rollout.num_steps) for share in window.range)
        held = max(0, min(high, last) - low)
        if held < window.size:
            raise ValueError(
                f"rollout.window.size: given {window.size}, but window.range {list(window.range)} of num_steps "
                f"{rollout.num_steps} holds {held} stochastic steps of {name}; widen the range or lower the size"
            )
        if self.timestep_fraction < 1:
            raise ValueError(
                f"algorithm.timestep_fraction: given {self.timestep_fraction} beside rollout.window; the window "
                "already selects the trained steps; leave timestep_fraction at 1.0"
            )

    def _check_distilled(self, run: RunConfig) -> None:
        """Check that the deterministic steps of a few-step model undo what its stochastic ones do to an image."""
        rollout, count = run.rollout, stochastic_steps(run)
        if run.model.distilled_steps is None:
            return
        last = window_starts(run)[-1] + count if rollout.window else count
        if count > rollout.num_steps // 2 or last >= rollout.num_steps:
            raise ValueError(
                f"rollout.window: up to {count} of {rollout.num_steps} steps are stochastic, the last of them step "
                f"{last}, but {run.model.path} was distilled to {run.model.distilled_steps} steps, and only "
                "deterministic steps remove their noise; set rollout.window={size: 1, range: [0.25, 0.75]} with "
                "rollout.num_steps=4 or more, or algorithm.name=nft"
            )

    def _check_modes(self, run: RunConfig) -> None:
        """Check that options that reproduce a published code are combined as in that code."""
        # Each of these would compute something: a correction twice, or of a clip or with a std that there is not.
        name = _rule_name(run)
        if self.kl_mode == "flow_grpo" and name != "flow_sde":
            flow = run.model.spec.prediction == "flow"
            raise ValueError(
                f"algorithm.kl_mode: given 'flow_grpo', which is for the std of flow_sde, but rollout.step_rule is "
                f"{name}; set kl_mode=exact{', or step_rule=flow_sde' if flow else ''}"
            )
        if self.log_prob_mode == "cps" and name != "cps":
            raise ValueError(
                f"algorithm.log_prob_mode: given 'cps', but rollout.step_rule is {name}; set log_prob_mode=exact, or "
                "step_rule=cps"
            )
        if self.log_prob_mode == "cps" and self.guard:
            raise ValueError(
                "algorithm.guard: given true beside log_prob_mode 'cps', which has no std to correct for; set "
                "log_prob_mode=exact"
            )
        if self.kl_mask_threshold is not None and self.guard:
            raise ValueError(
                "algorithm.guard: given true, but it centres ratios for the clip, which algorithm.kl_mask_threshold "
                "replaces; leave one of them out"
            )
        if self.step_weight != "none" and self.guard:
            raise ValueError(
                f"algorithm.step_weight: given {self.step_weight!r}, but algorithm.guard balances the steps itself; "
                "leave one of them out"
            )

    @classmethod
    def preset_keys(
        cls, preset: Preset, family: str, rollout: Mapping[str, Any], written: Mapping[str, Any]
    ) -> PresetKeys:
        if preset == "fast":
            return _fast(family, rollout, written)
        return _reference(family, rollout, written)


class PpoConfig(GrpoConfig):
    """PPO: GRPO's loss on advantages of the whole batch; works with group_size 1."""

    name: Literal["ppo"] = "ppo"  # pyright: ignore[reportIncompatibleVariableOverride]
    baseline: Literal["group", "batch"] = "batch"
    """Mean that is subtracted from a reward; "batch" is PPO."""
    scale: Literal["group", "batch", "none"] = "batch"
    """Standard deviation that divides the advantage: of the group, of the batch, or none."""


def _rule_name(run: RunConfig) -> str:
    return run.rollout.step_rule or rules_of(run.model.spec.prediction)[0]


def _reference(family: str, rollout: Mapping[str, Any], written: Mapping[str, Any]) -> PresetKeys:
    """Flow-GRPO (arXiv 2505.05470): its SD3 runs for families with classifier-free guidance, its FLUX runs for those
    that embed it. All steps but the last, low-noise one are trained, and groups with zero reward variance as well."""
    guided = FAMILIES[family].spec.doubles_for_guidance
    name = rollout.get("step_rule") or rules_of(FAMILIES[family].spec.prediction)[0]
    steps = 10 if guided else 6
    sampled: dict[str, Any] = {"num_steps": steps, "window": None, "shared_noise": False}
    trained: dict[str, Any] = {"kl_weight": 0.04 if guided else 0.0}
    if not written.get("resample_rounds"):  # which replaces groups that are left out
        trained["skip_zero_std_groups"] = False
    if trained["kl_weight"] and name == "flow_sde" and written.get("kl_weight", 1):
        trained["kl_mode"] = "flow_grpo"  # the weight is for it
    steps = rollout.get("num_steps", steps)
    ends_without_noise = name in STEP_RULES and STEP_RULES[name].ends_without_noise
    if not ends_without_noise and not rollout.get("window") and isinstance(steps, int) and steps > 1:
        trained["timestep_fraction"] = 1 - 1 / steps
    if guided:
        sampled["guidance_scale"] = None
    return {"rollout": sampled, "algorithm": trained}


def _fast(family: str, rollout: Mapping[str, Any], written: Mapping[str, Any]) -> PresetKeys:
    """Flow-GRPO-Fast's window and MixGRPO's (arXiv 2507.21802), fewer solver steps, one prefix for a group, neither
    guidance nor KL."""
    sampled: dict[str, Any] = {"num_steps": 6}
    if FAMILIES[family].spec.doubles_for_guidance:
        sampled["guidance_scale"] = 1.0
    fraction_is_written = "window" not in rollout and written.get("timestep_fraction", 1.0) != 1.0
    if rollout.get("window", FAST_WINDOW) is not None and not fraction_is_written:
        sampled |= {"window": dict(FAST_WINDOW), "shared_noise": True}
    return {"rollout": sampled, "algorithm": {"kl_weight": 0.0}}
