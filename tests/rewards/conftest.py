"""The OCR engine is built once: a second of start-up, and it holds no state between calls (which is tested)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import wraps
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import pytest

from retouch.process.process_wide import loading
from retouch.rewards import scorers
from retouch.rewards.base import PackageScorer
from retouch.rewards.scorers.ocr import OcrReward, OcrScorer
from tests.process_state import changes, process_state


@pytest.fixture(scope="session", autouse=True)
def _watched() -> Iterator[None]:
    """Every scorer of the package that a test of this folder loads or lets score leaves the process as it was."""
    import_module("requests")  # rapidocr imports it, which adds filters of warnings once in a process
    for module in iter_modules(scorers.__path__):
        import_module(f"{scorers.__name__}.{module.name}")
    kinds, found = [PackageScorer], list[type]()
    while kinds:
        found.append(kinds.pop())
        kinds += found[-1].__subclasses__()
    ours = [kind for kind in found if kind.__module__.startswith("retouch.")]
    methods = [(kind, name) for kind in ours for name in ("load", "score", "values") if name in vars(kind)]
    with pytest.MonkeyPatch.context() as patch:
        for kind, name in methods:
            patch.setattr(kind, name, watched(vars(kind)[name]))
        yield


def watched(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method of a scorer, with a look at the process before and after; a run loads within `loading`."""

    @wraps(method)
    def watch(self: Any, *rest: Any, **options: Any) -> Any:
        before = process_state()
        with loading() if method.__name__ == "load" else nullcontext():
            result = method(self, *rest, **options)
        assert changes(before, process_state()) == [], f"{type(self).__name__}.{method.__name__}"
        return result

    return watch


@pytest.fixture(scope="session")
def line_ocr() -> OcrScorer:
    """Reads crops as one line."""
    scorer = OcrReward(detect=False, threads=1).make()
    scorer.load("cpu")
    return scorer


@pytest.fixture(scope="session")
def finding_ocr() -> OcrScorer:
    """Finds the lines first."""
    scorer = OcrReward(threads=1).make()
    scorer.load("cpu")
    return scorer


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token of whoever runs the tests must not decide them."""
    monkeypatch.delenv("RETOUCH_REWARD_TOKEN", raising=False)


@pytest.fixture(autouse=True)
def _all_logs(caplog: pytest.LogCaptureFixture) -> None:
    """Tests of secrets look at everything that is logged."""
    caplog.set_level(logging.DEBUG)
