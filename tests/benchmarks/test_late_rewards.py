"""An epoch that does not wait for its slowest rewards: how it is measured, and what was."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
RESULT: dict[str, Any] = json.loads((REPOSITORY / "benchmarks/results/late_rewards.json").read_text(encoding="utf-8"))

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import late_rewards  # noqa: E402

LIMIT = 1.05
"""Epoch with slow rewards over one without."""


def test_the_committed_numbers_are_within_the_limit() -> None:
    images = RESULT["groups"] * RESULT["group_size"]
    assert RESULT["slow_images"] == 0.05 * images and RESULT["slower"] == 10 and RESULT["steps"] == 4
    assert RESULT["next_step_ratio_range"][1] <= LIMIT < RESULT["wait_ratio_range"][0]
    assert RESULT["long_s"] == pytest.approx(10 * RESULT["short_s"], abs=0.006)


def test_the_page_has_the_numbers() -> None:
    page = " ".join((REPOSITORY / "docs/scaling.md").read_text(encoding="utf-8").split())
    waits, goes_on = RESULT["wait_ratio"], RESULT["next_step_ratio"]
    assert f"{waits:.2f} times as long with `late_rewards: wait` and {goes_on:.2f} times with `next_step`" in page


def test_ratios_are_of_neighbours() -> None:
    def a_round(even: float, wait: float, next_step: float) -> dict[str, dict[str, float]]:
        return {"even": {"epoch": even}, "wait": {"epoch": wait}, "next_step": {"epoch": next_step}}

    found = late_rewards.compared([a_round(1, 2, 1), a_round(2, 3, 2.2), a_round(4, 5, 4)])
    assert (found["even_s"], found["wait_ratio"], found["wait_ratio_range"]) == (2, 1.5, [1.25, 2.0])
    assert (found["next_step_ratio"], found["next_step_ratio_range"]) == (1.0, [1.0, 1.1])


def test_the_same_images_are_slow_in_both_ways() -> None:
    for number in range(3):
        slow = late_rewards.drawn(number, "wait")
        assert len(slow) == late_rewards.SLOW and slow == late_rewards.drawn(number, "next_step")
        assert late_rewards.drawn(number, "even") == set()
    assert late_rewards.drawn(0, "wait") != late_rewards.drawn(1, "wait")
