"""Each alarm by hand: what sets it off, and what does not."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from retouch.config.training import FALSE_ALARMS
from retouch.observe.guards import (
    Alarm,
    GoldPairs,
    IdleWatch,
    KlWatch,
    StepWatch,
    evaluation_alarms,
    gold_comparisons,
    gold_level,
    image_statistics,
    images_collapse,
    nearest_distances,
    region_of,
    score_drifts,
    statistic_drifts,
)

WEIGHTS = {"proxy": 2.0}


def rows(proxy: list[float | None], gold: list[float | None], **more: float) -> list[dict[str, Any]]:
    return [
        {"example": i, "index": 0, "proxy": p, "gold": g, **more}
        for i, (p, g) in enumerate(zip(proxy, gold, strict=True))
    ]


BEFORE = rows([0.1, 0.2, 0.3, 0.2] * 2, [0.9, 0.8, 0.9, 0.7] * 2)


def gold_falls(now: list[dict[str, Any]], earlier: int = 1) -> str | None:
    """The alarm beside `BEFORE`, the best of so many evaluations."""
    pairs = gold_comparisons([BEFORE], now, WEIGHTS, ["gold"])
    return pairs["gold"].alarm("gold", gold_level(earlier)) if pairs else None


def test_a_proxy_that_rises_while_gold_falls() -> None:
    now = rows([0.5, 0.6, 0.6, 0.7] * 2, [0.4, 0.4, 0.3, 0.3] * 2)
    assert gold_falls(now) == (
        "the trained rewards rose by 0.8, but gold, which is not trained on, fell by 0.475: this may be reward hacking"
    )


@pytest.mark.parametrize(
    ("proxy", "gold"),
    [
        ([0.5, 0.6, 0.6, 0.7], [0.9, 0.9, 0.9, 0.9]),  # both rise
        ([0.0, 0.1, 0.1, 0.1], [0.4, 0.4, 0.3, 0.3]),  # both fall
        ([0.5, 0.6, 0.6, 0.7], [0.9, 0.8, 0.9, 0.6]),  # gold falls by less than its interval
        ([0.5, None, None, None], [0.4, 0.4, 0.3, 0.3]),  # two sound examples are too few
    ],
)
def test_what_is_no_fall_of_gold(proxy: list[float | None], gold: list[float | None]) -> None:
    assert gold_falls(rows(proxy * 2, gold * 2)) is None


def test_only_pairs_of_one_image_are_compared() -> None:
    now = rows([0.5, 0.6, 0.6, 0.7] * 2, [0.4, 0.4, 0.3, 0.3] * 2)
    assert gold_falls([{**row, "example": row["example"] + 10} for row in now]) is None
    assert gold_falls(now[::-1]) == gold_falls(now) is not None  # by name, not by place


def test_five_examples_raise_no_alarm(caplog: pytest.LogCaptureFixture) -> None:
    now = rows([0.5, 0.6, 0.6, 0.7, 0.6], [0.4, 0.4, 0.3, 0.3, 0.4])
    assert gold_falls(now) is None
    evaluation_alarms([BEFORE], now, WEIGHTS, ["gold"])
    assert "gold: no alarm, because" in caplog.text and "set evaluation.num_examples to 6 or more" in caplog.text


def test_the_false_alarms_of_all_comparisons_add_up() -> None:
    """The k-th evaluation is compared with k earlier ones; for two gold rewards the same."""
    for rewards in (1, 2):
        spent = sum(rewards * k * (1 - gold_level(k, rewards)) / 2 for k in range(1, 20_000))
        assert spent == pytest.approx(FALSE_ALARMS, abs=1e-5)


@pytest.mark.parametrize("examples", [8, 32])
def test_sound_runs_raise_no_alarm_in_95_of_100(examples: int) -> None:
    """200 runs with 40 evaluations, whose trained reward rises and whose gold reward does not change: each example has
    its own level and noise. By 95 % intervals from the best evaluation 99 of 100 such runs had an alarm."""
    source = np.random.default_rng(examples)
    alarms = 0
    for _ in range(200):
        gold = source.normal(0, 1, examples) + source.normal(0, 1, (41, examples))
        for k in range(1, 41):
            best = gold[:k][gold[:k].mean(1).argmax()]
            if falls(best - gold[k], k):
                alarms += 1
                break
    assert alarms <= 0.05 * 200


def test_gold_of_0_and_1_raises_no_false_alarms() -> None:
    """All of six examples fall together in one of 64 comparisons without a change, and their interval has no width."""
    source = np.random.default_rng(6)
    alarms = 0
    for _ in range(200):
        gold = source.integers(0, 2, (41, 6)).astype(np.float64)
        alarms += any(falls(gold[:k][gold[:k].mean(1).argmax()] - gold[k], k) for k in range(1, 41))
    assert alarms <= 0.05 * 200
    assert GoldPairs(range(6), [1.0] * 6, [1.0] * 6).alarm("gold", gold_level(1)) is not None  # 1 / 64 < .025
    assert GoldPairs(range(6), [1.0] * 6, [1.0] * 6).alarm("gold", gold_level(2)) is None
    assert GoldPairs(range(6), [1.0] * 6, [1.0] * 6).detectable_fall(gold_level(1)) is None  # of an unknown spread


def falls(differences: np.ndarray[Any, Any], earlier: int) -> bool:
    examples = range(len(differences))
    pairs = GoldPairs(examples, [1.0] * len(examples), list(differences))
    return pairs.alarm("gold", gold_level(earlier)) is not None


@pytest.mark.parametrize(("examples", "earlier"), [(8, 1), (32, 1), (32, 10), (128, 40)])
def test_the_fall_that_is_seen_in_8_of_10_cases(examples: int, earlier: int) -> None:
    source = np.random.default_rng(examples + earlier)
    noise = source.normal(0, 1, (600, examples))
    level = gold_level(earlier)
    promised = np.median(
        [GoldPairs(range(examples), [1.0] * examples, list(one)).detectable_fall(level) for one in noise]
    )
    seen = np.mean([falls(one + promised, earlier) for one in noise])
    assert 0.7 < seen < 0.9


def test_gold_is_compared_with_its_best_and_statistics_with_the_first() -> None:
    first = rows([0.1] * 12, [0.5] * 12, **{"picture.saturation": 0.2, "picture.nearest": 0.4})
    best = rows([0.3] * 12, [0.9] * 12, **{"picture.saturation": 0.3, "picture.nearest": 0.3})
    now = rows([0.6] * 12, [0.6] * 12, **{"picture.saturation": 0.5, "picture.nearest": 0.1})
    assert evaluation_alarms([], now, WEIGHTS, ["gold"]) == []
    gold, *rest = evaluation_alarms([first, best], now, WEIGHTS, ["gold"])
    assert gold.of_gold and "fell by 0.3" in gold.text
    assert rest == [
        Alarm("saturation of the images was 0.2 and is 0.5"),
        Alarm("images become too similar: the mean distance to the nearest other was 0.4 and is 0.1"),
    ]


def test_statistics_of_pictures_by_hand() -> None:
    red, grey = np.zeros((8, 8, 3), np.uint8), np.full((8, 8, 3), 90, np.uint8)
    red[..., 0] = 200
    assert image_statistics(red)["picture.saturation"] == 1.0
    flat = image_statistics(grey)
    assert flat["picture.saturation"] == flat["picture.sharpness"] == 0.0
    board = np.indices((8, 8)).sum(0) % 2 * 255
    sharp = image_statistics(np.repeat(board[..., None], 3, 2).astype(np.uint8))
    assert sharp["picture.sharpness"] == pytest.approx((36 * 4 + 24 * 3 + 4 * 2) / 64)  # edges are repeated
    assert sharp["picture.jpeg_bits"] > flat["picture.jpeg_bits"]


def test_the_statistics_are_of_what_was_generated() -> None:
    image, mask = np.zeros((6, 6, 3), np.uint8), np.zeros((6, 6), np.uint8)
    mask[1:3, 2:6] = 255
    assert region_of(image, mask).shape == (2, 4, 3) and region_of(image, None) is image
    assert region_of(image, np.zeros((6, 6), np.uint8)) is image


def test_the_distance_to_the_nearest_other() -> None:
    black, white = np.zeros((32, 16, 3), np.uint8), np.full((20, 40, 3), 255, np.uint8)
    dark = np.full((16, 16, 3), 51, np.uint8)
    assert nearest_distances([black, white, dark]) == pytest.approx([0.2, 0.8, 0.2])
    assert nearest_distances([white, white]) == [0.0, 0.0]


def test_statistics_drift_by_a_factor() -> None:
    assert statistic_drifts("picture.sharpness", 0.1, 0.21) == "sharpness of the images was 0.1 and is 0.21"
    assert statistic_drifts("picture.sharpness", 0.1, 0.04) is not None
    assert statistic_drifts("picture.sharpness", 0.1, 0.19) is None
    assert statistic_drifts("picture.sharpness", 0.0, 1.0) is None
    assert statistic_drifts("picture.sharpness", -np.inf, -np.inf) is None
    assert images_collapse(0.2, 0.11) is None and images_collapse(0.2, 0.09) is not None
    assert images_collapse(-np.inf, -np.inf) is None
    assert statistic_drifts("picture.sharpness", 0.1, -np.inf) is images_collapse(0.2, -np.inf) is None  # not measured


def told(*values: float | None) -> list[str]:
    """What a watch says of a run with this KL at each step."""
    watch = KlWatch()
    return [alarm for alarm in map(watch.see, values) if alarm is not None]


def test_a_kl_that_jumps() -> None:
    assert told(*[1e-3 * (1 + i / 10) for i in range(40)]) == []
    assert told(*[1e-3] * 5, *[2e-2] * 4) == []
    assert told(*[1e-3] * 40, *[2e-2] * 5) == [
        "the KL of the last 5 steps is 0.02, that of the 5 before them 0.001"  # 10 (43 / 38)^4 times may be no jump
    ]
    assert told(*[0.0] * 5, *[2e-2] * 5) == []  # the first steps from the reference


@pytest.mark.parametrize("power", [1, 2, 4])
def test_a_kl_that_grows_as_that_of_a_steady_policy_is_no_jump(power: int) -> None:
    """With the fourth power of the steps during a learning-rate warm-up: 25 times within ten steps."""
    assert told(*[1e-9 * step**power for step in range(1, 200)]) == []


def test_a_kl_that_jumps_twice_is_told_twice() -> None:
    assert len(told(*[1e-3] * 10, *[1.0] * 20, *[100.0] * 20)) == 2


def test_a_kl_that_is_no_number_says_nothing() -> None:
    """NaN in the step of an overflow, null where metrics.jsonl has it."""
    assert told(*[1e-3, math.nan, None] * 5, *[1.0] * 5) == told(*[1e-3] * 5, *[1.0] * 5) != []


def test_a_watch_that_saw_the_steps_before_goes_on_as_the_first_would() -> None:
    steps = [1e-3] * 10 + [1.0] * 12
    first, second = KlWatch(), KlWatch()
    for value in steps:
        first.see(value)
    for value in steps:
        second.see(value)
    assert [first.see(1.0) for _ in range(20)] == [second.see(1.0) for _ in range(20)] == [None] * 20


def test_a_scorer_that_drifts() -> None:
    assert score_drifts("r", [0.5, 20.0], [0.5004, 20.01], 1e-3) is None
    assert score_drifts("r", [0.5, 20.0], [0.5, 20.5], 1e-3) == (
        "r: its scores of the same images changed by 0.0244 since the run began"
    )
    assert score_drifts("r", [0.5, 20.0], [None, 20.0], 1e-3) is None


def test_steps_without_anything_to_learn_from() -> None:
    """One alarm for ten in a row, and another only after a step that had something."""
    watch = IdleWatch()
    seen = [watch.see(value) for value in [1.0] * 9 + [0.0] + [1.0] * 15 + [None] + [1.0] * 10]
    assert [i for i, alarm in enumerate(seen) if alarm] == [19, 35]
    assert seen[19] is not None and "10 steps in a row had zero reward variance" in seen[19]


def test_the_alarms_on_a_step_come_together() -> None:
    watch = StepWatch()
    alarms = [watch.see({"kl": 1e-3 if i < 5 else 1.0, "skipped": 1.0}) for i in range(10)]
    assert [len(found) for found in alarms] == [0] * 9 + [2]
