"""Rewards of the text of a completion."""

from __future__ import annotations

import pytest

from retouch.rewards.scorers.completion import answer_of, score_completion, think_format

GOOD = "A red lighthouse stands on dark rocks at the left, while gulls circle above a calm grey sea."


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>the sky is grey</think>Paint it blue.", 1.0),
        ("\n<think>\na\n</think>\n\nb\n", 1.0),
        ("Paint it blue.", 0.0),
        ("<think>the sky is grey Paint it blue.", 0.0),
        ("the sky is grey</think>Paint it blue.", 0.0),
        ("<think></think>Paint it blue.", 0.0),
        ("<think> \n</think>Paint it blue.", 0.0),
        ("<think>the sky is grey</think> ", 0.0),
        ("First: <think>a</think>b", 0.0),
        ("<think>a</think>b<think>c</think>d", 0.0),
        ("<think>a<think>b</think>c", 0.0),
        ("<think>a</think></think>b", 0.0),
        ("", 0.0),
    ],
)
def test_think_format(text: str, value: float) -> None:
    assert think_format(text) == value


def test_the_answer_follows_the_thought() -> None:
    assert answer_of(f"<think>red?</think>\n{GOOD} ") == GOOD == answer_of(GOOD)


def test_a_good_answer_is_1_whatever_was_thought() -> None:
    assert score_completion(GOOD).value == 1.0
    assert score_completion(f"<think>{'hm ' * 500}I cannot say.</think>{GOOD}").value == 1.0


@pytest.mark.parametrize(
    ("words", "value"),
    [(0, 0.0), (1, 1 / 8), (4, 0.5), (8, 1.0), (300, 1.0), (600, 0.5), (3000, 0.1)],
)
def test_length_falls_off_in_proportion(words: int, value: float) -> None:
    assert score_completion(" ".join(f"word{i}" for i in range(words))).value == pytest.approx(value)


def test_repetition_counts_different_runs_of_four_words() -> None:
    assert score_completion("red " * 40).value == pytest.approx(1 / 37)
    once = "a red house beside the old stone bridge"
    assert score_completion(f"{once}. {once.upper()}!").distinctness == pytest.approx(8 / 13)


@pytest.mark.parametrize(
    "text",
    [
        "I'm sorry, but I cannot help with editing this picture of a person today.",
        "Sorry, this is not something that I am able to describe for you here.",
        "Unfortunately, I can't see the picture that you are talking about at all.",
        "As an AI model, I have no way of painting the sky in another colour.",
        "<think>Let me see.</think>I cannot assist with that request, please ask for something else.",
        "A red lighthouse on dark rocks at the left<|im_end|> and gulls above the sea.",
    ],
)
def test_refusals_and_tokens_of_the_template_are_0(text: str) -> None:
    assert score_completion(text).value == 0.0


def test_a_refusal_is_how_a_text_begins_not_what_is_in_it() -> None:
    assert score_completion(f"{GOOD} A sign says: sorry, I cannot open.").value == 1.0
    assert score_completion("I can see a red lighthouse on dark rocks at the left.").value == 1.0


def test_an_unfinished_text_counts_half() -> None:
    assert score_completion(GOOD, finished=False).value == 0.5
    assert score_completion(GOOD, finished=False).finished is False


def test_scripts_without_spaces_have_words_too() -> None:
    assert score_completion("红色的汽车停在绿色的田野中间天空是蓝色的").value == 1.0
    assert score_completion("红" * 200).value < 0.05


def test_bounds_that_are_none() -> None:
    assert score_completion("red car here", min_words=3, max_words=3).value == 1.0
    with pytest.raises(ValueError, match="given min_words 5 and max_words 4"):
        score_completion(GOOD, min_words=5, max_words=4)
