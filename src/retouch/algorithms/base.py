"""Common options of the algorithms. Each algorithm's own class defines its rules, its cost and its snapshots.

Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, ValidationInfo, field_validator

from retouch.algorithms import ALGORITHMS
from retouch.config.base import Count, Names, Positive, Section, Unit
from retouch.config.reads import ReadIf, ReadIn, Reading
from retouch.registry import PLUGINS, load_named

if TYPE_CHECKING:
    from torch import Tensor

    from retouch.config.derived import Derived, Numbers
    from retouch.config.presets import Preset, PresetKeys
    from retouch.config.run import RunConfig
    from retouch.core.advantages import RewardRows
    from retouch.core.rules import StepRule
    from retouch.data.base import ItemFiles

READINGS: frozenset[Reading] = frozenset(get_args(Reading)) - {"presets", "gradients"}
"""The default of `READS`: presets are written for some algorithms, and gradients of rewards need code."""


class AlgorithmSection(Section):
    """Base of every algorithm's section."""

    trainer: ClassVar[str] = "retouch.training.build:train"
    """"module:function" that trains a run file and returns the run directory. This one builds the parts of the run and
    calls `recipe`; another brings its own loop."""
    recipe: ClassVar[str] = ""
    """"module:function" of the built run that is the algorithm."""
    trains_text_encoder: ClassVar[bool] = False
    """Whether the text encoder is trained and the diffusion model is frozen."""

    READS: ClassVar[Set[Reading]] = READINGS
    """Purposes for which it reads options of other sections. Options for another purpose are rejected where they are
    given, and an override of `algorithm.name` drops those of `rollout` and `optimizer`."""
    WARNS_UNREAD: ClassVar[bool] = False
    """Whether those are a warning instead, because run files of other algorithms are used for this one, too."""

    name: Any
    """Registered name of the algorithm."""

    def reads(self, run: RunConfig, what: Reading) -> bool:
        """Whether it reads options of other sections that are for `what` in this run."""
        return what in self.READS

    def unread(self, run: RunConfig, key: str, what: Reading) -> str:
        """Why it does not read the option `key` of another section, and the remedy: what follows "KEY: given VALUE,
        but"."""
        readers = [name for name, kind in ALGORITHMS.available().items() if what in getattr(kind, "READS", ())]
        return f"{self.name} does not read it; leave it out, or set algorithm.name={' or '.join(readers)}"

    @property
    def trains_on_rewards(self) -> bool:
        """Whether it samples images and trains on their rewards."""
        return True

    @property
    def given_images(self) -> frozenset[str]:
        """Images of a manifest that it trains on instead of rollouts: "win" and "lose", or "target"."""
        return frozenset()

    @property
    def snapshots(self) -> frozenset[str]:
        """Snapshots of the trained weights that it keeps: "old", "reference"."""
        return frozenset()

    def supervised_steps(self, run: RunConfig) -> int:
        """Optimizer steps that need targets."""
        return 0

    def step_rule(self, run: RunConfig) -> StepRule | None:
        """The stochastic rule of its rollouts; None where they follow the ODE."""
        return None

    def trained_steps(self, run: RunConfig) -> int:
        """Denoising steps of a rollout that enter the loss."""
        return 0

    def parts_of_row(self, run: RunConfig) -> tuple[int, int]:
        """Trained steps or noised copies of each row of a training forward, which `optimizer.steps_per_forward` splits,
        and rows of the network that each of them is."""
        return 1, 1

    def decoder_backwards(self, run: RunConfig) -> int:
        """Decodes of an image through which a gradient is taken."""
        return 0

    def recorded_steps(self, run: RunConfig) -> int:
        """Last steps of an ODE rollout whose states sampling records."""
        return 0

    @property
    def recorded_log_probs(self) -> Literal["exact", "cps"]:
        """The log-probability that sampling records."""
        return "exact"

    @property
    def records_means(self) -> bool:
        """Whether sampling records the means of the trained steps."""
        return False

    def check(self, run: RunConfig, key: str = "") -> None:
        if not self.trains_on_rewards:
            return
        if not run.rewards:
            raise ValueError(
                f"rewards: none given, but algorithm.name is {self.name!r}, which trains on rewards; set for example "
                "rewards: {ocr: {weight: 1.0}}"
            )
        weights = [entry.weight for entry in run.rewards.values() if entry.role == "train"]
        if not weights:
            raise ValueError("rewards: every role is gold, but training needs one of role train; add one")
        if not any(weights):
            raise ValueError(
                "rewards: every weight is 0, but the objective is their weighted sum; set one weight above 0"
            )
        if max(weights) <= 0:
            raise ValueError(
                "rewards: no weight is above 0, and training would lower every reward; set one weight above 0"
            )

    def check_items(self, items: Sequence[ItemFiles]) -> None:
        """Refuse examples of `data` that it cannot train on.

        Raises:
            DataError: names the example.
        """

    def trained_kind(self, run: RunConfig) -> str:
        """full, lora or ip_adapter: how much of the trained network is trained."""
        return run.model.train.kind

    def derive(self, run: RunConfig, world_size: int) -> Numbers:
        """The numbers that `retouch check` prints.

        Raises:
            ConfigError: a run that could never take an optimizer step on this many processes.
        """
        raise NotImplementedError

    @classmethod
    def completed(cls, run: Mapping[str, Any]) -> dict[str, Any]:
        """The run file before validation, with the keys of other sections that options of this one set."""
        return dict(run)

    @classmethod
    def preset_keys(
        cls, preset: Preset, family: str, rollout: Mapping[str, Any], written: Mapping[str, Any]
    ) -> PresetKeys:
        """Keys of `rollout` and `algorithm` that a preset fills in, see `retouch.config.presets`.

        Args:
            rollout, written: these two sections of the run file.
        """
        return {"rollout": {}, "algorithm": {}}


