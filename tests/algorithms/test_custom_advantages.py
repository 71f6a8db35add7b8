"""`algorithm.advantages`: a function of the user in place of the package's advantages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from retouch.algorithms.grpo.config import GrpoConfig
from retouch.config import ConfigError
from retouch.core.advantages import RewardRows
from retouch.training.experience import advantages_of

from .runs import Config, Use, brightness, same_weights, train, weights

pytestmark = pytest.mark.usefixtures("bare", "shallow")

HERE = "tests.algorithms.test_custom_advantages"


def ranked(rewards: RewardRows, algorithm: GrpoConfig) -> Tensor:
    """The place of each sample by its reward, from 0; NaN where it failed."""
    del algorithm
    return torch.where(rewards.usable, rewards.combined.argsort().argsort().double(), torch.nan)


def as_the_package(rewards: RewardRows, algorithm: GrpoConfig) -> Tensor:
    return rewards.advantages(algorithm.combine, algorithm.baseline, algorithm.scale, algorithm.advantage_clip)


def divides(rewards: RewardRows, algorithm: GrpoConfig) -> Any:
    raise ZeroDivisionError("no rewards")


def a_list(rewards: RewardRows, algorithm: GrpoConfig) -> Any:
    return [0.0] * len(rewards.padding)


def too_few(rewards: RewardRows, algorithm: GrpoConfig) -> Any:
    return torch.zeros(2)


def infinite(rewards: RewardRows, algorithm: GrpoConfig) -> Any:
    return rewards.combined / 0


def rows_of(values: list[float], valid: list[bool]) -> RewardRows:
    """One reward of samples in groups of two."""
    n = len(values)
    column = torch.tensor(values, dtype=torch.float64)[:, None]
    group = torch.arange(n) // 2
    return RewardRows(
        ["r"], column, torch.tensor(valid)[:, None], torch.ones(1), group, torch.arange(n) % 2, torch.zeros(n).bool()
    )


def test_the_function_gives_the_advantages_and_the_package_what_counts() -> None:
    """Clipped at 2; the row whose reward failed leaves its group with one row, which does not count either."""
    rewards = rows_of([0.1, 0.9, 0.5, 0.3, 0.7, 0.2], [True, True, True, True, True, False])
    custom = GrpoConfig(advantages=f"{HERE}:ranked", advantage_clip=2.0)
    advantages, counts = advantages_of(custom, rewards)
    assert advantages.tolist() == [1.0, 2.0, 2.0, 2.0, 0.0, 0.0]
    assert counts.tolist() == advantages_of(GrpoConfig(), rewards)[1].tolist() == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("divides", r"which raised ZeroDivisionError: no rewards, at test_custom_advantages\.py:\d+; correct"),
        ("a_list", r"which returned list; expected a tensor \[4\] of a number for each sample"),
        ("too_few", r"which returned a tensor \[2\]; expected a tensor \[4\]"),
        ("infinite", "which returned NaN or Inf; expected"),
        ("absent", "has no function absent; set it to 'module:function'"),
    ],
)
def test_what_is_no_advantage_is_named(name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=f"^algorithm.advantages: given '{HERE}:{name}', .*{told}"):
        advantages_of(GrpoConfig(advantages=f"{HERE}:{name}"), rows_of([0.1, 0.9, 0.5, 0.3], [True] * 4))


@pytest.mark.parametrize("problem", ["", "algorithm.advantages: it failed there"])
def test_all_processes_take_the_result_of_the_first(problem: str) -> None:
    rewards, custom = rows_of([0.1, 0.9, 0.5, 0.3], [True] * 4), GrpoConfig(advantages=f"{HERE}:ranked")

    def gather(own: Any) -> list[Any]:
        return [([1.0, 2.0, 3.0, 4.0], problem), *own]

    if problem:
        with pytest.raises(ConfigError, match=problem):
            advantages_of(custom, rewards, gather)
    else:
        assert advantages_of(custom, rewards, gather)[0].tolist() == [1.0, 2.0, 3.0, 4.0]


def test_check_refuses_what_names_no_function(config: Config) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.advantages: given 'ranked'; expected a function; set it to"):
        config(algorithm__advantages="ranked")


def test_a_run_whose_function_is_that_of_the_package_is_the_same_run(config: Config, scripted: Use) -> None:
    scripted(brightness)
    plain, _ = train(config(name="plain", training__max_steps=1))
    custom, _ = train(config(name="custom", training__max_steps=1, algorithm__advantages=f"{HERE}:as_the_package"))
    assert same_weights(weights(plain), weights(custom))
