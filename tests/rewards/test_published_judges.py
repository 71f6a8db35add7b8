"""EditScore and UnifiedReward: the published arithmetic on recorded answers, and strict reading of everything else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retouch.config import ConfigError
from retouch.rewards.protocol import RewardItem
from retouch.rewards.rubrics import PROMPT, rubric
from retouch.rewards.scorers import judge_client as judge
from retouch.rewards.scorers import make_scorer
from retouch.rewards.scorers.editscore import outcome_of, overall, read_scores
from retouch.rewards.scorers.unified_reward import read_axes, read_pair, read_point
from retouch.types import Failure, Score
from tests.rewards.fakes import item, score_checked, values
from tests.rewards.openai_server import KEY, OpenAIServer, pictures, text_of

RECORDED: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "benchmarks_data" / "editscore.json").read_text(encoding="utf-8")
)


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    judge._BUCKETS.clear()
    yield


def edit(number: int = 0, output: tuple[int, int, int] = (204, 204, 51)) -> RewardItem:
    """Brightness .6, difference .3 to its source, blue .2."""
    image, source = (np.full((16, 16, 3), colour, np.uint8) for colour in (output, tuple(c // 2 for c in output)))
    return item(number, image=image, source=source, prompt=f"edit number {number}.")


def made(name: str, server: OpenAIServer, **options: Any) -> Any:
    scorer = make_scorer(name, {"model": "judge", "address": server.url, **options})
    scorer.load("cpu")
    server.asked.clear()
    return scorer


# --- EditScore ---


@pytest.mark.parametrize("case", RECORDED["cases"], ids=range(len(RECORDED["cases"])))
def test_recorded_answers_score_as_the_published_code_scores_them(case: dict[str, Any]) -> None:
    pairs = zip(case["edit"], case["quality"], strict=True)
    found = outcome_of([read_scores(a) + read_scores(b) for a, b in pairs])
    assert isinstance(found, Score) and found.value == pytest.approx(case["overall"], abs=1e-9)
    assert found.detail == pytest.approx({name: case[name] for name in found.detail}, abs=1e-9)


def test_the_questions_are_the_published_ones_word_for_word() -> None:
    asked = {name: rubric(f"editscore_{name}").replace(PROMPT, RECORDED["instruction"]) for name in ("edit", "quality")}
    digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in asked.items()}
    assert digests == RECORDED["sha256_of_questions"]


def test_an_edit_is_scored_by_both_questions() -> None:
    """The server gives 15 and 17 of 25 to the edit, and 5 and 25 to the quality."""
    with OpenAIServer() as server:
        scorer = made("editscore", server)
        (found,) = score_checked(scorer, [edit(3)])
        first, second = server.asked
    assert isinstance(found, Score) and found.value == pytest.approx(np.sqrt(6.0 * 2.0))
    assert found.detail == pytest.approx({"prompt_following": 6.0, "consistency": 6.8, "perceptual_quality": 2.0})
    assert [p[0, 0].tolist() for p in pictures(first)] == [[102, 102, 25], [204, 204, 51]]
    assert [p[0, 0].tolist() for p in pictures(second)] == [[204, 204, 51]]
    assert text_of(first).endswith("Editing instruction: edit number 3.\n") and "number 3" not in text_of(second)
    assert (first["temperature"], first["top_p"], first["top_k"], first["max_tokens"]) == (0.7, 0.9, 20, 512)


def test_passes_have_seeds_of_their_own_and_are_averaged() -> None:
    with OpenAIServer(by_seed={42: 0, 43: 2, 44: -3}) as server:
        scorer = made("editscore", server, passes=3)
        (found,) = score_checked(scorer, [edit()])
        assert sorted({asked["seed"] for asked in server.asked}) == [42, 43, 44] and len(server.asked) == 6
    mean = np.mean([np.sqrt((15 + d) * (5 + d)) * 0.4 for d in (0, 2, -3)])
    assert isinstance(found, Score) and found.value == pytest.approx(mean)


BROKEN = {
    "no JSON": "The edit is good: 8 out of 10.",
    "cut off": '{"reasoning": "a long',
    "no score": '{"reasoning": "fine"}',
    "one score": '{"reasoning": "fine", "score": [20]}',
    "three scores": '{"reasoning": "fine", "score": [20, 20, 20]}',
    "a number": '{"reasoning": "fine", "score": 20}',
    "text": '{"reasoning": "fine", "score": ["20", "20"]}',
    "too high": '{"reasoning": "fine", "score": [26, 20]}',
    "negative": '{"reasoning": "fine", "score": [-1, 20]}',
    "true": '{"reasoning": "fine", "score": [true, 20]}',
    "NaN": '{"reasoning": "fine", "score": [NaN, 20]}',
    "nothing": "",
}


@pytest.mark.parametrize("answer", BROKEN.values(), ids=BROKEN)
def test_an_answer_that_cannot_be_read_is_no_score(answer: str) -> None:
    with pytest.raises(ValueError, match=r"given|JSON"):
        read_scores(answer)


def test_a_code_fence_around_the_answer_is_read() -> None:
    assert read_scores('```json\n{"reasoning": "r", "score": [20, 3.5]}\n```') == [20.0, 3.5]


def test_the_worse_score_of_each_question_counts() -> None:
    assert overall([25, 25, 25, 25]) == 10 and overall([0, 25, 25, 25]) == 0
    assert overall([4, 9, 25, 16]) == pytest.approx(0.4 * 8)


def test_a_bad_answer_is_asked_for_again_with_another_seed_and_is_then_a_failure() -> None:
    """Never a random number, 5.0 or 12.5."""
    with OpenAIServer() as server:
        scorer = made("editscore", server, concurrency=1)
        answers = iter(["no", None, None])
        server.rewrite = lambda text: next(answers) or text
        assert values(score_checked(scorer, [edit()])) == [pytest.approx(np.sqrt(12.0))]
        assert [asked["seed"] for asked in server.asked] == [42, 43, 42]
        server.rewrite = lambda text: text.replace("25]", "26]")
        (failure,) = score_checked(scorer, [edit()])
    assert isinstance(failure, Failure) and failure.code == "scorer_error" and "from 0 to 25" in failure.message


def test_one_failed_pass_fails_its_item_alone() -> None:
    with OpenAIServer() as server:
        scorer = made("editscore", server, passes=2)
        server.breaks = lambda asked: 400 if asked["seed"] == 43 and "number 4" in text_of(asked) else 0
        found = values(score_checked(scorer, [edit(3), edit(4), edit(5)]))
    assert found == [pytest.approx(np.sqrt(12.0)), "scorer_error", pytest.approx(np.sqrt(12.0))]


def test_a_model_that_answers_otherwise_is_found_at_the_start() -> None:
    with OpenAIServer(rewrite=lambda text: "Good.") as server, pytest.raises(ConfigError, match="no scores in 2"):
        made("editscore", server)


# --- UnifiedReward ---


def test_the_axes_are_averaged() -> None:
    with OpenAIServer() as server:
        scorer = made("unified_reward", server)
        (found,) = score_checked(scorer, [edit(2)])
        assert "Text Caption: [edit number 2.]" in text_of(server.asked[0])
    assert scorer.spec.range == (1.0, 5.0)
    axes = {"alignment": 1 + 4 * 0.6, "coherence": 1 + 4 * 0.8, "style": 5.0}
    assert isinstance(found, Score) and found.detail == pytest.approx(axes, abs=1e-4)
    assert found.value == pytest.approx(sum(axes.values()) / 3, abs=1e-4)


def test_the_point_score_of_version_1() -> None:
    with OpenAIServer() as server:
        assert values(score_checked(made("unified_reward", server, form="point"), [edit()])) == [pytest.approx(3.4)]


@pytest.mark.parametrize(("text", "reason", "expected"), [
    ("Final Score: 3", "length", "the last number may be incomplete; it was cut off"),  # of 3.75
    ("Final Score: 3.75", "stop", 3.75),
    ("Final Score: 3.75\n", "length", 3.75),
])  # fmt: skip
def test_a_score_that_was_cut_is_none(text: str, reason: str, expected: object) -> None:
    scorer: Any = make_scorer("unified_reward", {"model": "m", "address": "http://127.0.0.1:1/v1", "form": "point"})
    scorer.judge.ask = lambda *_, **__: {"message": {"content": text}, "finish_reason": reason}
    [found] = scorer.score([edit()])
    assert found.value == expected if isinstance(found, Score) else str(expected) in found.message


def test_the_published_example_answers_are_read() -> None:
    """From point_score_ACS_image_generation.py and pair_score_image_generation.py of UnifiedReward."""
    axes = "Alignment Score (1-5): 2.694700002670288\nCoherence Score (1-5): 2.371500015258789\n"
    found = read_axes(axes + "Style Score (1-5): 2.802500009536743")
    assert list(found.values()) == [2.694700002670288, 2.371500015258789, 2.802500009536743]
    shares = [(0.435699999332428, 0.564300000667572), (0.4180000126361847, 0.5820000171661377)]
    shares += [(0.40790000557899475, 0.5921000242233276)]
    blocks = zip(("Alignment", "Coherence", "Style"), shares, strict=True)
    text = "\n\n".join(f"{name} Score:\n Image 1: {a}\n Image 2: {b}" for name, (a, b) in blocks)
    assert list(read_pair(text).values()) == pytest.approx([0.4357, 0.418, 0.4079], abs=1e-6)


AXES = "Alignment Score (1-5): 3\nCoherence Score (1-5): 4\nStyle Score (1-5): 2.5"
PAIR = "\n".join(f"{name} Score:\n Image 1: .3\n Image 2: 0.7" for name in ("Alignment", "Coherence", "Style"))


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (read_axes, "I would say 4."),
        (read_axes, AXES.replace("Style", "Beauty")),
        (read_axes, f"{AXES}\n{AXES}"),
        (read_axes, AXES.replace("4", "5.5")),
        (read_axes, AXES.replace("4", "0")),
        (read_axes, AXES.replace("4", "four")),
        (read_axes, AXES.replace("4", "4/5")),
        (read_point, "Final Score: great"),
        (read_point, "Final Score: 6"),
        (read_point, "3.5"),
        (read_point, "Final Score: 3\nFinal Score: 4"),
        (read_pair, PAIR),
        (read_pair, PAIR.replace(" .3", " 0.4")),
        (read_pair, PAIR.replace(" .3", " -0.3")),
        (read_pair, "Image 1 is better."),
    ],
)
def test_other_answers_are_no_score(read: Any, text: str) -> None:
    with pytest.raises(ValueError, match="given"):
        read(text)


def test_a_pair_is_asked_in_both_orders() -> None:
    """The judge adds .2 to whatever it sees first; the result does not have it."""
    dark, light = edit(0, (51, 51, 51)), edit(1, (153, 153, 153))
    with OpenAIServer(prefers_first=0.2) as server:
        scorer = made("unified_reward", server, form="pair")
        group = [item(i, image=one.image, group=7) for i, one in enumerate((dark, light))]
        found = values(score_checked(scorer, group))
        assert len(server.asked) == 2 and scorer.spec.range == (0.0, 1.0)
    assert found == [pytest.approx(0.3), pytest.approx(0.7)]


def test_a_form_without_opponents_has_no_reference() -> None:
    with pytest.raises(ConfigError, match="but only pairs have an opponent; leave it out"):
        make_scorer("unified_reward", {"model": "m", "against": "reference"})
