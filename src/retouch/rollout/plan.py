"""Which steps of a rollout are stochastic, and which of those are trained."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from retouch.config.derived import trained_steps
from retouch.core.schedule import Schedule
from retouch.core.steps import STEP_RULES, StepRule
from retouch.data.sampler import derive_seed

if TYPE_CHECKING:
    from retouch.config.schema import RunConfig


@dataclass(frozen=True)
class StepPlan:
    """A solver run: its times, the stochastic rule, and three consecutive kinds of steps.

    Steps `first .. first + stochastic - 1` use the rule, the others the ODE; the first `trained` of them enter the loss
    and are recorded.
    """

    schedule: Schedule
    rule: StepRule | None
    strength: float
    first: int
    stochastic: int
    trained: int

    def __post_init__(self) -> None:
        if self.trained > self.stochastic:
            raise ValueError(f"{self.trained} steps are trained, but only {self.stochastic} are stochastic")
        if self.rule is not None and self.rule.prediction != self.schedule.prediction:
            raise ValueError(
                f"this step rule is for {self.rule.prediction} models, the model predicts {self.schedule.prediction}"
            )

    @property
    def num_steps(self) -> int:
        return len(self.schedule.times) - 1

    def is_stochastic(self, step: int) -> bool:
        return self.first <= step < self.first + self.stochastic


def ode_plan(schedule: Schedule) -> StepPlan:
    """The deterministic sampler of evaluation and use."""
    return StepPlan(schedule, None, 0.0, 0, 0, 0)


def make_plan(run: RunConfig, schedule: Schedule, batch: int) -> StepPlan:
    """The plan of rollout batch number `batch` of the run (counted over epochs); a random window is drawn from
    (run seed, batch), never from a global generator."""
    rollout = run.rollout
    rule = STEP_RULES[rollout.step_rule]
    strength = rollout.noise_level if rule.strength == "noise_level" else rollout.eta
    if rollout.window is None:
        stochastic = rollout.num_steps - (1 if rollout.step_rule == "cps" else 0)  # the last step of cps has std 0
        return StepPlan(schedule, rule, strength, 0, stochastic, trained_steps(run))
    size = rollout.window.size
    low, high = (round(share * rollout.num_steps) for share in rollout.window.range)
    last = high - size
    if rollout.step_rule == "cps":
        last = min(last, rollout.num_steps - 1 - size)
    draw = Random(derive_seed(run.seed, "window", batch))
    first = low if rollout.window.position == "fixed" else draw.randint(low, max(low, last))
    return StepPlan(schedule, rule, strength, first, size, size)
