"""The judge of knowledge graphs against a server whose answers the picture tells."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retouch.config import ConfigError
from retouch.rewards.protocol import RewardItem
from retouch.rewards.scorers import judge_client as judge
from retouch.rewards.scorers import make_scorer
from retouch.rewards.scorers.mmmg import _in_turn
from retouch.types import Failure, Outcome, Score
from tests.rewards.fakes import item, score_checked, values
from tests.rewards.openai_server import KEY, OpenAIServer, fields_of, pictures, text_of

GRAPH = {
    "elements": ["sun", "sea", "cloud", "rain"],
    "dependencies": ["Causes(sun, sea)", "Entails(cloud, rain)", "Causes(sun"],
}


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    judge._BUCKETS.clear()
    yield


def shown(answers: str, number: int = 0, graph: object = GRAPH, **metadata: Any) -> RewardItem:
    """A picture of which the server says "y" or "n" of each element and dependency in turn."""
    pixels = np.zeros((8, 8, 3), np.uint8)
    pixels.reshape(-1, 3)[: len(answers)] = [[255 * (one == "y")] * 3 for one in answers]
    return item(number, prompt="the water cycle", image=pixels, metadata={"knowledge_graph": graph, **metadata})


def made(server: OpenAIServer, **options: Any) -> Any:
    scorer = make_scorer("mmmg", {"model": "judge", "address": server.url, **options})
    scorer.load("cpu")
    server.asked.clear()
    return scorer


def value(outcome: Outcome) -> float:
    assert isinstance(outcome, Score), outcome
    return outcome.value


@pytest.mark.parametrize("ged", ["closed", "networkx"])
def test_all_yes_is_1_and_all_no_is_0(ged: str) -> None:
    pytest.importorskip("scipy")
    with OpenAIServer() as server:
        outcomes = score_checked(made(server, ged=ged), [shown("yyyyyy"), shown("nnnnnn"), shown("nnnnyy")])
    assert values(outcomes) == [1.0, 0.0, 0.0]


def test_one_question_a_picture_and_what_the_answers_make() -> None:
    """Of 4 nodes and 2 edges, rain and its edge are missing: GED = 2 / (6 + 4)."""
    with OpenAIServer() as server:
        (outcome,) = score_checked(made(server), [shown("yyynyy", annotation="Rain falls from clouds.")])
        (asked,) = server.asked
    assert list(fields_of(asked)) == ["description", "e1", "e2", "e3", "e4", "d1", "d2"]
    assert "e4: rain\nd1: Causes(sun, sea)\nd2: Entails(cloud, rain)\nAbout them: Rain falls" in text_of(asked)
    assert isinstance(outcome, Score) and outcome.value == pytest.approx(0.8)
    expected = {"fidelity": 0.8, "elements": 0.75, "dependencies": 1.0, "skipped": 1}
    assert dict(outcome.detail) == pytest.approx(expected)


def test_the_graph_may_be_json_text_and_may_have_no_dependencies() -> None:
    with OpenAIServer() as server:
        scorer = made(server)
        outcomes = score_checked(
            scorer, [shown("ynnnyy", graph=json.dumps(GRAPH)), shown("yn", graph={"elements": ["a", "b"]})]
        )
    assert values(outcomes) == [pytest.approx(1 - 5 / 7), pytest.approx(1 - 1 / 3)]
    assert isinstance(outcomes[1], Score) and outcomes[1].detail["dependencies"] is None


def test_names_of_any_kind_can_be_asked_for() -> None:
    odd = {"elements": ['q"uote', "new\nline", "{brace}", "é", "a" * 500], "dependencies": ['Causes(q"uote, {brace})']}
    with OpenAIServer() as server:
        assert values(score_checked(made(server), [shown("yyyyyy", graph=odd)])) == [1.0]
        assert "\ne2: new line\n" in text_of(server.asked[0])


@pytest.mark.parametrize("graph", [None, {}, "{", {"elements": []}, 5])
def test_an_item_without_a_graph_is_a_failure_and_costs_nothing(graph: object) -> None:
    with OpenAIServer() as server:
        (failure,) = score_checked(made(server), [shown("y", graph=graph)])
        assert server.asked == []
    assert isinstance(failure, Failure) and failure.code == "bad_item" and "knowledge_graph" in failure.message


@pytest.mark.parametrize(
    "change",
    [{"e1": "maybe"}, {"e1": True}, {"d1": None}, {"e9": "yes"}, {"e1": ...}],
    ids=["maybe", "true", "null", "another", "missing"],
)
def test_an_answer_off_the_schema_is_never_a_no(change: dict[str, Any]) -> None:
    def spoil(found: dict[str, Any]) -> str:
        return json.dumps({k: v for k, v in {**found, **change}.items() if v is not ...})

    with OpenAIServer() as server:
        scorer = made(server)
        server.spoil = spoil
        (failure,) = score_checked(scorer, [shown("yyyyyy")])
        assert len(server.asked) == 2
    assert isinstance(failure, Failure) and failure.code == "scorer_error" and "twice" in failure.message


def test_a_judge_that_fails_on_some_rows_fails_just_these() -> None:
    rows = [shown("yyyyyy"[:n] + "n" * (6 - n), n, annotation=f"row {n}.") for n in range(1, 7)]
    with OpenAIServer() as server:
        scorer = made(server)
        healthy = values(score_checked(scorer, rows))
        server.refuses = lambda asked: "row 2." in text_of(asked)
        server.breaks = lambda asked: 503 * ("row 5." in text_of(asked))
        outcomes = values(score_checked(scorer, rows))
    assert all(isinstance(one, float) for one in healthy)
    assert outcomes == [{1: "scorer_error", 4: "unavailable"}.get(i, one) for i, one in enumerate(healthy)]


# --- readability ---


def test_threads_of_the_judge_call_a_function_of_the_user_in_turn() -> None:
    """It may keep an image between two of its steps, as the package's own counter does."""
    at_once, most = 0, 0

    def regions(image: Any) -> float:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        time.sleep(0.02)
        at_once -= 1
        return 1.0

    counted = _in_turn(regions)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(counted, range(4))) == [1.0] * 4
    assert most == 1


