"""Options of reward gradients."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from retouch.algorithms.base import RlConfig
from retouch.config.base import Count, NonNegative
from retouch.config.reads import ReadIf, is_given

if TYPE_CHECKING:
    from retouch.config.run import RunConfig


class RewardGradientConfig(RlConfig):
    """Reward gradients: the gradient of differentiable rewards through the decoder and single denoising steps (DRaFT-1,
    arXiv 2309.17400; DRTune, 2405.00760; ReFL, 2304.05977)."""

    FREE_IN_EPOCH: ClassVar[Set[str]] = {"kl_weight"}
    recipe: ClassVar[str] = "retouch.algorithms.reward_gradient.recipe:train"

    name: Literal["reward_gradient"] = "reward_gradient"
    trained_step: Literal["last", "random", "all"] = "last"
    """Denoising steps that are trained: the last one (DRaFT-1), a random one of each sample, or all (DRTune). The
    inputs of the network are constants: no chain of steps is differentiated."""
    last_steps: Annotated[
        Count | None,
        ReadIf(
            "with `trained_step: random` and `all`",
            lambda own: own.trained_step != "last",
            "but algorithm.trained_step is 'last'; set trained_step=random or all, or leave last_steps out",
        ),
    ] = None
    """Number of last steps that "random" and "all" take from; null takes from the whole schedule."""
    reward_at: Literal["final", "step"] = "final"
    """Image whose reward is differentiated: the final one, or the one that the prediction of the trained step implies
    (ReFL), which is decoded for every trained step. For the last step both are the same."""
    gradient_scale: Literal["rms", "none"] = "rms"
    """"rms" divides the gradients of an epoch by their root mean square and takes the mean over the region: the loss
    does not depend on the scale of the reward or on the resolution. "none" trains on the gradient itself. With `region:
    mask` the mean is over the average region of the epoch, and a larger mask weighs more."""
    kl_weight: NonNegative = 0.1
    """Weight of the mean squared distance to the prediction of the reference policy (`kl_reference`) at the trained
    steps; 0 keeps no reference. Reward gradients exploit a reward fast, and this is what holds them."""

    @property
    def snapshots(self) -> frozenset[str]:
        return frozenset({"reference"} if self.kl_weight else ())

    def recorded_steps(self, run: RunConfig) -> int:
        return 1 if self.trained_step == "last" else self.last_steps or run.rollout.num_steps

    def trained_steps(self, run: RunConfig) -> int:
        return self.recorded_steps(run) if self.trained_step == "all" else 1

    def decoder_backwards(self, run: RunConfig) -> int:
        return self.trained_steps(run) if self.reward_at == "step" else 1

    def rows_per_device(self, run: RunConfig, world_size: int) -> int:
        return super().rows_per_device(run, world_size) * self.trained_steps(run)

    def forwards_per_image(self, run: RunConfig, optimizer_steps: int, guided: int, backward: int) -> float:
        return guided * run.rollout.num_steps + self.trained_steps(run) * (backward + (1 if self.kl_weight else 0))

    def warnings(self, run: RunConfig) -> Iterable[str]:
        steps, key = self.steps_per_pass(run, 1), run.optimizer.step_size_key
        if steps > 1:
            where = " on one process" if run.optimizer.global_batch_size is None else ""
            yield (
                f"{key}: an epoch has {steps} optimizer steps{where}, but the gradients of its rewards are taken once, "
                f"before the first; raise {key.removeprefix('optimizer.')}, or lower rollout.global_groups_per_batch"
            )

    def check(self, run: RunConfig, key: str = "") -> None:
        for name, why in (
            ("inner_epochs", "the gradient of a reward is that of the weights that sampled the image"),
            ("combine", "the gradient is that of the weighted sum of the rewards"),
            ("resample_rounds", "no sample is compared with its group"),
        ):
            if is_given(self, name):
                raise ValueError(f"algorithm.{name}: given {getattr(self, name)!r}, but {why}; leave {name} out")
        self._check_steps(run)
        for name, entry in run.rewards.items():
            if entry.role == "train" and entry.weight:
                of = f"rewards.{name}"
                entry.require_gradient(of, self.name, f"{of}.role=gold", f"{of}.weight=0")
        super().check(run, key)

    def _check_steps(self, run: RunConfig) -> None:
        steps, rollout = self.last_steps, run.rollout
        if steps is not None and steps > rollout.num_steps:
            raise ValueError(
                f"algorithm.last_steps: given {steps}, but rollout.num_steps is {rollout.num_steps}; set last_steps to "
                f"at most {rollout.num_steps}"
            )
        if self.reward_at == "step" and self.trained_step == "last":
            raise ValueError(
                "algorithm.reward_at: given 'step', but the prediction of the last step implies the final image; set "
                "algorithm.trained_step=random, or leave reward_at out"
            )
        if rollout.solver != "first_order":
            raise ValueError(
                f"rollout.solver: given {rollout.solver!r}, but {self.name} differentiates first-order steps; leave "
                "solver out"
            )
        given = run.guidance_scale
        if run.model.forwards_of_guidance(given) > 1:
            key = "rollout.guidance_scale" if run.model.spec.doubles_for_guidance else "model.true_guidance_scale"
            given = given if run.model.spec.doubles_for_guidance else getattr(run.model, "true_guidance_scale", given)
            raise ValueError(
                f"{key}: given {given:g}, which takes a second forward with a negative prompt, and the gradient would "
                f"train that one away from the reward; set {key}=1"
            )
