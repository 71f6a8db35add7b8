"""Replies and scores that look sound and are not: none of them becomes a number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from retouch.config import ConfigError
from retouch.rewards.client.cache import ScoreCache
from retouch.rewards.client.client import RewardClient
from retouch.rewards.client.config import RewardClientConfig
from retouch.rewards.golden import disagreements, golden_items
from retouch.rewards.gradient import PixelReward
from retouch.rewards.protocol import ScorerSpec, missing_needs
from retouch.rewards.scorers import make_scorer
from retouch.rewards.scorers.editscore import read_scores as read_editscore
from retouch.rewards.scorers.knowledge_graph import read_checklist
from retouch.rewards.scorers.openai_judge import expectation
from retouch.rewards.scorers.textpecker import read_transcript
from retouch.rewards.views import View
from retouch.rewards.wire import BrokenMessage, parse_reply
from retouch.types import Failure, Score
from retouch_bench.scorers.clip_r_precision import other_prompts
from retouch_bench.scorers.geneval_verdict import read_clauses
from retouch_bench.scorers.imgedit import TYPES
from retouch_bench.scorers.textedit_judge import TextEditJudgeReward
from retouch_bench.scorers.textedit_judge import read_published as read_textedit
from retouch_bench.scorers.viescore import read_scores as read_viescore
from tests.rewards.fakes import Answer, Asked, FakeServer, honest, item, items, reply, score_checked, values
from tests.rewards.openai_server import KEY, OpenAIServer

# --- servers ---


def test_a_score_without_the_revision_of_its_scorer_is_a_bad_reply(tmp_path: Path) -> None:
    """It would be of no range, and the cache would keep it as one of the revision before."""

    def forgets(asked: Asked, number: int) -> Answer:
        told = reply(asked.ids, lambda _: 5000.0) | {"scorers": {}}
        return Answer(reply(asked.ids) if number == 0 else told)

    info = {"scorers": {"r": {"range": [0, 1], "revision": "1"}}}
    cache = ScoreCache(tmp_path / "scores.sqlite")
    with FakeServer(forgets, info=info) as server, RewardClient([server.url], ["r"], cache=cache) as client:
        assert values(client.score(items(1))["r"]) == [0.0]
        for _ in range(2):  # it was not kept
            (failure,) = client.score([item(7)])["r"]
            assert isinstance(failure, Failure) and failure.code == "bad_reply"
            assert failure.message.endswith("the reply scores r and does not name its revision")
        assert len(server.asked) == 3


def test_a_reward_that_is_known_is_not_requested_again_with_one_that_failed(tmp_path: Path) -> None:
    """A judge beside another scorer would be paid twice."""

    def without_b_at_first(asked: Asked, number: int) -> Answer:
        names = asked.manifest["rewards"]
        lost = {"b": {"code": "scorer_error", "message": "choked", "retryable": True}}
        rows = [
            {
                "id": i,
                "scores": {name: {"value": number + i} for name in names if number or i == 0 or name != "b"},
                "errors": {} if number or i == 0 else lost,
            }
            for i in asked.ids
        ]
        return Answer({"items": rows, "scorers": {name: {"revision": "1"} for name in names}})

    info = {"scorers": {"a": {"revision": "1"}, "b": {"revision": "1"}}}
    cache = ScoreCache(tmp_path / "scores.sqlite")
    with (
        FakeServer(without_b_at_first, info=info) as server,
        RewardClient([server.url], ["a", "b"], cache=cache) as client,
    ):
        assert {name: values(column) for name, column in client.score(items(3)).items()} == {
            "a": [0.0, 1.0, 2.0], "b": [0.0, "scorer_error", "scorer_error"]
        }  # fmt: skip
        second = client.score(items(4))
        assert values(second["a"])[:3] == [0.0, 1.0, 2.0] and values(second["b"])[0] == 0.0
        asked = sorted((one.manifest["rewards"], len(one.ids)) for one in server.asked[1:])
        assert asked == [(["a", "b"], 1), (["b"], 2)]
        assert all(isinstance(outcome, Score) for outcome in second["b"]) and client.statistics.cache_hits == 1


def test_a_timeout_of_days_is_sent_as_the_longest_deadline() -> None:
    options = RewardClientConfig(timeout_s=1e6)
    with FakeServer(honest) as server, RewardClient([server.url], ["r"], options=options) as client:
        assert values(client.score(items(1))["r"]) == [0.0]
        assert server.asked[0].manifest["deadline_ms"] == 24 * 3600 * 1000


def test_a_reply_with_two_values_for_one_score_is_not_of_the_protocol() -> None:
    scores = '{"ocr": {"value": 0.1}, "ocr": {"value": 0.9}}'
    body = f'{{"items": [{{"id": 0, "scores": {scores}}}], "scorers": {{"ocr": {{"revision": "1"}}}}}}'
    with pytest.raises(BrokenMessage, match="given twice"):
        parse_reply(body.encode())
    assert parse_reply(body.replace("0.9", "0.1").encode()).items[0].scores["ocr"].value == 0.1


# --- golden images ---


def test_servers_are_compared_beside_one_that_cannot_score_and_it_is_named() -> None:
    lost = [Failure("overloaded", "full")] * 2
    unknown = "whether all servers hold the same model is not known"
    problems = disagreements({"one": {"r": lost}, "two": {"r": [Score(0.1)] * 2}, "three": {"r": [Score(0.9)] * 2}})
    assert problems == [
        f"r: one cannot score the golden images (overloaded: full): {unknown}",
        "r: two and three differ by 0.8 on the same images; check that they hold the same model",
    ]
    assert disagreements({"one": {"r": [Score(1.0), *lost[:1]]}, "two": {"r": [Score(1.0)] * 2}}) == []


def test_the_golden_images_have_what_the_scorers_ask_for() -> None:
    for golden in golden_items():
        assert read_clauses(golden.metadata)[0] and golden.metadata["edit_type"] in TYPES
        assert other_prompts(golden.metadata, golden.prompt) and golden.metadata["source_text"]
        everything = ScorerSpec("any", (0, 1), frozenset({"mask", "source", "reference"}), "1", "")
        assert missing_needs(everything, golden) is None


# --- judges ---


@pytest.fixture
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


@pytest.mark.parametrize("logprob", [0.0, 0.9, float("nan")])
def test_log_probabilities_that_are_none_are_no_score(logprob: float) -> None:
    """Some endpoints write 0 for every token, of which the mean is a plausible score."""
    top = [{"token": str(digit), "logprob": logprob} for digit in range(6)]
    with pytest.raises(ValueError, match="sum to"):
        expectation(top, {str(digit): digit / 5 for digit in range(6)})
    assert expectation([{"token": "5", "logprob": 1e-3}], {"5": 1.0})[0] == 1.0  # rounded


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (read_editscore, '{"score": [1, 2], "reasoning": "", "score": [25, 25]}'),
        (lambda text: read_viescore(text, 2), '{"score": [1, 2], "reasoning": "", "score": [10, 10]}'),
        (read_transcript, '{"recognized_text": "MOON", "recognized_text": "SUN"}'),
        (read_textedit, '{"score": {"Q1": 1, "Q2": 1, "Q3": 1, "Q4": 1, "Q5": 1, "Q1": 5}}'),
    ],
)  # fmt: skip
def test_an_answer_with_two_verdicts_is_none(read: Callable[[str], Any], text: str) -> None:
    with pytest.raises(ValueError, match="given twice"):
        read(text)


def test_a_repeated_form_is_no_answer() -> None:
    for line in ("wall: yes/no", "wall: [yes/no]", "wall: yes or no", "wall: [yes] / [no]", "wall: no|yes"):
        with pytest.raises(ValueError, match="no line answers"):
            read_checklist(line, ["wall"])
    assert read_checklist("wall: yes/no\nwall: [no]\nword: yes, or nearly", ["wall", "word"]) == [False, True]
    for names in (["-OH", "OH"], ["[Fe]", "Fe2"], ["1. Step", "2. Step"], ["p*", "p"]):  # with the marks of a list
        for form in ("{}: {}", "- {}: {}", "* **{}**: {}"):
            reply = "\n".join(form.format(name, answer) for name, answer in zip(names, ("yes", "no"), strict=True))
            assert read_checklist(reply, names) == [True, False], reply


def test_a_name_that_contains_an_answer_is_whole() -> None:
    lines = "Step 1: yes\n* Step 1: no air: no [Step 1: yes, of course]"
    assert read_checklist(lines, ["Step 1", "Step 1: no air"]) == [True, False]


def test_the_only_prompt_is_not_found_among_none() -> None:
    found = other_prompts({"other_prompts": ["a cat", "a cat"]}, "a cat")
    assert isinstance(found, Failure) and "no text but the prompt itself" in found.message
    assert other_prompts({"other_prompts": ["a cat", "a dog"]}, "a cat") == ["a dog"]


@pytest.mark.usefixtures("_key")
@pytest.mark.parametrize("limit", [{"budget_tokens": 100}, {"budget_dollars": 1.0, "price_in": 2.0}])
def test_a_budget_of_tokens_needs_an_endpoint_that_reports_them(
    limit: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with OpenAIServer() as server:
        complete = server.complete
        monkeypatch.setattr(server, "complete", lambda asked: {**complete(asked), "usage": None})
        scorer = make_scorer("openai_judge", {"model": "judge", "address": server.url, **limit})
        with pytest.raises(ConfigError, match=rf"{next(iter(limit))}: given .* reports no tokens .*budget_requests"):
            scorer.load("cpu")
        make_scorer("openai_judge", {"model": "judge", "address": server.url, "budget_requests": 5}).load("cpu")


@pytest.mark.usefixtures("_key")
def test_an_error_about_one_item_has_no_other_question_asked_and_paid_again() -> None:
    with OpenAIServer() as server:
        scorer: Any = make_scorer("openai_judge", {"model": "judge", "address": server.url})
        answer = scorer._one

        def broken(item: Any) -> Any:
            assert item.id != 5, "of the scorer"
            return answer(item)

        scorer._one = broken
        outcomes = score_checked(scorer, items(8))
        assert [o.code for o in outcomes if isinstance(o, Failure)] == ["scorer_error"]
        assert isinstance(outcomes[5], Failure) and "AssertionError: of the scorer" in outcomes[5].message
        assert len(server.asked) == 7


def test_every_paid_judge_without_a_limit_is_told() -> None:
    entry = TextEditJudgeReward(model="auto", address="https://api.openai.com/v1", crop="mask_box")
    assert [line.partition(":")[0] for line in entry.advice("x")] == ["rewards.x.address", "rewards.x.crop"]


# --- gradients ---


def test_a_value_that_does_not_depend_on_the_pixels_has_no_gradient() -> None:
    """Parameters that require a gradient give it one, and the pixels would get 0 as if they were at an optimum."""
    parameter = torch.nn.Parameter(torch.ones(()))

    class ReadsTheItem:
        spec = ScorerSpec("reads", (0.0, 1.0), frozenset(), "1", "")

        def load(self, device: str) -> None: ...

        def score(self, items: Any) -> Any: ...

        def values(self, images: torch.Tensor, items: Any) -> list[Any]:
            return [parameter * float(np.mean(one.image) / 255) for one in items]

    found = PixelReward("reads", 1.0, ReadsTheItem(), View(), "cpu").gradient(torch.rand(3, 6, 5), item())
    assert found == Failure("scorer_error", "reads returned a value that does not depend on the pixels")
