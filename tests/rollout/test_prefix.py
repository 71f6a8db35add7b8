"""Steps before the window: computed once for images of one noise, and the same images as without that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from retouch.config import derive, parse_run
from retouch.core.rules import STEP_RULES
from retouch.core.schedule import FlowSchedule
from retouch.rollout.plan import (
    Plans,
    StepPlan,
    ode_plan,
)
from retouch.rollout.sampler import sample
from retouch.types import Condition, Trajectory
from tests.families.conftest import random_example

from .fakes import SIZE, FakeModel, condition_of, plan_of

GROUPS = [3.0, 3.0, -1.0, 3.0, -1.0, 0.5]
"""Conditions of six rows: groups of three, two and one, mixed."""
NOISE = [70, 70, 71, 70, 71, 72]
SEEDS = [1, 2, 3, 4, 5, 6]


def draw(
    model: Any,
    plan: StepPlan,
    noise: Sequence[int] | None = None,
    values: Sequence[float] = GROUPS,
    *,
    first: bool = False,
) -> tuple[Trajectory, list[int]]:
    """A trajectory, and the rows of each forward; `first` shares the first stochastic step as well."""
    model.network.rows.clear()
    seeds = SEEDS[: len(values)]
    options: dict[str, Any] = {"keep_means": True, "share_first_step": first}
    trajectory = sample(model, model.network, plan, condition_of(values), seeds, noise, **options)
    return trajectory, list(model.network.rows)


@pytest.mark.parametrize("first_step", [False, True])
@pytest.mark.parametrize(("prediction", "rule"), [("flow", "flow_sde"), ("flow", "cps"), ("epsilon", "ddim")])
def test_sharing_the_prefix_changes_no_image(prediction: Any, rule: str, first_step: bool) -> None:
    model: Any = FakeModel(prediction)
    plan = plan_of(model, rule, first=2, stochastic=2)
    shared, _ = draw(model, plan, NOISE, first=first_step)
    for i in range(len(GROUPS)):  # a batch of one shares nothing
        alone = sample(model, model.network, plan, condition_of(GROUPS[i : i + 1]), SEEDS[i : i + 1], NOISE[i : i + 1])
        torch.testing.assert_close(alone.final[0], shared.final[i], atol=1e-5, rtol=0)
        torch.testing.assert_close(alone.latents[0], shared.latents[i], atol=1e-5, rtol=0)
        torch.testing.assert_close(alone.log_probs[0], shared.log_probs[i], atol=1e-5, rtol=0)


def test_it_changes_no_image_of_a_real_network_either(model: Any) -> None:
    size = (32, 64)
    condition: Condition = model.encode([random_example(i, *size) for i in (0, 1)], 30.0).select([0, 1, 0, 0])
    plan = StepPlan(model.schedule(5, size), STEP_RULES["flow_sde"], 0.7, 2, 2, 2)
    shared = sample(model, model.network, plan, condition, [1, 2, 3, 4], [8, 9, 8, 8])
    for i in range(4):
        alone = sample(model, model.network, plan, condition.select([i]), [i + 1], [[8, 9, 8, 8][i]])
        torch.testing.assert_close(alone.final[0], shared.final[i], atol=1e-5, rtol=0)


def test_the_network_sees_one_row_a_noise_before_the_window() -> None:
    model = FakeModel("flow")
    plan = plan_of(model, "flow_sde", first=2, stochastic=2)
    assert draw(model, plan, NOISE)[1] == [3, 3, 6, 6, 6, 6]  # 3 noises, then every row
    assert draw(model, plan)[1] == [6] * 6  # a noise for each
    assert draw(model, plan, [9] * 6, [3.0] * 6)[1] == [1, 1, 6, 6, 6, 6]
    assert draw(model, plan_of(model, "flow_sde", first=0), NOISE)[1] == [6] * 6  # nothing before the window


def test_the_first_stochastic_step_of_one_noise_is_one_row_as_well() -> None:
    """Its records are those of every row alone: state, mean and log-probability; its noise is each row's own."""
    model = FakeModel("flow")
    plan = plan_of(model, "flow_sde", first=2, stochastic=2)
    shared, rows = draw(model, plan, NOISE, first=True)
    assert rows == [3, 3, 3, 6, 6, 6]
    assert draw(model, plan_of(model, "flow_sde", first=0), NOISE, first=True)[1] == [3, 6, 6, 6, 6, 6]
    assert draw(model, plan, first=True)[1] == [6] * 6  # a noise for each
    assert draw(model, ode_plan(model.schedule(3, SIZE)), first=True)[1] == [6] * 3
    apart, _ = draw(model, plan, NOISE)
    for name in ("final", "latents", "log_probs", "means"):
        torch.testing.assert_close(getattr(shared, name), getattr(apart, name), atol=1e-5, rtol=0)
    assert shared.means is not None and torch.equal(shared.means[0, 0], shared.means[1, 0])
    assert float((shared.latents[0, 1] - shared.latents[1, 1]).abs().max()) > 0.1


def test_rows_of_one_noise_are_one_before_the_window_and_differ_after_it() -> None:
    model = FakeModel("flow")
    shared, _ = draw(model, plan_of(model, "flow_sde", first=2, stochastic=2), NOISE)
    start = shared.latents[:, 0]
    assert torch.equal(start[0], start[1]) and torch.equal(start[0], start[3]) and torch.equal(start[2], start[4])
    assert float((start[0] - start[2]).abs().max()) > 0.1 and float((start[2] - start[5]).abs().max()) > 0.1
    assert float((shared.final[0] - shared.final[1]).abs().max()) > 0.1


def test_without_stochastic_steps_there_is_no_prefix() -> None:
    """The ODE of evaluation runs every row itself, and draws all of a row's noise from its seed."""
    model = FakeModel("flow")
    assert draw(model, ode_plan(model.schedule(3, SIZE)), None)[1] == [6, 6, 6]


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("together", [1, 2, 4])
@pytest.mark.parametrize("position", ["fixed", "sliding"])
def test_derived_numbers_count_the_forwards_that_are_run(together: int, position: str, first: bool) -> None:
    """Over every place of the window, in forwards of `together` images of one group."""
    window = {"size": 2, "range": [0.2, 0.9], "position": position}
    window |= {"batches_per_position": 1} if position == "sliding" else {}
    rollout = {"group_size": 4, "num_steps": 6, "shared_noise": True, "batch_size_per_device": together}
    rollout |= {"shared_first_step": first, "global_groups_per_batch": 2}
    run = parse_run(
        {
            "name": "t",
            "model": {"family": "flux_fill", "path": "tiny"},
            "data": {"format": "self_bench", "path": "."},
            "rewards": {"preservation": {}},
            "rollout": {**rollout, "window": window},
            "algorithm": {"name": "grpo"},
            "optimizer": {"batch_size_per_device": 8, "gradient_accumulation": 1},
            "training": {"gradient_checkpointing": False},
        }
    )
    schedule, model, rows = FlowSchedule.make(6, 2.0), FakeModel("flow"), 0
    plans = [Plans(run).plan(schedule, batch) for batch in range(3)]
    assert [plan.first for plan in plans] == ([1, 1, 1] if position == "fixed" else [1, 2, 3])
    for plan in plans:
        rows += sum(draw(model, plan, [7] * together, [2.0] * together, first=first)[1])
    trained = 1 + 2 / 8 if first else 2  # two inputs of the first step in the one optimizer step on eight images
    assert derive(run).forwards_per_image == pytest.approx(rows / (3 * together) + trained * 3)
