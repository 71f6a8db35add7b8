"""VIEScore: the arithmetic against recorded results of the published code, and the questions to a judge."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from retouch.config import ConfigError
from retouch.rewards.protocol import RewardItem
from retouch.rewards.scorers import judge_client as judge
from retouch.rewards.scorers import make_scorer
from retouch.types import Failure, Score
from retouch_bench.scorers.viescore import questions, read_scores, viescore
from tests.rewards.fakes import item, score_checked, values
from tests.rewards.openai_server import KEY, OpenAIServer, pictures, text_of

RECORDED = json.loads((Path(__file__).parents[1] / "benchmarks_data/viescore.json").read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    judge._BUCKETS.clear()
    yield


def edit(prompt: str = "Add a hat.", side: int = 16) -> RewardItem:
    pixels = np.full((side, 16, 3), 200, np.uint8)
    return item(0, prompt=prompt, image=pixels, source=np.full((16, 24, 3), 90, np.uint8))


def answers(asked: dict[str, Any]) -> str:
    return '{"score": [8, 3]}' if "naturalness" in text_of(asked) else 'Well: {"score": [6, 9], "reasoning": "a\nb"}'


def made(server: OpenAIServer, **options: Any) -> Any:
    scorer = make_scorer("viescore", {"model": "judge", "address": server.url, **options})
    scorer.load("cpu")
    server.asked.clear()
    return scorer


def test_scores_equal_the_published_code() -> None:
    for case in RECORDED["cases"]:
        counts = {"edit": 2, "text_to_image": 1}[case["task"]], 2
        read = [read_scores(case[name], n) for name, n in zip(("semantic", "quality"), counts, strict=True)]
        assert viescore(*read) == pytest.approx(case["expected"], abs=1e-12), case


def test_the_published_code_makes_numbers_of_answers_that_are_rejected_here() -> None:
    assert RECORDED["malformed"]
    for case in RECORDED["malformed"]:
        assert case.get("official") or case["official_distinct_outcomes_over_30_seeds"] > 5
        with pytest.raises(ValueError, match=r"score|JSON"):
            read_scores(case["semantic"], 2)


def test_the_question_of_an_edit_shows_both_images_and_that_of_quality_the_sample() -> None:
    with OpenAIServer(says=answers) as server:
        scorer = made(server, concurrency=1)
        (outcome,) = score_checked(scorer, [edit()])
        semantic, quality = server.asked
    assert isinstance(outcome, Score) and outcome.value == pytest.approx(18**0.5 / 10)
    assert outcome.detail == {
        "semantic_consistency": 6, "perceptual_quality": 3, "overall": pytest.approx(18**0.5),
        "edit_success": 6, "preservation": 9, "naturalness": 8, "artefact_free": 3,
    }  # fmt: skip
    assert text_of(semantic) == questions()["edit"].replace("<instruction>", "Add a hat.")
    assert text_of(quality) == questions()["quality"]
    assert [p[0, 0, 0] for p in pictures(semantic)] == [90, 200] and [p[0, 0, 0] for p in pictures(quality)] == [200]
    assert (semantic["temperature"], semantic["max_tokens"]) == (0, 1400)


def test_a_sample_of_another_size_is_resized_to_the_source() -> None:
    sample = np.random.default_rng(0).integers(0, 256, (40, 30, 3), np.uint8)
    with OpenAIServer(says=answers) as server:
        score_checked(made(server, concurrency=1), [item(0, image=sample, source=edit().source)])
        shown = pictures(server.asked[1])[0]
    assert np.array_equal(shown, np.asarray(Image.fromarray(sample).resize((24, 16), Image.Resampling.BICUBIC)))


def test_text_to_image_has_one_integer_and_needs_no_source() -> None:
    def says(asked: dict[str, Any]) -> str:
        return '{"score": [4, 9]}' if "naturalness" in text_of(asked) else '{"score": 9}'

    with OpenAIServer(says=says) as server:
        scorer = made(server, task="text_to_image", concurrency=1, encoding="jpeg")
        assert scorer.spec.needs == frozenset()
        assert values(score_checked(scorer, [item(1, prompt="A pink frisbee.")])) == [pytest.approx(0.6)]
        assert text_of(server.asked[0]) == questions()["text_to_image"].replace("<prompt>", "A pink frisbee.")
        assert str(server.asked[0]).count("data:image/jpeg") == 1


def test_an_answer_without_scores_is_requested_again_once() -> None:
    replies = iter(["I cannot say.", '{"score": [5, 5]}', '{"score": [5, 5]}'])
    with OpenAIServer(says=answers) as server:
        scorer = made(server, concurrency=1)
        server.says = lambda asked: next(replies)
        assert values(score_checked(scorer, [edit()])) == [0.5]
        assert [len(asked["messages"]) for asked in server.asked] == [1, 3, 1]
        server.says = lambda asked: '{"score": [5, 12]}'
        (outcome,) = score_checked(scorer, [edit()])
    assert (
        isinstance(outcome, Failure) and outcome.code == "scorer_error" and "integers from 0 to 10" in outcome.message
    )


def test_the_revision_names_question_and_settings() -> None:
    with OpenAIServer(says=answers) as server:
        revisions = {made(server, **o).spec.revision for o in ({}, {"temperature": 1.0}, {"encoding": "jpeg"})}
    assert len(revisions) == 3 and all(one.startswith("viescore judge served as judge-2026-01") for one in revisions)


def test_a_judge_that_is_not_there_is_reported_at_the_start() -> None:
    with OpenAIServer(breaks=lambda asked: 400) as server, pytest.raises(ConfigError, match="reward 'viescore'"):
        made(server)
