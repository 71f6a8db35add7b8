"""Groups without a signal are replaced by others (DAPO), and every group counts once."""

from __future__ import annotations

from typing import Any

import pytest

from retouch.rewards.protocol import RewardItem
from retouch.types import Failure, Score, Stopped

from .runs import Config, Use, brightness, by_group, of_kind, train

pytestmark = pytest.mark.usefixtures("bare", "shallow")


@pytest.mark.parametrize("name", ["grpo", pytest.param("dpo", marks=pytest.mark.full)])
def test_flat_groups_are_followed_by_new_ones(name: str, config: Config, scripted: Use) -> None:
    """The first two groups tie; two more are drawn, which differ."""
    rule, seen = by_group(lambda group, item: Score(0.5) if group < 2 else brightness(item))
    scripted(rule)
    window = {"rollout__window": None, "rollout__noise_level": None} if name == "dpo" else {}
    algorithm = {"name": name, "resample_rounds": 2}
    _, records = train(config(algorithm=algorithm, training__max_steps=1, **window))
    (rollout,), (step,) = of_kind(records, "rollout"), of_kind(records, "train")
    assert len(seen) == 4
    assert rollout["images"] == 8.0 and rollout["zero_std_groups"] == 0.5
    assert step["skipped"] == 0.0 and step["rows"] == 2.0


@pytest.mark.parametrize("name", [pytest.param("grpo", marks=pytest.mark.full), "dpo"])
def test_groups_whose_rewards_failed_are_followed_by_new_ones(name: str, config: Config, scripted: Use) -> None:
    """One group has no reward, one has only one: neither compares anything."""
    seen: list[int] = []

    def rule(item: RewardItem) -> Any:
        group = int(item.group or 0)
        if group >= 200:  # an evaluation
            return brightness(item)
        if group not in seen:
            seen.append(group)
        turn = seen.index(group)
        return Failure("bad_item", "no") if turn == 0 or (turn == 1 and item.id % 2) else brightness(item)

    scripted(rule)
    window = {"rollout__window": None, "rollout__noise_level": None} if name == "dpo" else {}
    algorithm = {"name": name, "resample_rounds": 2}
    limit = {"reward_client__max_failure_rate": 1.0}
    _, records = train(config(algorithm=algorithm, training__max_steps=1, **window, **limit))
    (rollout,), (step,) = of_kind(records, "rollout"), of_kind(records, "train")
    assert len(seen) == 4 and (rollout["images"], rollout["failed"]) == (8.0, 3.0)
    assert step["skipped"] == 0.0 and step["rows"] == 2.0


def test_failures_count_against_all_rounds_of_the_epoch(config: Config, scripted: Use) -> None:
    """One of the two images of the round after: half of that round, a sixth of the epoch. Or both, which is a third."""
    for lost, stops in ((1, False), (2, True)):
        seen: list[int] = []

        def rule(item: RewardItem, lost: int = lost, seen: list[int] = seen) -> Any:
            group = int(item.group or 0)
            if group >= 200:  # an evaluation
                return brightness(item)
            if group not in seen:
                seen.append(group)
            turn = seen.index(group)
            return (
                Score(0.5)
                if turn == 0
                else Failure("bad_item", "no")
                if turn == 2 and item.id < lost
                else brightness(item)
            )

        scripted(rule)
        run = config(name=f"l{lost}", algorithm={"name": "grpo", "resample_rounds": 1}, training__max_steps=1)
        if stops:
            with pytest.raises(
                Stopped, match=r"2 of 6 images have no reward, over reward_client\.max_failure_rate 0\.2"
            ):
                train(run)
        else:
            made, records = train(run)
            (rollout,) = of_kind(records, "rollout")
            assert (rollout["images"], rollout["failed"]) == (6.0, 1.0)
            assert (made.rewards.asked, made.rewards.failed) == (6, 1)


def test_it_ends_after_its_rounds_and_with_the_data(config: Config, scripted: Use) -> None:
    """All groups tie for ever: two rounds of two groups, or as many as eight examples allow."""
    scripted(lambda item: Score(0.5))
    for rounds, groups in ((0, 2), (2, 6), (9, 8)):
        algorithm = {"name": "grpo", "resample_rounds": rounds}
        _, records = train(config(name=f"r{rounds}", algorithm=algorithm, training__max_steps=1))
        assert of_kind(records, "rollout")[0]["images"] == 2 * groups
        assert of_kind(records, "train")[0]["skipped"] == 1.0


def test_without_flat_groups_nothing_is_resampled(config: Config, scripted: Use) -> None:
    scripted(brightness)
    _, records = train(config(algorithm={"name": "grpo", "resample_rounds": 3}, training__max_steps=1))
    assert of_kind(records, "rollout")[0]["images"] == 4.0
