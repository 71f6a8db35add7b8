"""Rewards hide behind sampling: how it is measured, and what was."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
RESULT: dict[str, Any] = json.loads((REPOSITORY / "benchmarks/results/overlap.json").read_text(encoding="utf-8"))

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import overlap  # noqa: E402
import sleeping  # noqa: E402

LIMIT = 1.1
"""Step over max(rollout + training, reward)."""


def test_the_committed_numbers_are_within_the_limit() -> None:
    assert (RESULT["groups"], RESULT["reward_share_of_rollout"]) == (8, 0.8)
    assert RESULT["overlapped_ratio"] <= LIMIT < RESULT["waiting_ratio"]
    assert len(RESULT["load"]) == 2


def test_ratios_are_of_neighbours_over_what_a_step_cannot_be_shorter_than() -> None:
    def a_round(free: float, reward: float, overlapped: float, waiting: float) -> dict[str, Any]:
        steps = {"overlapped": {"step": overlapped, "reward_wait": 0.5}, "waiting": {"step": waiting, "reward_wait": 0}}
        return {"reward_s": reward, "free": {"step": free}, **steps}

    found = overlap.compared([a_round(1, 0.5, 1.1, 1.5), a_round(2, 4, 5, 6), a_round(4, 1, 4, 5)])
    assert (found["overlapped_ratio"], found["overlapped_ratio_range"]) == (1.1, [1.0, 1.25])
    assert (found["waiting_ratio"], found["free_step_s"], found["reward_s"]) == (1.5, 2, 1)


def test_the_reward_of_a_round_takes_its_share_of_that_rounds_sampling() -> None:
    asked: list[tuple[str, float]] = []

    def one(kind: str, delay_s: float) -> dict[str, float]:
        asked.append((kind, delay_s))
        return {"rollout": 9.0, "vae": 1.0, "step": 20.0}

    assert overlap.taken(one)["reward_s"] == 8.0
    assert asked == [("free", 0.0), ("overlapped", 1.0), ("waiting", 1.0)]


@pytest.mark.full
def test_rewards_run_beside_sampling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured small: groups are scored in their order, one a forward; waiting for each leaves nothing to wait for."""
    monkeypatch.chdir(REPOSITORY)
    found: list[dict[str, Any]] = []
    compared = overlap.compared
    monkeypatch.setattr(overlap, "compared", lambda rounds: found.extend(rounds) or compared(rounds))
    calls: list[int] = []
    score = sleeping.score
    monkeypatch.setattr(sleeping, "score", lambda items: calls.append(len(items)) or score(items))
    row = overlap.measure(Namespace(width=32, group_size=2, side=32, rounds=1), tmp_path)
    assert calls[-3 * 8 :] == [2] * 3 * 8  # three epochs of 8 groups
    [only] = found
    assert only["waiting"]["reward_wait"] < only["reward_s"] / 8
    assert row["waiting_step_s"] > row["reward_s"]