class Objective(AlgorithmSection):
    """Where in the image a loss is computed, and supervised examples without their caption."""

    KEPT: ClassVar[Set[str]] = {"region", "region_dilation", "seam_weight", "caption_dropout"}
    FREE_IN_EPOCH: ClassVar[Set[str]] = {"caption_dropout"}

    region: Annotated[
        Literal["all", "mask"],
        ReadIn(
            "where examples have masks",
            lambda own, run: any("mask" in data.has_images for data in (run.data, run.warmup_data) if data),
            "but no example has a mask, and the loss is taken everywhere; leave it out",
            warns=True,
        ),
    ] = "all"
    """"mask" computes errors, log-probabilities and KL over the repainted latents only."""
    region_dilation: Annotated[
        int,
        Field(ge=0),
        ReadIf(
            "with `region: mask`",
            lambda own: own.region == "mask",
            "but algorithm.region is {own.region!r}; set region=mask, or region_dilation=0",
        ),
    ] = 0
    """Latent cells by which the region "mask" extends beyond the mask."""
    seam_weight: Annotated[
        Positive,
        ReadIf(
            "with `region_dilation` above 0",
            lambda own: own.region_dilation,
            "but it weighs the cells that region_dilation adds, and that is 0; set region_dilation, or seam_weight=1",
        ),
    ] = 1.0
    """Weight of the cells that region_dilation adds; cells within the mask have weight 1."""
    caption_dropout: Annotated[
        Unit,
        ReadIn(
            "by families with classifier-free guidance",
            lambda own, run: run.model.doubles_for_guidance,
            "but {run.model.family} has no classifier-free guidance, which would need a prediction without a caption; "
            "leave it out",
        ),
        ReadIn(
            "in supervised steps",
            lambda own, run: own.supervised_steps(run),
            "but {own.name} drops captions in the supervised warm-up only, and algorithm.sft_steps is 0: no caption is "
            "dropped; set sft_steps, or leave caption_dropout out",
            warns=True,
        ),
    ] = 0.0
    """Share of supervised examples (SFT, the warm-up) trained on the empty prompt, and without a style adapter's
    reference, which classifier-free guidance steers away from (arXiv 2207.12598: 0.1); for families that have that
    guidance."""

    def derive(self, run: RunConfig, world_size: int) -> Derived:
        """The numbers of a run that trains the diffusion model."""
        from retouch.config.derived import derive

        return derive(run, world_size)

    def forwards_per_image(self, run: RunConfig, optimizer_steps: int, guided: int, backward: int) -> float:
        """Forward-equivalents of the network that one image costs, sampled and trained.

        Args:
            optimizer_steps: of an epoch.
            guided: forwards of one guided prediction: 2 with classifier-free guidance, else 1.
            backward: forward-equivalents of a training forward with its backward.
        """
        return float(backward)


SAMPLES = ReadIf(
    "in runs that sample images",
    lambda own: not own.given_images,
    "but {own.takes_given} samples no images; leave {name} out",
)
"""Declares options about rollouts."""