def test_regions_of_a_function_lower_the_score(monkeypatch: pytest.MonkeyPatch) -> None:
    with OpenAIServer() as server:
        scorer = made(server, readability="tests.rewards.user_scorers:regions")
        monkeypatch.setattr("tests.rewards.user_scorers.REGIONS", 115)
        (outcome,) = score_checked(scorer, [shown("yyynyy")])
    assert value(outcome) == pytest.approx(0.4)
    assert isinstance(outcome, Score)
    assert (outcome.detail["fidelity"], outcome.detail["readability"]) == pytest.approx((0.8, 0.5))


@pytest.mark.parametrize(("regions", "message"), [(float("nan"), "it must count regions"), ("x", "raised ValueError")])
def test_a_segmenter_that_fails_is_a_failure_and_the_judge_is_asked_once(
    regions: object, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with OpenAIServer() as server:
        scorer = made(server, readability="tests.rewards.user_scorers:regions")
        monkeypatch.setattr("tests.rewards.user_scorers.REGIONS", regions)
        outcomes = score_checked(scorer, [shown("yyyyyy"), shown("yyyyyy")])
        assert len(server.asked) == 2
    assert all(isinstance(one, Failure) and message in one.message for one in outcomes)


# --- options ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"readability": "segmenter"}, "readability: given 'segmenter'; write sam2, or module:function"),
        ({"readability": "no_such_module:count"}, "reward 'mmmg': readability: .*no module no_such_module"),
        ({"readability": "tests.rewards.user_scorers:nothing"}, "has no nothing"),
        ({"model": "other"}, "The model 'other' does not exist"),
    ],
)
def test_options_that_cannot_work(options: dict[str, Any], message: str) -> None:
    with OpenAIServer() as server, pytest.raises(ConfigError, match=message):
        made(server, **options)


def test_the_published_distance_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with OpenAIServer() as server, pytest.raises(ConfigError, match=r'needs networkx; pip install "retouch\[mmmg\]"'):
        made(server, ged="networkx")


# --- the published wording ---

QUESTION = "Describe the image, then answer.\n[ELEM_DEPEND]\nOne line each: name: yes, or name: no."
"""Stands for the published one, which is not ours to copy."""


