"""Which steps are stochastic and trained, and where a random window falls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from retouch.config import parse_run
from retouch.config.run import RolloutConfig
from retouch.core.rules import STEP_RULES
from retouch.core.schedule import AlphaBarSchedule, FlowSchedule, Schedule
from retouch.rollout.plan import (
    Plans,
    StepPlan,
    ode_plan,
)

SCHEDULE = FlowSchedule.make(10, 3.0)
EPSILON = AlphaBarSchedule.make(torch.linspace(0.99, 0.01, 100), 10)
RUN = {"name": "t", "data": {"format": "self_bench", "path": "."}, "rewards": {"preservation": {}}}


def plan(batch: int = 0, seed: int = 0, **rollout: Any) -> StepPlan:
    run = {**RUN, "seed": seed, "model": {"family": "flux_fill"}}
    given = {"num_steps": 10, "step_rule": "flow_sde", **rollout}
    return Plans(parse_run({**run, "rollout": given, "algorithm": {"name": "grpo"}})).plan(SCHEDULE, batch)


def trained(made: StepPlan) -> range:
    return range(made.first, made.first + made.trained)


@pytest.mark.parametrize("rule", ["flow_sde", "cps"])
def test_a_random_window_falls_everywhere_in_its_range_and_nowhere_else(rule: str) -> None:
    """[.2, .7] of 10 steps holds windows of 2 that begin at 2, 3, 4 and 5."""
    made = [
        plan(batch, window={"size": 2, "range": [0.2, 0.7]}, step_rule=rule, noise_level=0.5) for batch in range(60)
    ]
    assert {trained(one) for one in made} == {range(first, first + 2) for first in (2, 3, 4, 5)}
    assert all(one.stochastic == one.trained for one in made)


def test_the_window_follows_from_seed_and_batch_alone() -> None:
    places = [
        [plan(batch, seed, window={"size": 1, "range": [0, 1]}).first for batch in range(20)] for seed in (0, 0, 1)
    ]
    assert places[0] == places[1] != places[2]


def test_a_plan_and_its_times_on_a_device_are_made_once() -> None:
    """The CPU waits for a copy to the device."""
    run = {**RUN, "model": {"family": "flux_fill"}, "algorithm": {"name": "grpo"}}
    plans, cpu = Plans(parse_run({**run, "rollout": {"num_steps": 10}})), torch.device("cpu")
    first, again = (plans.plan(SCHEDULE) for _ in range(2))
    assert first is again and first.placed(cpu) is again.placed(cpu)


def test_a_fixed_window_stays() -> None:
    fixed = {"size": 2, "range": [0.3, 0.8], "position": "fixed"}
    assert {plan(batch, window=fixed).first for batch in range(5)} == {3}


def test_a_window_never_holds_the_last_step_of_cps_which_is_deterministic() -> None:
    window = {"size": 3, "range": [0.5, 1]}
    ends = {trained(plan(batch, window=window, step_rule="cps", noise_level=0.5)).stop for batch in range(60)}
    assert ends == {8, 9}
    assert max(trained(plan(batch, window=window)).stop for batch in range(60)) == 10


@pytest.mark.parametrize(
    ("rule", "fraction", "stochastic", "count"),
    [("flow_sde", 1.0, 10, 10), ("flow_sde", 0.6, 10, 6), ("cps", 1.0, 9, 9), ("dance_sde", 0.5, 10, 5)],
)
def test_without_a_window_the_first_steps_are_trained(rule: str, fraction: float, stochastic: int, count: int) -> None:
    run = {**RUN, "model": {"family": "flux_fill"}, "algorithm": {"name": "grpo", "timestep_fraction": fraction}}
    run |= {"rollout": {"num_steps": 10, "step_rule": rule}}
    made = Plans(parse_run(run)).plan(SCHEDULE, 0)
    assert (made.first, made.stochastic, made.trained) == (0, stochastic, count)


def test_strength_is_that_of_the_rule() -> None:
    given = {"flow_sde": {"noise_level": 0.6}, "dance_sde": {"eta": 0.2}, "cps": {"noise_level": 0.7}}
    assert [plan(step_rule=rule, **option).strength for rule, option in given.items()] == [0.6, 0.2, 0.7]
    assert [plan(step_rule=rule).strength for rule in given] == [0.9, 0.3, 0.8]


def test_a_rule_with_eta_has_a_published_one() -> None:
    assert [plan(step_rule=rule).strength for rule in ("dance_sde", "flow_sde")] == [0.3, 0.9]
    run = parse_run({**RUN, "model": {"family": "sd_inpaint"}, "algorithm": {"name": "grpo"}})
    assert Plans(run).plan(EPSILON, 0).strength == 1.0
    assert Plans(run.model_copy(update={"rollout": RolloutConfig(eta=0.4)})).plan(EPSILON, 0).strength == 0.4


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_an_epsilon_model_is_sampled_by_ddim_up_to_its_last_step(algorithm: str) -> None:
    run = parse_run({**RUN, "model": {"family": "sd_inpaint"}, "algorithm": {"name": algorithm}})
    made = Plans(run).plan(EPSILON, 0)
    assert made.rule is STEP_RULES["ddim"] and (made.first, made.stochastic, made.trained) == (0, 9, 9)


@pytest.mark.parametrize("algorithm", ["dpo", "nft"])
@pytest.mark.parametrize(("family", "schedule"), [("flux_fill", SCHEDULE), ("sd_inpaint", EPSILON)])
def test_algorithms_that_train_on_clean_images_follow_the_ode(algorithm: str, family: str, schedule: Schedule) -> None:
    run = parse_run({**RUN, "model": {"family": family}, "algorithm": {"name": algorithm}})
    assert Plans(run).plan(schedule, 3) == ode_plan(schedule)


# --- a sliding window (MixGRPO) ---


def starts(batches: int, **window: Any) -> list[int]:
    window = {"size": 2, "range": [0.2, 0.7], "position": "sliding", **window}  # 2, 3, 4 or 5
    return [plan(batch, window=window).first for batch in range(batches)]


def test_a_sliding_window_stays_then_moves_on_and_starts_over() -> None:
    assert starts(14, batches_per_position=3) == [2, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5, 5, 2, 2]
    assert starts(5, batches_per_position=1) == [2, 3, 4, 5, 2]
    published = starts(101)  # 25 batches at a place
    assert [published[batch] for batch in (0, 24, 25, 49, 50, 75, 99, 100)] == [2, 2, 3, 3, 4, 5, 5, 2]


def test_it_moves_by_its_stride() -> None:
    """And always once at the end of its range."""
    assert starts(5, batches_per_position=1, stride=2) == [2, 4, 5, 2, 4]
    assert starts(4, batches_per_position=1, stride=3) == [2, 5, 2, 5]
    assert starts(3, batches_per_position=1, stride=9) == [2, 5, 2]


def test_it_needs_no_seed() -> None:
    window = {"size": 2, "range": [0, 1], "position": "sliding", "batches_per_position": 2}
    assert all(plan(batch, 0, window=window) == plan(batch, 7, window=window) for batch in range(9))


def test_a_sliding_window_of_ddim_never_reaches_the_last_step() -> None:
    window = {"size": 3, "range": [0.5, 1], "position": "sliding", "batches_per_position": 1}
    rollout = {"num_steps": 10, "window": window}
    run = parse_run({**RUN, "model": {"family": "sd_inpaint"}, "algorithm": {"name": "grpo"}, "rollout": rollout})
    assert [trained(Plans(run).plan(EPSILON, batch)) for batch in range(4)] == [
        range(5, 8),
        range(6, 9),
        range(5, 8),
        range(6, 9),
    ]


def test_the_ode_draws_nothing() -> None:
    made = ode_plan(SCHEDULE)
    assert made.num_steps == 10 and made.stochastic == made.trained == 0