def _no_reference(own: Any, run: object) -> str:
    remedy = "set algorithm.kl_weight, or " if hasattr(own, "kl_weight") else ""
    return f"but {own.name} keeps no reference policy here; {remedy}leave kl_reference out"


class RlConfig(Objective):
    """Base of every algorithm but SFT: those that train on rewards, given pairs or labels, after a warm-up."""

    KEPT: ClassVar[Set[str]] = {"sft_steps"}
    FREE_IN_EPOCH: ClassVar[Set[str]] = {"combine", "resample_rounds", "sft_shifted_times", "warmup_shifted_times"}
    READS: ClassVar[Set[Reading]] = {"diffusion", "solver", "warm_up", "rollouts", "epochs"}
    ALIASES: ClassVar[Mapping[str, str]] = {"warmup_steps": "sft_steps"}
    RETIRED: ClassVar[Mapping[str, object]] = {"sft_shifted_times": True, "warmup_shifted_times": True}

    sft_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps of the supervised warm-up (SFT) before the first rollout; they count towards
    training.max_steps."""
    inner_epochs: Annotated[Count, SAMPLES] = 1
    """Passes over the rollouts of an epoch."""
    combine: Annotated[Literal["normalize_then_sum", "sum_then_normalize"], SAMPLES] = "normalize_then_sum"
    """Several rewards: the weighted sum of the advantages of each, in which no reward dominates by its range, or the
    advantages of their weighted sum."""
    kl_reference: Annotated[
        Literal["initial", "base"],
        ReadIf("with a KL, or another use of a reference", lambda own: "reference" in own.snapshots, _no_reference),
    ] = "initial"
    """Reference policy of the KL (DPO: of the implicit reward). "initial" is the policy at the start of RL, with
    `model.train.initial_adapter` and after the supervised warm-up; "base" is the model without its LoRA."""
    resample_rounds: Annotated[int, Field(ge=0), SAMPLES] = 0
    """Rounds of new groups for those with zero reward variance (DAPO's dynamic sampling, arXiv 2503.14476)."""

    def supervised_steps(self, run: RunConfig) -> int:
        return self.sft_steps

    def rows_per_device(self, run: RunConfig, world_size: int) -> int:
        """Samples (DPO: pairs) of an epoch that a process trains on."""
        rollout = run.rollout
        return math.ceil(rollout.global_groups_per_batch * rollout.group_size / world_size) * rollout.batches_per_epoch

    def steps_per_pass(self, run: RunConfig, world_size: int) -> int:
        """Optimizer steps of one pass over the samples of an epoch."""
        shares = 1 if run.optimizer.global_batch_size else world_size  # else each process counts its own rows
        return math.ceil(self.rows_per_device(run, shares) / run.optimizer.rows_per_device(shares))

    def check(self, run: RunConfig, key: str = "") -> None:
        if self.sft_steps > run.training.max_steps:
            raise ValueError(
                f"algorithm.sft_steps: given {self.sft_steps}, more than training.max_steps "
                f"{run.training.max_steps}, which counts them too; set a larger training.max_steps"
            )
        if self.kl_reference == "base" and run.model.train.kind != "lora":
            raise ValueError(
                f"algorithm.kl_reference: given 'base', but model.train.kind is {run.model.train.kind}, whose base is "
                "not kept; leave kl_reference out, or set model.train.kind=lora"
            )
        super().check(run, key)

    @property
    def takes_given(self) -> str:
        """The choice by which the run trains on given images."""
        return "algorithm.pairs=offline" if "win" in self.given_images else self.name

    def reads(self, run: RunConfig, what: Reading) -> bool:
        if what in ("step_rule", "parts") and self.step_rule(run) is not None:
            return True
        sampled = (
            not self.given_images if what == "solver" else self.trains_on_rewards or what not in ("rollouts", "epochs")
        )
        return sampled and super().reads(run, what)

    def unread(self, run: RunConfig, key: str, what: Reading) -> str:
        # The reasons differ by what the algorithm does instead: it trains on given images, samples by the ODE, or
        # records steps of the ODE (reward gradients).
        name, given, records = key.rpartition(".")[2], bool(self.given_images), self.recorded_steps(run) > 0
        if what == "presets":
            return f"{self.name} has no presets; leave preset out, and set rollout.num_steps and guidance_scale"
        if what == "parts":
            rows = "takes every trained step as a row" if records else "trains no solver steps"
            return f"{self.name} {rows}; leave it out"
        if what in ("rollouts", "epochs"):
            return f"{self.name} samples no images to train on; leave it out"
        if what not in ("step_rule", "solver"):
            return super().unread(run, key, what)
        why = f"{self.takes_given} samples no images" if given else f"{self.name} samples by the ODE"
        if name == "window":
            return f"{why}{'' if given or records else ' and trains no steps of it'}; leave it out"
        if name == "shared_noise":
            same = "" if given else ", and all images of a group would be the same"
            return f"{why}{same}; set shared_noise=false"
        return f"{why}; leave {'it' if what == 'solver' else name} out"

    def require_given_images(self, run: RunConfig, takes: str, remedy: str = "") -> None:
        """Refuse data without images to train on.

        Args:
            takes: what of a manifest it trains on, as the end of a sentence.
            remedy: another remedy than the format.
        """
        given = run.data.given_images()
        if given and not self.given_images <= given:  # of votes
            now, other = ("pairs", "labels") if "target" in self.given_images else ("labels", "pairs")
            raise ValueError(
                f"data.votes_as: given {now!r}, but {self.takes_given} trains on {other}; set data.votes_as={other}"
            )
        if not given:
            raise ValueError(
                f"data.format: given {run.data.format!r}, but {self.takes_given} {takes}; set data.format=manifest"
                f"{remedy}"
            )


class AdvantageConfig(RlConfig):
    """From rewards to advantages."""

    FREE_IN_EPOCH: ClassVar[Set[str]] = {"baseline", "scale", "skip_zero_std_groups", "advantages", "late_rewards"}
    RETIRED: ClassVar[Mapping[str, object]] = {"late_rewards": "wait"}

    advantage_clip: Positive = 5.0
    """Advantages are clipped to plus and minus this."""
    baseline: Literal["group", "batch"] = "group"
    """Mean that is subtracted from a reward: that of its group (per-prompt statistics) or of the whole batch (PPO)."""
    scale: Literal["group", "batch", "none"] = "group"
    """Standard deviation that divides the advantage: of the group, of the batch (Flow-GRPO's global std), or none."""
    skip_zero_std_groups: Annotated[bool | None, Field(validate_default=True)] = None
    """Leave out groups with zero reward variance: with a group baseline or scale their advantages are 0. Null is true
    with a group baseline and false with a batch baseline."""
    advantages: Annotated[str | None, Names("code", variables=(PLUGINS,))] = None
    """Custom advantages, as "module:function": a function of the rewards of all processes (`RewardRows`) and of this
    section that returns one number for each sample, which is then clipped. A module that is not installed is searched
    for in the working directory. Null computes them from `combine`, `baseline` and `scale`."""

    @field_validator("skip_zero_std_groups")
    @classmethod
    def _follows_the_baseline(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        return info.data.get("baseline") == "group" if value is None else value

    def advantage_function(self) -> Callable[[RewardRows, AdvantageConfig], Tensor] | None:
        """The function that `advantages` names; None for the advantages of this package.

        Raises:
            ConfigError: there is no such function.
        """
        return load_named("algorithm.advantages", self.advantages, "function") if self.advantages is not None else None

    def check(self, run: RunConfig, key: str = "") -> None:
        if self.advantages is not None and not all(self.advantages.partition(":")):
            raise ValueError(
                f"algorithm.advantages: given {self.advantages!r}; expected a function; set it to 'module:function'"
            )
        for name, value in (("baseline", self.baseline), ("scale", self.scale)):
            if value == "group" and run.rollout.group_size == 1:
                raise ValueError(
                    f"rollout.group_size: given 1, but algorithm.{name}=group compares samples of one example with "
                    f"each other; set group_size to 2 or more (4-16 is usual), or algorithm.{name}=batch"
                )
        if self.skip_zero_std_groups and self.baseline == "batch":
            stays = (
                " in the mean, though with algorithm.scale=group its advantages are 0" if self.scale == "group" else ""
            )
            raise ValueError(
                "algorithm.skip_zero_std_groups: given true, but algorithm.baseline=batch compares with the whole "
                f"batch, where a group with zero reward variance counts as well{stays}; leave it out, or set "
                "baseline=group"
            )
        if self.resample_rounds and not (self.baseline == "group" and self.skip_zero_std_groups):
            raise ValueError(
                f"algorithm.resample_rounds: given {self.resample_rounds}, which replaces groups that are left out; "
                "set algorithm.baseline=group and algorithm.skip_zero_std_groups=true, or resample_rounds=0"
            )
        super().check(run, key)
