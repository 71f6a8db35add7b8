"""What the page of votes claims of its measurements: benchmarks/taste.py and benchmarks/taste_runs.py."""

from __future__ import annotations

import json
from statistics import fmean
from typing import Any

import pytest
from tools.page_parts import program

from .pages import REPOSITORY


def result(name: str) -> Any:
    return json.loads((REPOSITORY / f"benchmarks/results/{name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("taste", ["warm", "stroke"])
def test_fits_reach_most_of_the_ceiling_and_intervals_contain_the_truth(taste: str) -> None:
    found = result("taste")["measures"][taste]["fit"]
    assert len(found["rows"]) == 10 and found["covered"] >= 9
    assert fmean(row["of_ceiling"] for row in found["rows"]) >= 0.8


def test_active_choice_needs_at_most_four_fifths_of_the_votes() -> None:
    rows = program("taste").choice_rows(result("taste"))
    assert len(rows) == 6 and all(votes is not None and votes <= 0.8 * count for _, count, _, votes in rows)


def test_votes_that_a_curve_needs_lie_between_its_counts() -> None:
    needed = program("taste").needed
    assert needed((25, 50, 75), (0.7, 0.8, 0.9), 0.85) == pytest.approx(62.5)
    assert needed((25, 50), (0.7, 0.8), 0.6) == 25 and needed((25, 50), (0.7, 0.8), 0.9) is None


def test_training_on_votes_raises_the_taste_without_loss_of_legibility() -> None:
    rows = [row for row in result("taste_runs")["rows"] if row["arm"].startswith("RL")]
    assert [row["seed"] for row in rows] == [0, 1, 2]
    for row in rows:
        assert row["gain"]["stroke"][1] > 0 and row["gain"]["ocr.ned"][0] >= -0.02 and row["alarms"] == []


def test_the_gold_reward_notices_the_attack_within_the_voted_images() -> None:
    rows = [row for row in result("taste_runs")["rows"] if row["arm"] == "attack"]
    assert [row["seed"] for row in rows] == [0, 1, 2]
    for row in rows:
        least, most = row["voted"]
        last = row["curve"][-1]
        assert "gold" in row["alarms"][0][1] and row["alarms"][0][0] == last[0] and least < last[1] < most


def test_a_gold_reward_that_is_not_cautious_rises_with_the_trained_one() -> None:
    [row] = [row for row in result("taste_runs")["rows"] if row["arm"] == "attack, plain gold"]
    assert row["alarms"] == [] and row["gain"]["gold"][1] > 0 and row["curve"][-1][1] > row["voted"][1]


def test_the_other_algorithms_took_as_many_forwards() -> None:
    rows = [row for row in result("taste_runs")["rows"] if not row["arm"].startswith("attack")]
    forwards = {row["forwards"] for row in rows}
    assert {"KTO", "offline DPO"} < {row["arm"] for row in rows} and max(forwards) < 1.05 * min(forwards)
