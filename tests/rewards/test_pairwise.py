"""The judge of two images: both orders, values in a group, missing pairs, and what cannot work in a run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from retouch.config import ConfigError
from retouch.config.derived import derive
from retouch.config.load import parse_run
from retouch.rewards.protocol import RewardItem
from retouch.rewards.scorers import judge_client as judge
from retouch.rewards.scorers import make_scorer
from retouch.rewards.scorers.pairing import Preference, group_outcomes, pairs_of
from retouch.rewards.scorers.pairwise import PairwiseReward
from retouch.rewards.scorers.unified_reward import UnifiedRewardReward
from retouch.types import Failure, Score
from retouch_bench.scorers.textedit_judge import TextEditJudgeReward
from tests.config.conftest import BASE
from tests.rewards.fakes import item, score_checked, values
from tests.rewards.openai_server import KEY, OpenAIServer, pictures, text_of


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    judge._BUCKETS.clear()
    yield


def grey(level: int, group: int | None = 0, **fields: Any) -> RewardItem:
    return item(level, image=np.full((8, 8, 3), level, np.uint8), group=group, prompt="a wall", **fields)


def made(server: OpenAIServer, **options: Any) -> Any:
    scorer = make_scorer("pairwise", {"model": "judge", "address": server.url, **options})
    scorer.load("cpu")
    server.asked.clear()
    return scorer


def preferred(first: int, second: int) -> float:
    """Of the server, without position bias."""
    return 0.5 + (first - second) / 255 / 2


# --- both orders ---


@pytest.mark.parametrize(("forward", "backward"), [(0.9, 0.3), (0.62, 0.58), (0.1, 0.2), (1.0, 1.0), (1 / 3, 0.77)])
def test_swapping_the_images_gives_the_mirrored_answer(forward: float, backward: float) -> None:
    found = Preference(forward, backward)
    assert found.mirrored.margin == -found.margin and found.mirrored.mirrored == found
    assert found.mirrored.bias == found.bias and found.mirrored.depends_on_order == found.depends_on_order
    assert found.wins + found.mirrored.wins == pytest.approx(1, abs=1e-15)


def test_a_crop_is_not_compared_with_a_whole_reference_without_a_warning() -> None:
    judge: dict[str, Any] = {"model": "judge", "crop": "mask_box", "address": "http://127.0.0.1:1/v1"}  # of no cost
    entries = [
        PairwiseReward(**judge, against="reference"),
        UnifiedRewardReward(**judge, form="pair", against="reference"),
        TextEditJudgeReward(**judge),
    ]
    for entry in entries:
        [warning] = entry.advice("better")
        assert warning.startswith("rewards.better.crop: given 'mask_box', but the reference image stays whole")
        assert not entry.model_copy(update={"crop": "none"}).advice("better")
    assert not PairwiseReward(**judge).advice("better")


def test_position_bias_is_measured_and_leaves_the_preference() -> None:
    biased, fair = Preference(0.6 + 0.2, 0.4 + 0.2), Preference(0.6, 0.4)
    assert biased.wins == pytest.approx(fair.wins) == pytest.approx(0.6)
    assert biased.bias == pytest.approx(0.2) and fair.bias == pytest.approx(0)
    assert biased.depends_on_order and not fair.depends_on_order


@pytest.mark.parametrize("bias", [0.0, 0.15, -0.15])
def test_a_judge_with_position_bias_gives_the_values_of_one_without(bias: float) -> None:
    levels = [100, 120, 140]
    with OpenAIServer(prefers_first=bias) as server:
        outcomes = score_checked(made(server), [grey(level) for level in levels])
        assert len(server.asked) == 6
    expected = [np.mean([preferred(a, b) for b in levels if b != a]) for a in levels]
    assert values(outcomes) == pytest.approx(expected, abs=1e-6)
    for outcome in outcomes:
        assert isinstance(outcome, Score) and outcome.detail["position_bias"] == pytest.approx(bias, abs=1e-6)
        assert outcome.detail["order_dependent"] == (1.0 if bias else 0.0)
        assert (outcome.detail["pairs"], outcome.detail["missing"]) == (2, 0)


def test_answers_in_text_win_lose_or_depend_on_the_order() -> None:
    """Black loses to all; the greys 100 and 110 are nearer than the bias, and the first one shown wins."""
    with OpenAIServer(prefers_first=0.1) as server:
        outcomes = score_checked(made(server, mode="text"), [grey(level) for level in (0, 100, 110)])
    assert values(outcomes) == [0.0, 0.75, 0.75]
    assert [o.detail["order_dependent"] for o in outcomes if isinstance(o, Score)] == [0.0, 0.5, 0.5]


def test_groups_are_compared_apart() -> None:
    batch = [grey(10, 1), grey(200, 2), grey(90, 1), grey(250, 2)]
    with OpenAIServer() as server:
        found = values(score_checked(made(server), batch))
        assert len(server.asked) == 4
    pairs = [(10, 90), (200, 250), (90, 10), (250, 200)]
    assert found == pytest.approx([preferred(a, b) for a, b in pairs], abs=1e-6)


# --- what is asked ---


def test_the_question_names_the_task_and_the_criterion_and_shows_the_source_first() -> None:
    source = np.full((8, 8, 3), 7, np.uint8)
    with OpenAIServer() as server:
        scorer = made(server, task="remove", criterion="structure", concurrency=1)
        score_checked(scorer, [grey(10, source=source), grey(20, source=source)])
        forward, backward = server.asked
    assert [p[0, 0, 0] for p in pictures(forward)] == [7, 10, 20]
    assert [p[0, 0, 0] for p in pictures(backward)] == [7, 20, 10]
    text = text_of(forward)
    assert "An object was removed" in text and "better shapes" in text and "The prompt: a wall" in text
    assert (forward["temperature"], forward["max_tokens"], forward["top_logprobs"]) == (0, 1, 20)


def test_of_generated_images_two_are_shown() -> None:
    with OpenAIServer() as server:
        score_checked(made(server), [grey(10), grey(20)])
        assert all(len(pictures(asked)) == 2 for asked in server.asked)


def test_against_the_reference_every_image_stands_alone() -> None:
    reference = np.full((8, 8, 3), 100, np.uint8)
    with OpenAIServer(prefers_first=0.1) as server:
        scorer = made(server, against="reference")
        batch = [grey(150, None, reference=reference), grey(50, None, reference=reference), grey(9)]
        found = values(score_checked(scorer, batch))
        assert len(server.asked) == 4
    assert found == [pytest.approx(preferred(150, 100)), pytest.approx(preferred(50, 100)), "bad_item"]


def test_everything_that_changes_a_score_is_in_the_revision() -> None:
    changes: list[dict[str, Any]] = [
        {}, {"task": "edit"}, {"criterion": "text"}, {"mode": "text"}, {"min_mass": 0.7}, {"rounds": 1},
        {"against": "reference"},
    ]  # fmt: skip
    with OpenAIServer() as server:
        revisions = {made(server, **change).spec.revision for change in changes}
    assert len(revisions) == len(changes)


# --- pairs of a group ---


@pytest.mark.parametrize(("size", "rounds"), [(2, None), (5, None), (8, 1), (8, 3), (7, 2), (6, 9)])
def test_every_pair_is_compared_once_and_every_image_as_often(size: int, rounds: int | None) -> None:
    pairs = pairs_of(size, rounds)
    assert len({frozenset(pair) for pair in pairs}) == len(pairs) and all(a != b for a, b in pairs)
    met = [sum(place in pair for pair in pairs) for place in range(size)]
    assert set(met) == {2 * rounds if rounds and 2 * rounds < size - 1 else size - 1}


def test_values_by_hand() -> None:
    found = group_outcomes(3, {(0, 1): Preference(1, 0), (0, 2): Preference(0.8, 0.4), (1, 2): Preference(0.1, 0.9)})
    assert values(found) == pytest.approx([(1 + 0.7) / 2, (0 + 0.1) / 2, (0.3 + 0.9) / 2])


def test_a_failed_pair_is_missing_and_not_a_loss() -> None:
    lost = Failure("unavailable", "gone", True)
    sure = {pair: Preference(1, 0) for pair in combinations(range(4), 2)}  # an image beats all after it
    found = group_outcomes(4, sure | {(0, 3): lost})
    assert values(found) == pytest.approx([1, 2 / 3, 1 / 3, 0])
    assert [o.detail["missing"] for o in found if isinstance(o, Score)] == [1, 0, 0, 1]


def test_an_image_with_few_answers_fails_and_the_others_do_not() -> None:
    lost = Failure("unavailable", "gone", True)
    sure = {pair: Preference(1, 0) for pair in combinations(range(4), 2)}
    found = group_outcomes(4, sure | {(0, 2): lost, (0, 3): lost})
    assert values(found) == ["unavailable", pytest.approx(2 / 3), pytest.approx(0.5), 0.0]
    assert isinstance(found[0], Failure) and found[0].retryable and "2 of 3 comparisons failed" in found[0].message


def test_one_order_without_an_answer_is_a_missing_pair() -> None:
    with OpenAIServer() as server:
        scorer = made(server)
        server.breaks = lambda asked: 400 if [p[0, 0, 0] for p in pictures(asked)] == [20, 10] else 0
        outcomes = score_checked(scorer, [grey(10), grey(20), grey(30)])
    last = (preferred(30, 10) + preferred(30, 20)) / 2
    assert values(outcomes) == pytest.approx([preferred(10, 30), preferred(20, 30), last], abs=1e-6)
    assert [o.detail["missing"] for o in outcomes if isinstance(o, Score)] == [1, 1, 0]


def test_an_image_alone_in_its_group_is_a_failure() -> None:
    with OpenAIServer() as server:
        (found,) = score_checked(made(server), [grey(1)])
    assert isinstance(found, Failure) and "set against=reference" in found.message


@pytest.mark.parametrize(
    ("broken", "code"), [({"digits": 0.2}, "scorer_error"), ({"rewrite": lambda text: "Both are good"}, "scorer_error")]
)
def test_another_answer_is_a_failure(broken: dict[str, Any], code: str) -> None:
    with OpenAIServer() as server:
        scorer = made(server, mode="text" if "rewrite" in broken else "logprobs")
        for name, value in broken.items():
            setattr(server, name, value)
        assert values(score_checked(scorer, [grey(1), grey(2)])) == [code, code]


def test_a_judge_without_log_probabilities_is_found_at_the_start() -> None:
    with OpenAIServer(has_logprobs=False) as server, pytest.raises(ConfigError, match="no log-probabilities; mode is"):
        made(server)


# --- in a run ---

WHOLE = "rewards.pairwise compares the samples of a group with each other"


def run(pairwise: dict[str, Any], **rollout: Any) -> Any:
    sizes = {"group_size": 4, "batch_size_per_device": 8, "global_groups_per_batch": 4, **rollout}
    entry = {"model": "judge", "address": "http://127.0.0.1:1/v1", **pairwise}
    return parse_run({**BASE, "rewards": {"ocr": {}, "pairwise": entry}, "rollout": sizes}, source="run.yaml")


@pytest.mark.parametrize(
    ("pairwise", "rollout", "message"),
    [
        ({}, {"batch_size_per_device": 6}, "rollout.batch_size_per_device: given 6, but " + WHOLE),
        ({}, {"batch_size_per_device": 6}, "set rollout.batch_size_per_device to a multiple of 4"),
        ({"url": "auto"}, {}, "rewards.pairwise.url: given 'auto', but " + WHOLE),
        ({"rounds": 2}, {}, "rewards.pairwise.rounds: given 2, but a group of 4 has 1 rounds of different pairs"),
        ({"against": "reference", "rounds": 1}, {}, "only pairs of a group have rounds; leave it out"),
    ],
)
def test_what_cannot_work(pairwise: dict[str, Any], rollout: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        run(pairwise, **rollout)


def test_what_works() -> None:
    assert run({"role": "gold"}, batch_size_per_device=6)  # of `retouch eval` only
    assert run({}).rewards["pairwise"].compares_group()
    assert not run({"against": "reference"}, batch_size_per_device=6).rewards["pairwise"].compares_group()


def test_groups_stay_whole_on_several_processes() -> None:
    assert derive(run({}), world_size=2).world_size == 2
    with pytest.raises(ConfigError, match=r"rollout\.global_groups_per_batch: given 4 on 3 processes"):
        derive(run({}), world_size=3)
