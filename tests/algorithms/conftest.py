from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from retouch.families import loading
from retouch.model_files import tiny_path
from retouch.rewards.scorers import preservation
from retouch.training import experience

from .runs import Rule, Scripted, Use


@cache
def _read(kind: Any, path: str, subfolder: str, dtype: Any) -> Any:
    return loading.load_component(kind, path, subfolder, dtype)


def _component(kind: Any, path: str, subfolder: str, dtype: Any) -> Any:
    """`load_component`, which reads the tiny bases of the package once; each call returns a copy of its own."""
    if Path(path).parent != tiny_path("flux_fill").parent:
        return loading.load_component(kind, path, subfolder, dtype)
    return copy.deepcopy(_read(kind, path, subfolder, dtype))


@pytest.fixture(autouse=True)
def _bases_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a base takes a tenth of a small run."""
    for module in ("diffusion", "text", "qwen_image.model", "qwen_image_edit.model"):
        monkeypatch.setattr(f"retouch.families.{module}.load_component", _component)


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
    real = experience.sample

    def watch(model: Any, network: Any, *rest: Any, **options: Any) -> Any:
        sums.append(sum(float(p.double().sum()) for p in network.parameters()))
        return real(model, network, *rest, **options)

    monkeypatch.setattr(experience, "sample", watch)
    return sums
