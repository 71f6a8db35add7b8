"""Which steps of a rollout are stochastic and trained, and one step of a rollout: the forward that sampling and
training share.

Both call `DiffusionModel.predict` through this module: the policy has one forward. Legend: B rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from retouch.config.derived import sliding_places, stochastic_steps, window_starts
from retouch.core.rules import StepRule
from retouch.core.schedule import Schedule
from retouch.core.steps import Estimate, dpm_step, ode_step
from retouch.data.sampler import derive_seed
from retouch.errors import ConfigError
from retouch.types import Condition, DiffusionModel

if TYPE_CHECKING:
    from retouch.config.rollout import Solver
    from retouch.config.run import RunConfig


@dataclass(frozen=True)
class StepPlan:
    """A solver run: its times, the stochastic rule, and three consecutive kinds of steps.

    Steps `first .. first + stochastic - 1` use the rule, the others the ODE by `solver`; the first `trained` of them
    enter the loss and are recorded. Without a rule, the `trained` steps from `first` are recorded.

    Raises:
        ValueError: steps that cannot be trained: not stochastic, of another family's rule, or with a std of 0. It is
            checked here, on the CPU and before any forward; asking a GPU in every forward would keep it waiting.
    """

    schedule: Schedule
    rule: StepRule | None
    strength: float
    first: int
    stochastic: int
    trained: int
    solver: Solver = "first_order"
    _placed: dict[torch.device, tuple[Tensor, Tensor]] = field(
        default_factory=dict[torch.device, tuple[Tensor, Tensor]], init=False, repr=False, compare=False
    )
    _relative_std: dict[torch.device, Tensor] = field(
        default_factory=dict[torch.device, Tensor], init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.rule is not None and self.trained > self.stochastic:
            raise ValueError(f"{self.trained} steps are trained, but only {self.stochastic} are stochastic")
        if self.solver == "dpm2" and self.schedule.prediction != "flow":
            raise ValueError(f"solver dpm2 is of flow models, the model predicts {self.schedule.prediction}")
        if self.rule is not None and self.rule.prediction != self.schedule.prediction:
            raise ValueError(
                f"this step rule is for {self.rule.prediction} models, the model predicts {self.schedule.prediction}"
            )
        # A std of 0 would be a division by 0 in the log-probability, on one step and long after the start. Most rules
        # end without noise, and the remedy depends on which step it is.
        if self.rule is not None and self.trained:
            flat = (self._std(range(self.first, self.first + self.trained)) <= 0).nonzero().flatten().tolist()
            if flat:
                step = self.first + flat[0]
                is_last = step == self.num_steps - 1 and not self.rule.ends_without_noise
                remedy = "ends_without_noise=True in its StepRule" if is_last else "a std above 0 in its function"
                raise ConfigError(
                    f"step {step} of {self.num_steps} has a std of 0: a deterministic step has no "
                    f"log-probability and cannot be trained; for a custom step rule, set {remedy}"
                )

    @property
    def num_steps(self) -> int:
        return len(self.schedule.times) - 1

    def placed(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Times and noise levels [T + 1] on a device, copied there once: the CPU waits for a copy."""
        if device not in self._placed:
            times = self.schedule.times.to(device)
            self._placed[device] = times, self.schedule.level(times)
        return self._placed[device]

    def mean_std(self, x: Tensor, prediction: Tensor, level: Tensor, level_next: Tensor) -> tuple[Tensor, Tensor]:
        """The Gaussian of the rule over the next states of x [B, ...] at levels [B].

        Raises:
            ValueError: the plan is deterministic.
        """
        if self.rule is None:
            raise ValueError("a deterministic plan has no transition density")
        second = [float(self.schedule.level(self.schedule.times[1:2])[0])] if self.rule.takes_second_level else []
        return self.rule.mean_std(x, prediction, level, level_next, self.strength, *second)

    def relative_std(self, device: torch.device) -> Tensor:
        """Std of each step [T] over the mean of all but the last (TempFlow-GRPO, arXiv 2508.04324, whose 2.25 is 1 over
        the mean of ten steps), on a device, copied there once.

        Raises:
            ValueError: the plan is deterministic.
        """
        if device not in self._relative_std:
            std = self._std(range(self.num_steps))
            self._relative_std[device] = (std / std[: max(1, self.num_steps - 1)].mean()).to(device)
        return self._relative_std[device]

    def _std(self, span: range) -> Tensor:
        """Std of some steps, step sizes included."""
        level = self.schedule.level(self.schedule.times)
        x = torch.zeros(len(span), 1, dtype=torch.float32)
        found: Any = self.mean_std(x, x, level[span.start : span.stop], level[span.start + 1 : span.stop + 1])
        where = self.rule.step if self.rule else "the step rule"
        shapes: list[object] | None = None  # of a tensor its shape, of anything else its type
        if isinstance(found, tuple):
            parts = cast("tuple[object, ...]", found)
            shapes = [tuple(p.shape) if isinstance(p, Tensor) else type(p).__name__ for p in parts]
        if shapes is None or len(shapes) != 2 or shapes[0] != (len(span), 1) or shapes[1] not in ((), (len(span),)):
            given = "a single value" if shapes is None else f"shapes {', '.join(map(str, shapes))}"
            raise ConfigError(
                f"{where}: given {given} for x of shape {(len(span), 1)}; "
                "expected (mean, std) with the mean in the shape of x and the std as [B] or a scalar tensor; "
                "set the std to std.flatten() after arithmetic with per_row"
            )
        for name, part in zip(("mean", "std"), cast("tuple[Tensor, Tensor]", found), strict=True):
            if not part.isfinite().all():
                raise ConfigError(
                    f"{where}: given a {name} that contains NaN or Inf, for a state and a prediction of 0 at levels "
                    f"{level[span.start : span.stop + 1].tolist()}; correct the function"
                )
        return found[1].expand(len(span))


