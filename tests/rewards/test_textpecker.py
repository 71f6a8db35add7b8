"""TextPecker: the published arithmetic on recorded replies, what is different on purpose, and the scorer itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retouch.config import ConfigError
from retouch.rewards.scorers import judge_client, make_scorer
from retouch.rewards.scorers.textpecker import (
    quality,
    read_transcript,
    semantic,
    units,
    words,
)
from retouch.types import Failure, Score
from tests.rewards.fakes import item
from tests.rewards.openai_server import KEY, OpenAIServer, text_of

RECORDED: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "benchmarks_data" / "textpecker.json").read_text(encoding="utf-8")
)
"""Replies, and what the published functions make of them."""


@pytest.mark.parametrize("row", RECORDED["equal"], ids=lambda row: row["target"])
def test_the_published_functions_give_the_same(row: dict[str, Any]) -> None:
    transcript, target = read_transcript(row["reply"]), row["target"]
    for amplification in (1, 5):
        assert quality(transcript, target, amplification) == pytest.approx(row[f"quality_{amplification}"], abs=1e-9)
    assert semantic(transcript, target) == pytest.approx(row["semantic"], abs=1e-9)


OURS = {
    "夏日sale": (1.0, 2 / 3),  # the Latin part is missing; published 1
    "it's Joe's": (1.0, 1.0),
    "hello, world": (1.0, 1.0),
    "No #1": (1.0, 1.0),
    "OPEN": None,  # no JSON, or another key; published 0, 0
}
"""Target -> quality and semantic score, by hand; None is a failure."""


@pytest.mark.parametrize("row", RECORDED["apart"], ids=lambda row: row["reply"][:24])
def test_where_the_published_parser_fails(row: dict[str, Any]) -> None:
    published = (row["quality_5"], row["semantic"])
    if (expected := OURS[row["target"]]) is None:
        assert published == (0.0, 0.0)
        with pytest.raises(ValueError, match=r"JSON|recognized_text"):
            read_transcript(row["reply"])
        return
    transcript = read_transcript(row["reply"])
    ours = (quality(transcript, row["target"], 5), semantic(transcript, row["target"]))
    assert ours == pytest.approx(expected) and ours != pytest.approx(published)


def test_marks_by_hand() -> None:
    assert quality("S<#>OP", "SHOP", 1) == pytest.approx(5 / 6)
    assert quality("<###>", "OPEN", 1) == pytest.approx(0.4)
    assert quality("No #1 <#>", "No #1", 1) == pytest.approx(1 - 1 / 7)  # of the two "#" one is of the target
    assert semantic("No #1", "No #1") == 1 and semantic("No <#>1", "No #1") == pytest.approx(0.75)


def test_units_keep_every_character_in_order() -> None:
    assert units("Sale夏日NOW!") == ["sale", "夏", "日", "now!"]
    assert words("\"Joe's\", 'Big Sale' “Now”") == ["Joe's", "Big", "Sale", "Now"]


@pytest.fixture
def transcripts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A server that replies with what the test sets, by the brightness of the image."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    judge_client._BUCKETS.clear()
    replies = {0: '{"recognized_text": "S<#>OP"}', 127: '{"recognized_text": ""}', 255: "I cannot read this."}
    replies[64] = '{"recognized_text": ["ラーメン", "カレー"]}'

    class Server(OpenAIServer):
        def complete(self, asked: dict[str, Any]) -> dict[str, Any]:
            from tests.rewards.openai_server import pictures

            reply = super().complete(asked)
            reply["choices"][0]["message"]["content"] = replies[int(pictures(asked)[-1].mean())]
            return reply

    with Server() as server:
        yield server


def grey(level: int, text: str = "SHOP") -> Any:
    return item(level, image=np.full((8, 8, 3), level, np.uint8), metadata={"text": text})


def test_scores_details_and_failures(transcripts: OpenAIServer) -> None:
    scorer: Any = make_scorer("textpecker", {"model": "judge", "address": transcripts.url, "semantic_weight": 0.8})
    scorer.load("cpu")
    found, empty, bad = scorer.score([grey(0), grey(127), grey(255)])
    assert isinstance(found, Score) and isinstance(empty, Score) and isinstance(bad, Failure)
    assert found.value == pytest.approx(0.2 / 6 + 0.8 * 0.75)  # quality 1 - 5 / 6
    assert found.detail["text"] == "S<#>OP" and found.detail["marks"] == 1
    assert empty.value == 0  # nothing was read: an observation, no failure
    assert bad.code == "scorer_error" and "no JSON object" in bad.message
    [without] = scorer.score([item(0, image=np.zeros((8, 8, 3), np.uint8), prompt="a sign", metadata={})])
    assert isinstance(without, Failure) and without.code == "bad_item"
    prompt = "a sign with 'SOP' above 'DAILY'"
    [two] = scorer.score([item(0, image=np.zeros((8, 8, 3), np.uint8), prompt=prompt, metadata={})])
    assert two.detail["semantic"] == pytest.approx(0.75 / 2)  # of two texts, one is read: S#OP
    menu = {"lines": ["ラーメン", "カレー"]}
    [kana] = scorer.score([item(64, image=np.full((8, 8, 3), 64, np.uint8), metadata=menu)])
    assert kana.value == 1.0  # lines are units of their own where words have no spaces, too
    asked = transcripts.asked[-1]
    assert asked["temperature"] == 0 and asked["max_tokens"] == 2048 and asked["repetition_penalty"] == 1.2
    assert "recognized_text" in text_of(asked)


def test_options_change_the_request_and_the_revision(transcripts: OpenAIServer) -> None:
    options = {"model": "judge", "address": transcripts.url}
    plain: Any = make_scorer("textpecker", {**options, "repetition_penalty": 1.0})
    plain.score([grey(0)])
    assert "repetition_penalty" not in transcripts.asked[-1]
    evaluation: Any = make_scorer("textpecker", {**options, "amplification": 1.0})
    assert evaluation.spec.revision != plain.spec.revision
    [outcome] = evaluation.score([grey(0)])
    assert isinstance(outcome, Score) and outcome.detail["quality"] == pytest.approx(5 / 6)
    with pytest.raises(ConfigError, match="amplification"):
        make_scorer("textpecker", {**options, "amplification": 0.0})
