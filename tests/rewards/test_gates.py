"""Gates, gold rewards, crops, and rewards that are only logged: what a table makes of several entries."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retouch.rewards.client.config import RewardClientConfig
from retouch.rewards.scorers.ocr import OcrReward
from retouch.rewards.scorers.preservation import PreservationReward
from retouch.rewards.scorers.seam import SeamReward
from retouch.rewards.table import Place, RewardTable, Scores
from retouch.rewards.views import View, at_least, viewed
from retouch.types import Failure, Gate, Outcome, Score
from tests.rewards.fakes import Brightness, Gated, Scripted, half_mask, item, items, picture

from .test_compose import Table, constant, scored, table

__all__ = ["table"]

# --- gates ---


@pytest.mark.parametrize(
    ("gate", "by", "value", "expected"),
    [
        (Gate("g"), 0.25, 0.8, 0.2),
        (Gate("g"), 1.7, 0.8, 0.8),  # held to [0, 1]
        (Gate("g"), -3.0, 0.8, 0.0),
        (Gate("g", threshold=0.5), 0.5, 0.8, 0.8),
        (Gate("g", threshold=0.5), 0.49, 0.8, 0.0),
        (Gate("g", threshold=20.0), 21.5, 0.8, 0.8),
        (Gate("g", floor=-1.0), 0.5, -0.2, -0.6),
        (Gate("g"), 0.5, -0.2, -0.2),  # below its floor: a gate raises nothing
    ],
)
def test_a_gate_by_hand(gate: Gate, by: float, value: float, expected: float) -> None:
    found = gate.apply(Score(value, {"x": 1}), Score(by))
    assert isinstance(found, Score) and found.value == pytest.approx(expected)
    assert found.detail == {"x": 1, "ungated": value, "gate": gate.opening(by)}


def test_a_failure_of_a_gate_is_one_of_what_it_gates() -> None:
    away = Failure("unavailable", "gone", retryable=True)
    assert Gate("ocr").apply(Score(1.0), away) == Failure("unavailable", "its gate ocr failed: gone", True)
    own = Failure("bad_item", "mine")
    assert Gate("ocr").apply(own, away) is own


def test_style_times_ocr(table: Table) -> None:
    """The gate itself stays as it is, and may be one that is only logged: then its failures count all the same."""
    entries = {"style": SeamReward(gated_by="ocr", weight=2.0), "ocr": OcrReward(weight=0.0)}

    def reads(batch: Sequence[Any]) -> list[Outcome]:
        return [Failure("bad_item", "no text") if one.id == 2 else Score(0.25 * one.id) for one in batch]

    scores = scored(table(entries, seam=constant(0.8), ocr=Scripted(reads)), items(4))
    assert scores.values("style") == [0.0, pytest.approx(0.2), None, pytest.approx(0.6)]
    assert scores.values("ocr") == [0.0, 0.25, None, 0.75]
    assert scores.combined() == [0.0, pytest.approx(0.4), None, pytest.approx(1.2)]
    assert [name for name, _ in scores.failures() if scores.weights[name]] == ["style"]


# --- gold ---


def test_gold_is_scored_in_evaluations_alone(table: Table) -> None:
    gold = Brightness()
    one = table({"read": OcrReward(), "judge": SeamReward(role="gold")}, ocr=constant(0.5), seam=gold)
    training = one.submit(items(2)).result()
    assert list(training.outcomes) == ["read"] == one.trained and gold.seen == []
    scores = one.submit(items(2), training=False).result()
    assert scores.values("judge") == [float(i.image.mean() / 255) for i in items(2)]
    assert scores.combined() == [0.5, 0.5]


# --- what does not count delays nothing ---


def test_a_reward_of_weight_0_is_not_waited_for(table: Table) -> None:
    """In training it has `logged_wait_s`; in an evaluation all the time it needs."""
    entries = {"read": OcrReward(), "slow": PreservationReward(weight=0.0)}
    client = RewardClientConfig(logged_wait_s=0.2)
    slow = Gated(gate_score=True)
    one: RewardTable = table(entries, client, ocr=constant(0.5), preservation=slow)
    assert one.wait_ready(60) == []
    scores = one.submit(items(2)).result(time.monotonic() + client.logged_wait_s)
    assert scores.combined() == [0.5, 0.5] and scores.values("slow") == [None, None]
    assert {failure.code for _, failure in scores.failures()} == {"deadline"}
    slow.open()
    assert None not in one.submit(items(2), training=False).result().values("slow")


class AtTheLastMoment(Future[dict[str, list[Outcome]]]):
    """Is done between the end of the wait and the look whether it is."""

    def result(self, timeout: float | None = None) -> dict[str, list[Outcome]]:
        if timeout is None:
            return super().result()
        self.set_result({"slow": [Score(0.25)]})
        raise TimeoutError


def test_a_score_that_comes_at_the_last_moment_is_one() -> None:
    place = Place(("process",), View(), "logged")
    pending = Scores({}, {"slow": 0.0}, items(1), parts={place: AtTheLastMoment()}, places={"slow": place})
    assert pending.result(0.0).values("slow") == [0.25]


def test_the_gate_of_a_reward_that_counts_is_waited_for(table: Table) -> None:
    entries = {"read": OcrReward(gated_by="slow"), "slow": PreservationReward(weight=0.0)}
    one = table(entries, ocr=constant(0.5), preservation=Brightness(delay_s=0.6))
    assert None not in one.submit(items(2)).result(time.monotonic() + 0.1).combined()


# --- crops ---


def test_a_crop_to_the_box_of_the_mask() -> None:
    mask = np.zeros((40, 60), np.uint8)
    mask[10:20, 30:50] = 255
    whole = item(0, image=picture(1, 40, 60), source=picture(2, 40, 60), mask=mask, reference=picture(3, 7, 7))
    seen = viewed(whole, View(paste_back=True, crop=True, margin=0.1, least=12))
    assert seen.image.shape == (12, 24, 3)  # 20 x 10 and a tenth of it each way
    assert np.array_equal(seen.image[1:11, 2:22], whole.image[10:20, 30:50])
    assert np.array_equal(seen.image[:, :2], whole.source[9:21, 28:30])  # type: ignore[index]
    assert seen.source is not None and np.array_equal(seen.source, whole.source[9:21, 28:52])  # type: ignore[index]
    assert seen.mask is not None and seen.mask.sum() == mask.sum() and seen.reference is whole.reference


@pytest.mark.parametrize(
    ("box", "expected"),
    [
        ((30, 10, 50, 20), (28, 3, 52, 27)),
        ((0, 0, 2, 2), (0, 0, 24, 24)),
        ((58, 38, 60, 40), (36, 16, 60, 40)),
        ((10, 0, 50, 40), (10, 0, 50, 40)),
    ],
)
def test_the_least_side_of_a_box(box: Any, expected: Any) -> None:
    assert at_least(box, 24, 60, 40) == expected


def test_a_box_larger_than_the_picture_is_the_picture() -> None:
    assert at_least((3, 3, 4, 4), 224, 60, 40) == (0, 0, 60, 40)


@pytest.mark.parametrize("fields", [{}, {"mask": half_mask(3, 3)}, {"mask": np.zeros((6, 5), np.uint8)}])
def test_without_a_mask_that_fits_nothing_is_cropped(fields: dict[str, Any]) -> None:
    one = item(0, **fields)
    assert viewed(one, View(crop=True, least=1)) is one


def test_an_entry_says_what_its_scorer_sees(table: Table, tmp_path: Path) -> None:
    scorer = Brightness()
    entry = OcrReward(crop="mask_box", box_min_side=1, paste_back=False)
    scored(table({"ocr": entry}, ocr=scorer), [item(0, mask=half_mask())])
    assert scorer.seen[0].image.shape == (6, 2, 3)
    assert np.array_equal(scorer.seen[0].image, picture(0)[:, :2])
