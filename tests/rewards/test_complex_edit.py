"""The judge of edits against a server that measures what it is shown: scores, weights, samples, and what fails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retouch.config import ConfigError
from retouch.rewards.protocol import RewardItem
from retouch.rewards.scorers import judge_client as judge
from retouch.rewards.scorers import make_scorer
from retouch.rewards.scorers.judged import read_integers
from retouch.types import Failure, Outcome, Score
from tests.rewards.fakes import item, score_checked, values
from tests.rewards.openai_server import KEY, OpenAIServer, fields_of, pictures, text_of


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    judge._BUCKETS.clear()
    yield


def flat(*colour: int) -> np.ndarray[Any, Any]:
    return np.broadcast_to(np.array(colour, np.uint8), (8, 8, 3)).copy()


def edit(number: int = 0, output: tuple[int, ...] = (204, 204, 51)) -> RewardItem:
    """By the rules of the server: instruction following 6, identity preservation 7, perceptual quality 2."""
    return item(number, prompt=f"edit number {number}.", image=flat(*output), source=flat(102, 102, 26))


def made(server: OpenAIServer, **options: Any) -> Any:
    scorer = make_scorer("complex_edit", {"model": "judge", "address": server.url, "samples": 1, **options})
    scorer.load("cpu")
    server.asked.clear()
    return scorer


def detail(outcome: Outcome) -> dict[str, float]:
    assert isinstance(outcome, Score), outcome
    return dict(outcome.detail)


# --- scores ---


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ({}, 0.6 * (0.6 + 0.7) / 2 + 0.4 * 0.2),
        ({"preset": "brief"}, 0.6 * 0.6 + 0.4 * 0.2),
        ({"alignment_weight": 0.25, "quality_weight": 0.75}, 0.25 * 0.65 + 0.75 * 0.2),
        ({"alignment_weight": 1.0, "quality_weight": 0.0, "preset": "brief"}, 0.6),
    ],
    ids=["default", "brief", "weights", "alignment alone"],
)
def test_three_parts_make_the_score(options: dict[str, Any], value: float) -> None:
    with OpenAIServer() as server:
        (outcome,) = score_checked(made(server, **options), [edit()])
    assert values([outcome]) == [pytest.approx(value)]
    parts = {"instruction_following": 0.6, "identity_preservation": 0.7, "perceptual_quality": 0.2}
    assert detail(outcome) == pytest.approx(parts)


def test_input_and_output_for_alignment_and_the_output_alone_for_quality() -> None:
    with OpenAIServer() as server:
        score_checked(made(server), [edit(3)])
        alignment, quality = server.asked
    assert [p[0, 0].tolist() for p in pictures(alignment)] == [[102, 102, 26], [204, 204, 51]]
    assert [p[0, 0].tolist() for p in pictures(quality)] == [[204, 204, 51]]
    assert "The instruction: edit number 3." in text_of(alignment) and "edit number 3" not in text_of(quality)
    assert list(fields_of(alignment)) == ["reasoning", "instruction_following", "identity_preservation"]
    assert list(fields_of(quality)) == ["reasoning", "perceptual_quality"]


def test_samples_are_averaged_and_have_seeds_of_their_own() -> None:
    """The server adds 0, 1 and 3 by the seed."""
    with OpenAIServer(by_seed={1: 1, 2: 3}) as server:
        (outcome,) = score_checked(made(server, samples=3, temperature=0.9), [edit()])
        assert sorted({asked["seed"] for asked in server.asked}) == [0, 1, 2] and len(server.asked) == 6
        assert {asked["temperature"] for asked in server.asked} == {0.9}
    parts = [(6 + 7 + 9) / 30, (7 + 8 + 10) / 30, (2 + 3 + 5) / 30]
    assert list(detail(outcome).values()) == pytest.approx(parts)
    assert values([outcome]) == [pytest.approx(0.6 * (parts[0] + parts[1]) / 2 + 0.4 * parts[2])]


# --- what fails ---


@pytest.mark.parametrize(
    "spoil",
    [
        lambda found: "It is a fine picture.",
        lambda found: json.dumps({**found, "extra": 1}),
        lambda found: json.dumps({k: v for k, v in found.items() if k == "reasoning"}),
        lambda found: json.dumps(dict.fromkeys(found, 11)),
        lambda found: json.dumps(dict.fromkeys(found, 7.5)),
        lambda found: json.dumps(dict.fromkeys(found)),
        lambda found: "[8, 8]",
    ],
    ids=["words", "another key", "a missing key", "out of range", "no integer", "null", "a list"],
)
def test_an_answer_off_the_schema_is_a_failure_after_one_more_question(spoil: Any) -> None:
    with OpenAIServer() as server:
        scorer = made(server)
        server.spoil = spoil
        (failure,) = score_checked(scorer, [edit()])
        assert len(server.asked) == 2 and "cannot be used" in server.asked[1]["messages"][-1]["content"]
    assert isinstance(failure, Failure) and failure.code == "scorer_error" and "twice" in failure.message


def test_an_answer_that_is_mended_counts() -> None:
    with OpenAIServer() as server:
        scorer = made(server)
        server.bad_first = 1
        assert values(score_checked(scorer, [edit()])) == [pytest.approx(0.47)]


def test_a_refusal_is_a_failure_and_is_not_asked_again() -> None:
    with OpenAIServer(refuses=lambda asked: "perceptual_quality" in fields_of(asked)) as server:
        scorer = make_scorer("complex_edit", {"model": "judge", "address": server.url, "samples": 1})
        (failure,) = score_checked(scorer, [edit()])
        assert len(server.asked) == 2
    assert isinstance(failure, Failure) and failure.code == "scorer_error" and "refused" in failure.message


def test_no_answer_in_time_is_a_retryable_failure() -> None:
    with OpenAIServer() as server:
        scorer = made(server, timeout_s=60.0)
        server.breaks = lambda asked: 503
        (failure,) = score_checked(scorer, [edit()])
    assert isinstance(failure, Failure) and (failure.code, failure.retryable) == ("unavailable", True)


def test_one_failed_sample_fails_its_item() -> None:
    """The mean of the others would be another reward than that of the row beside it."""
    with OpenAIServer() as server:
        scorer = made(server, samples=3)
        server.refuses = lambda asked: asked["seed"] == 1 and "number 4" in text_of(asked)
        outcomes = score_checked(scorer, [edit(3), edit(4), edit(5)])
    assert values(outcomes) == [pytest.approx(0.47), "scorer_error", pytest.approx(0.47)]


def test_a_judge_that_fails_on_some_rows_fails_just_these() -> None:
    """Three of ten rows, in three ways; the others score as if nothing had happened."""
    rows = [edit(i, output=(28 * i, 28 * i, 28 * i)) for i in range(10)]
    with OpenAIServer() as server:
        scorer = made(server)
        healthy = score_checked(scorer, rows)
        server.refuses = lambda asked: "number 2." in text_of(asked)
        server.breaks = lambda asked: next((s for n, s in ((5, 400), (9, 503)) if f"number {n}." in text_of(asked)), 0)
        outcomes = score_checked(scorer, rows)
    assert len(set(values(healthy))) == 10 and all(isinstance(one, Score) for one in healthy)
    failed = {2: "scorer_error", 5: "scorer_error", 9: "unavailable"}
    assert values(outcomes) == [failed.get(i, value) for i, value in enumerate(values(healthy))]


def test_an_item_without_a_source_fails_alone() -> None:
    with OpenAIServer() as server:
        outcomes = score_checked(made(server), [item(0), edit()])
    assert values(outcomes) == ["bad_item", pytest.approx(0.47)]


# --- options ---


def test_what_the_endpoint_cannot_do_is_found_at_the_start() -> None:
    with OpenAIServer(has_schema=False) as server, pytest.raises(ConfigError, match="does not keep to the schema"):
        made(server)


def test_everything_that_changes_a_score_is_in_the_revision() -> None:
    changes: list[dict[str, Any]] = [
        {}, {"preset": "brief"}, {"samples": 2}, {"temperature": 0.1}, {"alignment_weight": 0.5, "quality_weight": 0.5}
    ]  # fmt: skip
    with OpenAIServer() as server:
        revisions = {made(server, **change).spec.revision for change in changes}
    assert len(revisions) == len(changes) and all("judge-2026-01 fp_1" in one for one in revisions)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "reward 'complex_edit': model: not set"),
        (
            {"model": "m", "quality_weight": 0.5},
            "alignment_weight: given 0.6 beside quality_weight 0.5; their sum must be 1",
        ),
    ],
)
def test_options_that_cannot_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_scorer("complex_edit", options)


@pytest.mark.parametrize("value", ["true", "3.5", "-1", "11", '"3.5"', "null"])
def test_only_integers_in_range_are_scores(value: str) -> None:
    with pytest.raises(ValueError, match="a must be an integer from 0 to 10"):
        read_integers(f'{{"a": {value}}}', ["a"], 10)
    assert read_integers('{"a": 10, "b": ""}', ["a"], 10, also=["b"]) == {"a": 10, "b": ""}


# --- the published wording ---


def write_published(folder: Path) -> Path:
    """Stands for the published files, which are not ours to copy."""
    alignment = (
        'ALIGNMENT_PROMPT_W_RUBRIC = """Rate \\\nthe edit."""\nPROMPT_TEMPLATE = "Do: {instruction}"\nOTHER = 1\n'
    )
    (folder / "prompt_alignment.py").write_text(alignment, encoding="utf-8")
    quality = 'import nothing_that_exists\nPERCEPTUAL_QUALITY_PROMPT_W_RUBRIC_WO_INST = "Rate the image."\n'
    (folder / "prompt_quality.py").write_text(quality, encoding="utf-8")
    return folder


def as_text(fields: dict[str, Any]) -> str:
    return json.dumps({name: str(value) for name, value in fields.items()})


def test_the_published_wording_is_the_users_copy(tmp_path: Path) -> None:
    with OpenAIServer(spoil=as_text) as server:
        scorer = made(server, wording="published", prompts=str(write_published(tmp_path)), temperature=1.0)
        (outcome,) = score_checked(scorer, [edit(3)])
        alignment, quality = server.asked
    assert detail(outcome) == {"instruction_following": 0.6, "identity_preservation": 0.7, "perceptual_quality": 0.2}
    assert [one["messages"][0]["content"] for one in (alignment, quality)] == [
        "Rate the edit.\nExplain your reasoning before answering the questions.",
        "Rate the image.",
    ]
    assert [part["type"] for part in alignment["messages"][1]["content"]] == ["image_url", "image_url", "text"]
    assert text_of(alignment) == "Do: edit number 3." and text_of(quality) == ""
    assert [len(pictures(one)) for one in (alignment, quality)] == [2, 1]
    assert list(fields_of(alignment)) == ["reasoning", "instruction_following", "identity_preservation"]
    assert list(fields_of(quality)) == ["perceptual_quality"]
    assert (alignment["temperature"], alignment["max_tokens"]) == (1, 512)
    own = make_scorer("complex_edit", {"model": "judge", "address": server.url})
    assert own.spec.revision != scorer.spec.revision


def test_published_texts_that_are_missing(tmp_path: Path) -> None:
    asked = {"model": "judge", "wording": "published", "address": "http://127.0.0.1:9/v1"}
    with pytest.raises(ConfigError, match="prompts: not set with wording=published"):
        make_scorer("complex_edit", asked)
    with pytest.raises(ConfigError, match=r"prompts: given '.*', but wording is own"):
        make_scorer("complex_edit", {**asked, "wording": "own", "prompts": "x"})
    with pytest.raises(ConfigError, match=r"whose prompt_alignment.py cannot be read"):
        make_scorer("complex_edit", {**asked, "prompts": str(tmp_path)})
    write_published(tmp_path)
    (tmp_path / "prompt_quality.py").write_text("A = 1", encoding="utf-8")
    with pytest.raises(ConfigError, match="has no text PERCEPTUAL_QUALITY_PROMPT_W_RUBRIC_WO_INST"):
        make_scorer("complex_edit", {**asked, "prompts": str(tmp_path)})
    write_published(tmp_path)
    (tmp_path / "prompt_alignment.py").write_text('ALIGNMENT_PROMPT_W_RUBRIC = PROMPT_TEMPLATE = "Do: {}"')
    with pytest.raises(ConfigError, match=r"whose PROMPT_TEMPLATE does not contain \{instruction\}"):
        make_scorer("complex_edit", {**asked, "prompts": str(tmp_path)})