class InLines(OpenAIServer):
    """Answers in text: of the n-th name yes where the n-th pixel is bright, with Markdown around it."""

    names = ("sun", "sea", "cloud", "rain", "Causes(sun, sea)", "Entails(cloud, rain)")
    left_out: tuple[str, ...] = ()

    def complete(self, asked: dict[str, Any]) -> dict[str, Any]:
        reply, bright = super().complete(asked), pictures(asked)[-1].reshape(-1, 3).mean(1) > 127
        shown = {"a square": True, "a circle": True, "Contains(a square, a circle)": True}
        shown |= dict(zip(self.names, bright, strict=False))
        lines = ["**Image Description:**", "Sun: a disc: yes or no, who knows", "** Element Evaluation: **"]
        kept = {name: yes for name, yes in shown.items() if name not in self.left_out}
        lines += [f"*   **{n.upper()}**: {'Yes' if yes else '[no]'}  [it shows: no doubt]" for n, yes in kept.items()]
        reply["choices"][0]["message"]["content"] = "\n".join(lines)
        return reply


@pytest.mark.parametrize("kind", ["txt", "py"])
def test_published_wording_is_the_users_copy(kind: str, tmp_path: Path) -> None:
    """A text file, or a Python file whose string holds it, which is not run."""
    file = tmp_path / f"question.{kind}"
    file.write_text(QUESTION if kind == "txt" else f"import no_such_module\nprompt = {QUESTION!r}\n", encoding="utf-8")
    with InLines() as server:
        scorer = made(server, wording="published", prompts=str(file))
        (outcome,) = score_checked(scorer, [shown("yyynyy", annotation="Rain falls.")])
        (asked,) = server.asked
    assert value(outcome) == pytest.approx(0.8)  # as by our own wording: rain and its edge are missing
    assert text_of(asked) == QUESTION.replace("[ELEM_DEPEND]", f"{json.dumps(GRAPH)}\nRain falls.")
    assert "response_format" not in asked and (asked["max_tokens"], asked["temperature"]) == (2048, 0)


def test_a_name_without_a_line_is_asked_for_again_and_never_a_no(tmp_path: Path) -> None:
    (tmp_path / "q.txt").write_text(QUESTION, encoding="utf-8")
    with InLines() as server:
        scorer = made(server, wording="published", prompts=str(tmp_path / "q.txt"))
        server.left_out = ("rain",)
        (failure,) = score_checked(scorer, [shown("yyyyyy")])
        assert len(server.asked) == 2
    assert isinstance(failure, Failure) and "1 of 6 names, 'rain' among them" in failure.message


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (None, "prompts: not set with wording=published; set it to your copy"),
        ("nowhere.txt", "prompts: given 'nowhere.txt', which is no file"),
        ("empty.txt", r"which has no text with \[ELEM_DEPEND\]"),
        ("broken.py", "which cannot be read"),
    ],
)
def test_a_copy_that_is_none(
    prompts: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text("How good is it?", encoding="utf-8")
    Path("broken.py").write_text("prompt = (", encoding="utf-8")
    with OpenAIServer() as server, pytest.raises(ConfigError, match=message):
        made(server, wording="published", prompts=prompts)


def test_only_the_whole_protocol_is_called_mmmg(tmp_path: Path) -> None:
    pytest.importorskip("scipy")
    (tmp_path / "q.txt").write_text(QUESTION, encoding="utf-8")
    published = {"wording": "published", "prompts": str(tmp_path / "q.txt")}
    regions = {"readability": "tests.rewards.user_scorers:regions"}
    with InLines() as server:
        parts = (published, published | {"ged": "networkx"}, published | regions)
        names = {made(server, **options).spec.revision.split()[0] for options in parts}
        assert names == {"mmmg-style"}
        whole = made(server, **published, **regions, ged="networkx")
    assert whole.spec.revision.startswith("mmmg judge ")


def test_everything_that_changes_a_score_is_in_the_revision() -> None:
    with OpenAIServer() as server:
        changes = ({}, {"ged": "networkx"}, {"readability": "tests.rewards.user_scorers:regions"})
        revisions = {made(server, **change).spec.revision for change in changes}
    assert len(revisions) == 3
