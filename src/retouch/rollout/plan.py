"""Which steps of a rollout are stochastic, and which of those are trained."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

import torch

from retouch.config.derived import sliding_places, stochastic_steps, window_starts
from retouch.core.rules import StepRule
from retouch.core.schedule import Schedule
from retouch.data.sampler import derive_seed

if TYPE_CHECKING:
    from retouch.config.run import (
        RunConfig,
        Solver,
        Window,
    )


@dataclass(frozen=True)
class StepPlan:
    """A solver run: its times, the stochastic rule, and three consecutive kinds of steps.

    Steps `first .. first + stochastic - 1` use the rule, the others the ODE by `solver`; the first `trained` of them
    enter the loss and are recorded.

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

    def __post_init__(self) -> None:
        if self.trained > self.stochastic:
            raise ValueError(f"{self.trained} steps are trained, but only {self.stochastic} are stochastic")
        if self.solver == "dpm2" and self.schedule.prediction != "flow":
            raise ValueError(f"solver dpm2 is of flow models, the model predicts {self.schedule.prediction}")
        if self.rule is not None and self.rule.prediction != self.schedule.prediction:
            raise ValueError(
                f"this step rule is for {self.rule.prediction} models, the model predicts {self.schedule.prediction}"
            )
        if self.rule is not None and self.trained:
            flat = (self._trained_std(self.rule) <= 0).nonzero().flatten().tolist()
            if flat:
                raise ValueError(
                    f"step {self.first + flat[0]} of {self.num_steps} has a std of 0: a deterministic step has no "
                    "log-probability and cannot be trained"
                )

    @property
    def num_steps(self) -> int:
        return len(self.schedule.times) - 1

    def is_stochastic(self, step: int) -> bool:
        return self.first <= step < self.first + self.stochastic

    def _trained_std(self, rule: StepRule) -> torch.Tensor:
        """[trained], step sizes included."""
        level = self.schedule.level(self.schedule.times)
        span = range(self.first, self.first + self.trained)
        x = torch.zeros(len(span), 1)
        now, then = level[span.start : span.stop], level[span.start + 1 : span.stop + 1]
        return rule.mean_std(x, x, now, then, self.strength, float(level[1]))[1]


def ode_plan(schedule: Schedule, solver: Solver = "first_order") -> StepPlan:
    """The deterministic sampler of evaluation, of use, and of algorithms that train on clean images alone."""
    return StepPlan(schedule, None, 0.0, 0, 0, 0, solver)


def make_plan(run: RunConfig, schedule: Schedule, batch: int) -> StepPlan:
    """The plan of rollout batch number `batch` of the run (counted over epochs); a random window is drawn from
    (run seed, batch), never from a global generator."""
    rollout, rule = run.rollout, run.algorithm.step_rule(run)
    if rule is None:
        return ode_plan(schedule, rollout.solver)
    given = getattr(rollout, rule.strength)
    strength = rule.default if given is None else given
    if rollout.window is None:
        trained = run.algorithm.trained_steps(run)
        return StepPlan(schedule, rule, strength, 0, stochastic_steps(run), trained, rollout.solver)
    size = rollout.window.size
    return StepPlan(schedule, rule, strength, _window_start(run, rollout.window, batch), size, size, rollout.solver)


def _window_start(run: RunConfig, window: Window, batch: int) -> int:
    starts = window_starts(run)
    if window.position == "fixed":
        return starts[0]
    if window.position == "sliding":
        places = sliding_places(run)
        return places[batch // window.batches_per_position % len(places)]
    return Random(derive_seed(run.seed, "window", batch)).randint(starts[0], starts[-1])
