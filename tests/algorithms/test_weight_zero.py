"""A reward of weight 0 is logged and changes nothing: neither by its scores nor by its failures."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from retouch.config import RunConfig
from retouch.core.advantages import RewardRows
from retouch.rewards.scorers import ocr
from retouch.types import Failure, Outcome, Score
from tests.selection import cells

from .runs import Config, Use, brightness, of_kind, same_weights, train, weights

pytestmark = pytest.mark.usefixtures("bare", "shallow")


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], Outcome]], None]:
    """What the OCR reward returns for each item of a batch."""

    def use(rule: Callable[[int], Outcome]) -> None:
        monkeypatch.setattr(ocr.OcrScorer, "load", lambda self, device: None)
        monkeypatch.setattr(ocr.OcrScorer, "score", lambda self, items: [rule(i) for i, _ in enumerate(items)])

    return use


@pytest.mark.parametrize(
    ("name", "combine"), cells(product(["grpo", "dpo"], ["normalize_then_sum", "sum_then_normalize"]), 1)
)
def test_its_failures_leave_the_run_as_it_was(
    name: str, combine: str, config: Config, scripted: Use, logged: Callable[[Callable[[int], Outcome]], None]
) -> None:
    """Bit for bit, though it fails for three of four images and at most a fifth may fail."""
    scripted(brightness)

    def make(run: str) -> RunConfig:
        ode = {"rollout__window": None, "rollout__noise_level": None} if name == "dpo" else {}
        rewards = {"preservation": {}, "other": {"scorer": "preservation"}, "ocr": {"weight": 0.0}}
        algorithm = {"name": name, "combine": combine}
        return config(name=run, algorithm=algorithm, rewards=rewards, training__max_steps=2, **ode)

    logged(lambda i: Score(i / 4))
    sound, first = train(make("sound"))
    logged(lambda i: Failure("scorer_error", "no") if i else Score(0.5))
    failing, second = train(make("failing"))
    assert same_weights(weights(sound), weights(failing))
    assert all(r["skipped"] == 0.0 for r in of_kind(second, "train"))
    for a, b in zip(of_kind(first, "rollout"), of_kind(second, "rollout"), strict=True):
        assert (a.pop("reward/ocr"), b.pop("reward/ocr"), b.pop("failed/ocr")) == (0.375, 0.5, 3.0)
        assert a == b and a["failed"] == 0.0


def statistics(values: list[list[float]], groups: list[int], valid: list[bool] | None = None) -> dict[str, float]:
    """Of rewards with weights 1 and 0."""
    n = len(values)
    ok = torch.tensor(valid or [True] * n)
    rewards = torch.tensor(values, dtype=torch.float64)
    scored = ok[:, None] & ~rewards.isnan()
    index = torch.tensor([groups[:i].count(g) for i, g in enumerate(groups)])
    weights = torch.tensor([1.0, 0.0], dtype=torch.float64)
    table = RewardRows(["r", "logged"], rewards, scored, weights, torch.tensor(groups), index, torch.zeros(n).bool())
    return table.statistics("normalize_then_sum")


def test_what_is_logged_of_a_reward_that_always_fails() -> None:
    found = statistics([[1.0, math.nan], [3.0, math.nan]], [4, 4])
    assert found == {
        "images": 2.0,
        "failed": 0.0,
        "failed/logged": 2.0,
        "reward/r": 2.0,
        "combined_score": 2.0,
        "combined_std": 1.0,
        "zero_std_groups": 0.0,
    }


def test_groups_of_one_image_have_no_std() -> None:
    """PPO with an image a prompt; and of three groups two are compared, one of which is flat."""
    assert "zero_std_groups" not in statistics([[1.0, 0.0], [3.0, 0.0]], [4, 5])
    nan = math.nan
    found = statistics(
        [[1.0, 0.0], [1.0, 0.0], [2.0, 0.0], [nan, 0.0], [5.0, 0.0], [6.0, 0.0]],
        [1, 1, 2, 2, 3, 3],
        [True, True, True, False, True, True],
    )
    assert found["zero_std_groups"] == 0.5


def test_a_reward_of_weight_0_does_not_change_advantages() -> None:
    """One reward that counts is used as it is, with its weight, however many are only logged beside it."""
    values = torch.tensor([[1.0, 9.0], [3.0, 2.0], [4.0, 4.0]], dtype=torch.float64)
    valid, rest = torch.ones(3, 2).bool(), (torch.zeros(3).long(), torch.arange(3), torch.zeros(3).bool())
    both = RewardRows(["r", "logged"], values, valid, torch.tensor([0.5, 0.0], dtype=torch.float64), *rest)
    alone = RewardRows(["r"], values[:, :1], valid[:, :1], torch.tensor([0.5], dtype=torch.float64), *rest)
    for scale in ("group", "none"):
        options: Any = ("normalize_then_sum", "group", scale, 5.0)
        assert torch.equal(both.advantages(*options), alone.advantages(*options))


def test_padding_is_unusable_though_no_reward_has_a_weight() -> None:
    """A run that trains by the gradient of a reward alone."""
    values, rest = torch.zeros(3, 1, dtype=torch.float64), (torch.zeros(3).long(), torch.arange(3))
    weights, padding = torch.zeros(1, dtype=torch.float64), torch.tensor([False, False, True])
    rows = RewardRows(["gradient"], values, torch.zeros(3, 1).bool(), weights, *rest, padding)
    assert rows.usable.tolist() == [True, True, False]
