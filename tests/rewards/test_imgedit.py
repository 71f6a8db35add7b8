"""The judge of ImgEdit-Bench: its lines against recorded results of the published code, and its questions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from retouch.config import ConfigError
from retouch.rewards.scorers import judge_client as judge
from retouch.rewards.scorers import make_scorer
from retouch.types import Failure, Score
from retouch_bench.scorers.imgedit import TYPES, read_lines
from tests.rewards.fakes import item, picture, score_checked
from tests.rewards.openai_server import KEY, OpenAIServer, pictures, text_of

RECORDED = json.loads((Path(__file__).parents[1] / "benchmarks_data/imgedit.json").read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    judge._BUCKETS.clear()
    yield


def write_questions(path: Path) -> Path:
    """Stands for the published file, which is not ours to copy; the lines of every type have other names."""
    lines = "{k} Kept: A number from 1 to 5.\n{k} & Clean: A number from 1 to 5.\n{k} Real: A number from 1 to 5.\n"
    text = {k: f"Judge this {k}.\n{lines.format(k=k)}editing instruction is : <edit_prompt>.\n" for k in TYPES}
    path.write_text(json.dumps(text), encoding="utf-8")
    return path


def says(asked: dict[str, Any]) -> str:
    kind = text_of(asked).split()[2].rstrip(".")
    return f"Brief reasoning: {kind}: 3 of 4 done.\n{kind} Kept: 4\n{kind} & Clean: 2\n{kind} Real: 1"


def made(server: OpenAIServer, folder: Path, **options: Any) -> Any:
    options = {"model": "judge", "address": server.url, "prompts": str(write_questions(folder / "q.json")), **options}
    scorer = make_scorer("imgedit", options)
    scorer.load("cpu")
    server.asked.clear()
    return scorer


def test_lines_equal_the_published_code() -> None:
    for key, reply in RECORDED["replies"].items():
        given = read_lines(reply, RECORDED["names"])
        assert round(sum(given) / len(given), 2) == RECORDED["means"][key]


def test_answers_that_are_rejected_here_count_there() -> None:
    for case in RECORDED["malformed"]:
        with pytest.raises(ValueError, match=r"line|number"):
            read_lines(case["reply"], RECORDED["names"])
    assert [case["official"] for case in RECORDED["malformed"]].count(None) == 1
    with pytest.raises(ValueError, match="given twice"):
        read_lines("A: 1\nB: 2\nC: 3\nA: 4", ["A", "B", "C"])


def test_each_type_has_its_question(tmp_path: Path) -> None:
    with OpenAIServer(says=says) as server:
        scorer = made(server, tmp_path, concurrency=1)
        source, sample = picture(1), picture(2)
        edits = [
            item(i, prompt=f"edit {i}", image=sample, source=source, metadata={"edit_type": kind})
            for i, kind in enumerate(("style", "compose"))
        ]
        outcomes = score_checked(scorer, edits)
        asked = server.asked
    assert [text_of(one).splitlines()[0] for one in asked] == ["Judge this style.", "Judge this compose."]
    assert "editing instruction is : edit 1." in text_of(asked[1])
    assert [[(p == q).all() for p, q in zip(pictures(one), (source, sample), strict=True)] for one in asked] == [
        [True, True]
    ] * 2
    detail = {"mean": 2.33, "instruction_adherence": 4, "editing_quality": 2, "detail_preservation": 1}
    assert outcomes == [Score(7 / 3 / 5, detail)] * 2


def test_an_answer_without_its_lines_fails_after_a_second_question(tmp_path: Path) -> None:
    with OpenAIServer(says=says) as server:
        scorer = made(server, tmp_path)
        server.says = lambda asked: "add Kept: 4\nadd & Clean: 2"
        given = item(0, source=picture(1), metadata={"edit_type": "add"})
        outcomes = score_checked(scorer, [given, item(1, source=picture(1), metadata={"edit_type": "hybrid"})])
        assert len(server.asked) == 2
    failed, unknown = outcomes
    assert isinstance(failed, Failure) and "no line 'add Real: N'" in failed.message
    assert isinstance(unknown, Failure) and unknown.code == "bad_item" and "given 'hybrid'" in unknown.message


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "which is no file"),
        ("{", "which is not JSON"),
        ('{"add": "Judge: <edit_prompt>"}', "has no question for adjust"),
        (json.dumps(dict.fromkeys(TYPES, "Judge: <edit_prompt>")), "has a broken question for add"),
    ],
)
def test_the_questions_are_the_users_copy(text: str | None, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "q.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=problem):
        make_scorer("imgedit", {"model": "judge", "address": "http://127.0.0.1:9/v1", "prompts": str(path)})
    with pytest.raises(ConfigError, match=r"prompts: not set; set it to your copy of Benchmark/Basic/prompts.json"):
        make_scorer("imgedit", {"model": "judge"})
