"""Section `rollout` of a run file. Rules about its options stand with the algorithms and rewards that read them."""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import field_validator

from retouch.config.base import Count, NonNegative, Positive, Section, SolverSteps, Unit
from retouch.config.errors import CUSTOM, nearest
from retouch.config.presets import Preset
from retouch.config.reads import ReadBy, ReadIf, ReadIn, Reading
from retouch.core.rules import STEP_RULES

if TYPE_CHECKING:
    from retouch.config.run import RunConfig

SLIDING = ReadIf(
    "with `position: sliding`",
    lambda own: own.position == "sliding",
    "which a sliding window reads, but position is {own.position!r}; set position=sliding, or leave {name} out",
)


class Window(Section):
    """The consecutive stochastic steps that are trained; the others follow the ODE (Flow-GRPO-Fast, MixGRPO)."""

    size: Count = 2
    """Steps in the window."""
    range: tuple[Unit, Unit] = (0.0, 0.5)
    """Share of the run in which the window may lie: [0, 0.5] keeps it in the first half."""
    position: Literal["random", "fixed", "sliding"] = "random"
    """"random" samples a new position for each rollout batch from the run's seed; "fixed" keeps the start of the range;
    "sliding" moves through the range during training (MixGRPO), and starts over at its end. Every window has `size`
    steps; in MixGRPO's code the last ones are cut at the end of the range."""
    stride: Annotated[Count, SLIDING] = 1
    """Steps that a sliding window moves at a time."""
    batches_per_position: Annotated[Count, SLIDING] = 25
    """Rollout batches that a sliding window stays at a position."""


Solver = Literal["first_order", "dpm2"]

SAMPLED = ReadBy("diffusion"), ReadBy("epochs", warns=True)
"""Declaration of a size of the epochs of rollouts, which a run on given images has none of. It is a warning: such a run
may share the section with others."""


def strength(name: str, rules: str) -> ReadIn:
    """Declaration of an option that scales the noise of some step rules."""

    def of_another(own: Any, run: RunConfig) -> str:
        rule = run.algorithm.step_rule(run)
        names = STEP_RULES.available().items()
        has = next(other for other, of in names if of == rule)
        scaled = " and ".join(other for other, of in names if of.strength == name)
        return f"which scales the noise of {scaled}, but rollout.step_rule is {has}; leave {name} out"

    return ReadIn(rules, lambda own, run: getattr(run.algorithm.step_rule(run), "strength", name) == name, of_another)


class RolloutConfig(Section):
    """How images are sampled for the rewards: by a stochastic rule for GRPO and PPO, by the ODE for DPO and NFT."""

    FREE_IN_EPOCH: ClassVar[Set[str]] = {"batch_size_per_device", "preset", "shared_first_step"}
    READ_BY: ClassVar[Reading | None] = "diffusion"
    READ_BY_ALL: ClassVar[Set[str]] = {"num_steps", "guidance_scale", "batch_size_per_device"}

    preset: Annotated[Preset | None, ReadBy("presets")] = None
    """Defaults of grpo, ppo and nft for keys that the run file leaves out, here and under algorithm. "reference" has
    the published values; "fast" takes a fraction of the forwards, by lossy settings (docs/speed.md). Written keys win;
    `retouch check` prints the result. Null fills in nothing."""
    group_size: Annotated[Count, *SAMPLED] = 8
    """K: samples of one example; a group baseline compares them."""
    global_groups_per_batch: Annotated[Count, *SAMPLED] = 8
    """Examples of one rollout batch over all devices; images = this times group_size."""
    batches_per_epoch: Annotated[Count, *SAMPLED] = 1
    """Rollout batches of an epoch; the policy is then trained on them."""
    batch_size_per_device: Count = 8
    """Images sampled in one forward; changes memory and speed, not results."""
    num_steps: SolverSteps = 10
    """T: solver steps."""
    guidance_scale: NonNegative | None = None
    """Guidance scale; null takes the model's default (30 for FLUX.1-Fill; 7.5 for SD1.5, where above 1 it doubles the
    forwards)."""
    step_rule: Annotated[str | None, ReadBy("step_rule")] = None
    """Stochastic step of GRPO and PPO: flow_sde, dance_sde or cps for a flow model, ddim for an epsilon model, or one
    of a plug-in. Null is flow_sde or ddim. retouch.core.steps names the papers."""
    noise_level: Annotated[
        Positive | None, ReadBy("step_rule"), strength("noise_level", "by step rules flow_sde and cps")
    ] = None
    """Noise of flow_sde and cps; null is 0.9 and 0.8. Published: SD3 0.7, FLUX 0.9, Qwen-Image 1.2, cps 0.8."""
    eta: Annotated[Positive | None, ReadBy("step_rule"), strength("eta", "by step rules dance_sde and ddim")] = None
    """Noise of dance_sde and ddim; null is the published value, 0.3 and 1.0."""
    solver: Annotated[
        Solver,
        ReadBy("solver"),
        ReadIn(
            "by flow models",
            lambda own, run: run.model.spec.prediction == "flow",
            "which is of flow models, but {run.model.family} predicts the noise; leave solver out",
        ),
        ReadIn(
            "in ODE sampling and beside a window",
            lambda own, run: own.window is not None or run.algorithm.step_rule(run) is None,
            "but without a window no two steps on the ODE follow each other; set rollout.window, or leave solver out",
        ),
    ] = "first_order"
    """Solver of the deterministic steps: those outside of a window, or all steps of ODE sampling. "first_order" is
    Euler or DDIM; "dpm2" (flow models only) is DPM-Solver++(2M), mostly nearer to the ODE's solution in as many steps.
    Evaluation, `retouch sample` and `eval` keep the first order."""
    window: Annotated[Window | None, ReadBy("step_rule")] = None
    """Window of stochastic steps; null makes every step stochastic. See also algorithm.timestep_fraction."""
    shared_noise: Annotated[bool, ReadBy("step_rule")] = False
    """All images of a group start from one noise (their SDE noise still differs). The ODE steps before a window are
    then the same for all, and computed once a group."""
    shared_first_step: Annotated[bool, ReadBy("step_rule")] = True
    """With shared_noise, the first stochastic step of a group, which begins in one state, is computed once as well: in
    sampling, for the reference of a KL, and in training for the images of a group in an optimizer step, if that at
    least halves its rows. The gradients are equal up to rounding. False takes a row for each image, as earlier versions
    did."""

    @property
    def shares_first_step(self) -> bool:
        """Whether images of a group begin in one state, and its step is computed once."""
        return self.shared_noise and self.shared_first_step

    @field_validator("step_rule")
    @classmethod
    def _is_registered(cls, value: str | None) -> str | None:
        if value is not None and value not in STEP_RULES:
            hint = nearest(value, STEP_RULES)
            raise ValueError(f"given {value!r}; {hint}{CUSTOM if hint.startswith('known') else ''}")
        return value
