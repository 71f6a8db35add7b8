"""Which steps are stochastic and trained, and where a random window falls."""

from __future__ import annotations

from typing import Any

import pytest

from retouch.config import parse_run
from retouch.core.schedule import FlowSchedule
from retouch.rollout import StepPlan, make_plan, ode_plan

SCHEDULE = FlowSchedule.make(10, 3.0)


def plan(batch: int = 0, seed: int = 0, **rollout: Any) -> StepPlan:
    data = {"format": "self_bench", "path": "."}
    run = {"name": "t", "seed": seed, "model": {"family": "flux_fill"}, "data": data, "rewards": {"preservation": {}}}
    given = {"num_steps": 10, "step_rule": "flow_sde", **rollout}
    return make_plan(parse_run({**run, "rollout": given, "algorithm": {"name": "grpo"}}), SCHEDULE, batch)


def trained(made: StepPlan) -> range:
    return range(made.first, made.first + made.trained)


@pytest.mark.parametrize("rule", ["flow_sde", "cps"])
def test_a_random_window_falls_everywhere_in_its_range_and_nowhere_else(rule: str) -> None:
    """[.2, .7] of 10 steps holds windows of 2 that begin at 2, 3, 4 and 5."""
    made = [
        plan(batch, window={"size": 2, "range": [0.2, 0.7]}, step_rule=rule, noise_level=0.5) for batch in range(60)
    ]
    assert {trained(one) for one in made} == {range(first, first + 2) for first in (2, 3, 4, 5)}
    assert all([one.is_stochastic(i) for i in range(10)] == [i in trained(one) for i in range(10)] for one in made)


def test_the_window_follows_from_seed_and_batch_alone() -> None:
    places = [
        [plan(batch, seed, window={"size": 1, "range": [0, 1]}).first for batch in range(20)] for seed in (0, 0, 1)
    ]
    assert places[0] == places[1] != places[2]


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
    data = {"format": "self_bench", "path": "."}
    run = {"name": "t", "model": {"family": "flux_fill"}, "data": data, "rewards": {"preservation": {}}}
    run |= {"algorithm": {"name": "grpo", "timestep_fraction": fraction}}
    run |= {"rollout": {"num_steps": 10, "step_rule": rule, "noise_level": 0.5}}
    made = make_plan(parse_run(run), SCHEDULE, 0)
    assert (made.first, made.stochastic, made.trained) == (0, stochastic, count)


def test_strength_is_that_of_the_rule() -> None:
    given = {"noise_level": 0.6, "eta": 0.2}
    assert [plan(step_rule=rule, **given).strength for rule in ("flow_sde", "dance_sde", "cps")] == [0.6, 0.2, 0.6]


def test_the_ode_draws_nothing() -> None:
    made = ode_plan(SCHEDULE)
    assert made.num_steps == 10 and not any(made.is_stochastic(i) for i in range(10)) and made.trained == 0
