"""TextEdit's judge of a replaced text: its question, its answers and its shares."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retouch.config import ConfigError
from retouch.rewards.scorers import judge_client as judge
from retouch.rewards.scorers import make_scorer
from retouch.types import Failure, Score
from retouch_bench.scorers.textedit_judge import TextEditJudgeReward, read_own, read_published
from tests.rewards.fakes import item, picture, score_checked
from tests.rewards.openai_server import KEY, OpenAIServer, pictures, text_of

TEXTS = {"text": "MENU", "source_text": "SALE"}


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    judge._BUCKETS.clear()
    yield


def made(server: OpenAIServer, **options: Any) -> Any:
    scorer = make_scorer("textedit_judge", {"model": "judge", "address": server.url, **options})
    scorer.load("cpu")
    server.asked.clear()
    return scorer


def edit(number: int = 0, **fields: Any) -> Any:
    given = {"source": picture(1), "reference": picture(2), "metadata": TEXTS, **fields}
    return item(number, image=picture(3, 20, 30), **given)


def answer(*integers: int) -> str:
    names = ("text_accuracy", "text_preservation", "scene_integrity", "local_realism", "visual_coherence")
    return json.dumps({"reasoning": "a reason", **dict(zip(names, integers, strict=True))})


def published(*integers: int) -> str:
    scores = {f"Q{n}": value for n, value in enumerate(integers, 1)}
    return json.dumps({"score": scores, "reason": dict.fromkeys(scores, "because")})


def test_the_judge_sees_source_ground_truth_and_sample_at_the_size_of_the_source() -> None:
    with OpenAIServer(spoil=lambda fields: answer(5, 4, 3, 2, 1)) as server:
        [outcome] = score_checked(made(server), [edit()])
        [asked] = server.asked
    text, images = text_of(asked), pictures(asked)
    assert 'contains the text "SALE"' in text and 'replaced it by "MENU"' in text
    assert np.array_equal(images[0], picture(1)) and np.array_equal(images[1], picture(2))
    assert images[2].shape == picture(1).shape and asked["temperature"] == 0
    assert isinstance(outcome, Score)
    assert outcome.value == pytest.approx(0.4 * 1 + 0.3 * 0.8 + 0.1 * 0.6 + 0.1 * 0.2 + 0)
    assert outcome.detail["text_preservation"] == 4 and outcome.detail["shares"] == [1, 0.8, 0.6, 0.2, 0]


def test_a_wrong_text_sets_the_other_shares_to_0() -> None:
    with OpenAIServer(spoil=lambda fields: answer(3, 5, 5, 5, 5)) as server:
        [cut] = score_checked(made(server), [edit()])
        [whole] = score_checked(made(server, cutoff=False), [edit()])
    assert isinstance(cut, Score) and isinstance(whole, Score)
    assert (cut.value, whole.value) == pytest.approx((0.24, 0.84))


def test_answers_are_read_strictly() -> None:
    """A refused answer is requested again, once, and is then a failure."""
    assert read_own(answer(1, 2, 3, 4, 5)) == [1, 2, 3, 4, 5]
    assert read_published(f"```json\n{published(5, 1, 2, 5, 4)}\n```") == [5, 1, 2, 5, 4]
    for text, problem in (
        (answer(0, 2, 3, 4, 5), "text_accuracy must be an integer from 1 to 5; given 0"),
        (answer(6, 2, 3, 4, 5), "given 6"),
        ("{}", "text_accuracy is missing"),
    ):
        with pytest.raises(ValueError, match=problem):
            read_own(text)
    for text, problem in (
        ("no json", "not JSON"),
        ("[1]", 'no object under "score"'),
        ('{"score": {"Q1": 5}}', "score has no Q2"),
        ('{"score": {"Q1": "5", "Q2": 1, "Q3": 1, "Q4": 1, "Q5": 1}}', "Q1 must be an integer from 1 to 5"),
    ):
        with pytest.raises(ValueError, match=problem):
            read_published(text)
    with OpenAIServer(spoil=lambda fields: answer(5, 5, 5, 5, 5)) as server:
        scorer = made(server)
        server.spoil = lambda fields: answer(9, 5, 5, 5, 5)
        [failed] = score_checked(scorer, [edit()])
        assert len(server.asked) == 2 and isinstance(failed, Failure)


def test_an_item_without_its_text_fails_alone() -> None:
    with OpenAIServer() as server:
        outcomes = score_checked(made(server), [edit(0), edit(1, metadata={"text": "MENU"})])
    good, bad = outcomes
    assert isinstance(good, Score) and isinstance(bad, Failure) and "metadata.source_text is None" in bad.message


def test_the_published_question_is_the_users_copy(tmp_path: Path) -> None:
    """A Python file is parsed, not run; its doubled braces are those of `str.format`."""
    code = 'raise SystemExit\nQ = """From {raw_text} to {target_text}: answer {{"score": {{}}}}"""\n'
    (tmp_path / "step1.py").write_text(code, encoding="utf-8")
    with OpenAIServer(says=lambda asked: published(4, 4, 4, 4, 4)) as server:
        scorer = made(server, wording="published", prompts=str(tmp_path / "step1.py"))
        [outcome] = score_checked(scorer, [edit()])
        assert text_of(server.asked[0]) == 'From SALE to MENU: answer {"score": {}}'
        assert "response_format" not in server.asked[0]
        assert isinstance(outcome, Score) and outcome.value == pytest.approx(0.8)
        (tmp_path / "other.txt").write_text("nothing", encoding="utf-8")
        for name, problem in (("none.py", "which is no file"), ("other.txt", "which has no text with {raw_text}")):
            with pytest.raises(ConfigError, match=problem):
                made(server, wording="published", prompts=str(tmp_path / name))
    with pytest.raises(ValueError, match="prompts: not set with wording=published"):
        TextEditJudgeReward(model="m", wording="published")
    with pytest.raises(ValueError, match="but wording is own; set wording=published"):
        TextEditJudgeReward(model="m", prompts="x")
