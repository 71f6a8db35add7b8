"""Answers of a trained text encoder in evaluations and in use: how they are drawn, scored and counted."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("trl")

from retouch.recipes.vlm_grpo import VlmTrainer
from retouch.types import Failure
from retouch.vlm import judge as vlm_judge
from retouch.vlm.generation import generation_options
from retouch.vlm.judge import Judge
from retouch.vlm.use import answer

from . import vlm_runs
from .test_vlm_grpo import parts_of
from .vlm_runs import vlm_file

__all__ = ["parts_of", "vlm_file"]


def reward(name: str, module: str = __name__, **options: Any) -> dict[str, Any]:
    return {"scorer": "fn", "fn": f"{module}:{name}", "paste_back": False, **options}


def fail_the_second(items: list[Any]) -> list[Any]:
    """`letters`, but no score of example 1."""
    broken = Failure("bad_item", "cannot be scored", retryable=False)
    return [broken if item.group == 1 else v for item, v in zip(items, vlm_runs.letters(items), strict=True)]


def test_a_failed_reward_is_reported_and_ends_no_comparison(parts_of: Any) -> None:
    parts, _ = parts_of(rewards={"letters": reward("fail_the_second")})
    judged = answer(parts, [parts.data[0], parts.data[1]], 0, "eval", 0, score=True)
    assert judged.rewards[0] is not None and judged.rewards[1] is None


def test_gold_rewards_are_of_evaluations_alone(parts_of: Any) -> None:
    module = vlm_runs.__name__
    both = {"letters": reward("letters", module), "gold": reward("letters", module, role="gold")}
    parts, _ = parts_of(rewards=both)
    judged = answer(parts, [parts.data[0]], 0, "eval", 0, score=True)
    assert judged.scores.outcomes["gold"] == judged.scores.outcomes["letters"]
    assert judged.scores.combined() == [judged.scores.values("letters")[0]]  # it adds nothing to the sum


def test_evaluations_have_steps_of_their_own(parts_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    real = vlm_judge.draw

    def watch(painter: Any, drawings: Any, steps: int, *rest: Any) -> Any:
        taken.append(steps)
        return real(painter, drawings, steps, *rest)

    monkeypatch.setattr(vlm_judge, "draw", watch)
    for given, expected in ((2, 2), (None, 1)):
        parts, _ = parts_of(name=f"steps-{given}", evaluation__num_steps=given)
        answer(parts, [parts.data[0]], 0, "eval", 0, score=True)
        assert taken.pop() == expected
        answer(parts, [parts.data[0]], 0, "sample", 0, score=False)
        assert taken.pop() == 1


@pytest.mark.parametrize(
    "trl",
    [
        {},
        {
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 5,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "generation_kwargs": {"no_repeat_ngram_size": 2},
        },
    ],
)
def test_answers_are_drawn_as_the_trainer_draws_completions(parts_of: Any, trl: dict[str, Any]) -> None:
    parts, arguments = parts_of(trl)
    parts.policy.generation_config.eos_token_id = [5, parts.tokenizer.eos_token_id]
    trainer = VlmTrainer(parts, arguments)
    assert generation_options(parts) == trainer.generation_kwargs
    assert Judge(parts).ends == {*trainer.eos_token_ids, parts.tokenizer.pad_token_id}


def test_answers_do_not_follow_the_sampling_that_the_model_recommends(parts_of: Any) -> None:
    parts, _ = parts_of()
    examples = [parts.data[0], parts.data[1]]
    free = answer(parts, examples, 0, "eval", 0, score=False).texts
    parts.policy.generation_config.update(temperature=0.01, top_p=0.01, top_k=1, repetition_penalty=5.0)
    assert answer(parts, examples, 0, "eval", 0, score=False).texts == free
