"""Reward functions of TRL's GRPOTrainer, `reward_fn(completions, **kwargs)`, as the scorer of a run of vlm_grpo."""

from __future__ import annotations

from retouch.rewards.scorers import make_scorer
from tests.rewards.fakes import item, picture, score_checked, values


def scorer(name: str):
    made = make_scorer("fn", {"fn": f"tests.rewards.user_scorers:{name}"})
    made.load("cpu")
    return made


def test_a_function_of_completions_gets_texts_and_columns() -> None:
    told = [
        {"completion": "make it red", "level": 1},
        {"completion": "red", "level": 2},
        {"completion": "", "level": 3},
    ]
    items = [item(i, metadata=metadata, source=picture(9)) for i, metadata in enumerate(told)]
    assert values(score_checked(scorer("short"), items)) == [1 / 3, 1.0, "scorer_error"]


def test_a_function_without_further_keywords_gets_its_parameters() -> None:
    items = [
        item(i, prompt=prompt, metadata={"completion": "red", "level": 1}) for i, prompt in enumerate(("a red", "b"))
    ]
    assert values(score_checked(scorer("of_prompts"), items)) == [1.0, 0.0]


def test_without_a_completion_no_value_is_made_up() -> None:
    """The others keep theirs."""
    batch = [
        item(i, metadata={"completion": text, "level": 1} if text else {})
        for i, text in enumerate(["", "red", "", "a b", ""])
    ]
    assert values(score_checked(scorer("short"), batch)) == ["bad_item", 1.0, "bad_item", 0.5, "bad_item"]
    assert values(score_checked(scorer("short"), batch[:1])) == ["bad_item"]
