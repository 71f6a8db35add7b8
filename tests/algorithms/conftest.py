from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from retouch.rewards.scorers import preservation
from retouch.training import rollouts

from .runs import Rule, Scripted, Use


@pytest.fixture
def run_file(run_file: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Evaluations take one step: an eighth of a small run."""
    return lambda **overrides: run_file(**{"evaluation__num_steps": 1, **overrides})


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Replace the preservation reward by a rule."""

    def use(rule: Rule) -> None:
        monkeypatch.setattr(preservation, "PreservationScorer", lambda _: Scripted(rule))

    return use


@pytest.fixture
def sampled_with(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """For every batch that was sampled for rewards, a sum over the weights that sampled it."""
    sums: list[float] = []
    real = rollouts.sample

    def watch(model: Any, network: Any, *rest: Any, **options: Any) -> Any:
        sums.append(sum(float(p.double().sum()) for p in network.parameters()))
        return real(model, network, *rest, **options)

    monkeypatch.setattr(rollouts, "sample", watch)
    return sums