def ode_plan(schedule: Schedule, solver: Solver = "first_order", recorded: int = 0) -> StepPlan:
    """The deterministic sampler of evaluation, of use, and of algorithms without stochastic steps.

    Args:
        recorded: number of last steps whose states are recorded.
    """
    first = len(schedule.times) - 1 - recorded if recorded else 0
    return StepPlan(schedule, None, 0.0, first, 0, recorded, solver)


class Plans:
    """The plans of a run's rollouts. Parts that depend only on the run file are computed once."""

    def __init__(self, run: RunConfig) -> None:
        self.rule = run.algorithm.step_rule(run)
        self.solver: Solver = run.rollout.solver
        self.seed = run.seed
        self.log_prob_mode: Literal["exact", "cps"] = run.algorithm.recorded_log_probs
        self.records_means = run.algorithm.records_means
        self.recorded = run.algorithm.recorded_steps(run)
        self._made: dict[tuple[Schedule, int], StepPlan] = {}  # of each shape of images and place of the window
        if self.rule is None:
            return
        _ = self.rule.mean_std  # imported here: a rule that cannot be imported ends the run before its first rollout
        given = getattr(run.rollout, self.rule.strength)
        self.strength: float = self.rule.default if given is None else given
        self.stochastic, self.trained = stochastic_steps(run), run.algorithm.trained_steps(run)
        self.starts, self.batches_per_start, self.is_random = [0], 1, False
        window = run.rollout.window
        if window is not None:
            self.trained = window.size
            self.starts = sliding_places(run) if window.position == "sliding" else list(window_starts(run))
            self.batches_per_start, self.is_random = window.batches_per_position, window.position == "random"
            if window.position == "fixed":
                del self.starts[1:]

    def plan(self, schedule: Schedule, batch: int = 0) -> StepPlan:
        """The plan of rollout batch number `batch` of the run (counted over epochs); a random window depends on
        (run seed, batch), never on a global generator. Made once for a schedule and a first step: its times stay on
        the device."""
        if self.rule is None:
            first = 0
        elif self.is_random:
            first = Random(derive_seed(self.seed, "window", batch)).randint(self.starts[0], self.starts[-1])
        else:
            first = self.starts[batch // self.batches_per_start % len(self.starts)]
        if (schedule, first) not in self._made:
            self._made[schedule, first] = (
                ode_plan(schedule, self.solver, self.recorded)
                if self.rule is None
                else StepPlan(schedule, self.rule, self.strength, first, self.stochastic, self.trained, self.solver)
            )
        return self._made[schedule, first]


def transition(
    model: DiffusionModel, network: nn.Module, plan: StepPlan, x: Tensor, step: Tensor, condition: Condition
) -> tuple[Tensor, Tensor]:
    """The Gaussian over the next state -> (mean [B, C, H, W], std [B]).

    Args:
        x: [B, C, H, W] fp32 states.
        step: [B] int64, the index of each row's step; rows may be at different steps.
    """
    prediction, level, level_next = _predict(model, network, plan, x, step, condition)
    return plan.mean_std(x, prediction, level, level_next)


def deterministic(
    model: DiffusionModel,
    network: nn.Module,
    plan: StepPlan,
    x: Tensor,
    step: Tensor,
    condition: Condition,
    before: Estimate | None = None,
) -> tuple[Tensor, Estimate | None]:
    """The next state on the ODE -> ([B, C, H, W], what the plan's solver needs of this step in the next).

    Args:
        before: what the deterministic step before left; None after a stochastic one.
    """
    prediction, level, level_next = _predict(model, network, plan, x, step, condition)
    if plan.solver == "dpm2":
        return dpm_step(x, prediction, level, level_next, before)
    return ode_step(plan.schedule.prediction, x, prediction, level, level_next), None


def _predict(
    model: DiffusionModel, network: nn.Module, plan: StepPlan, x: Tensor, step: Tensor, condition: Condition
) -> tuple[Tensor, Tensor, Tensor]:
    times, levels = plan.placed(x.device)
    return model.predict(network, x, times[step], condition), levels[step], levels[step + 1]
