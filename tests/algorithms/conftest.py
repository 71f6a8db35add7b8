from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from retouch.rewards.scorers import preservation
from retouch.training import experience, session
from retouch.training.recorder import Recorder
from retouch.training.session import Session

from .runs import Rule, Scripted, Use


@pytest.fixture
def run_file(run_file: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Evaluations take one step: an eighth of a small run."""
    return lambda **overrides: run_file(**{"evaluation__num_steps": 1, **overrides})


_EVALUATE, _FINISH, _REPORT = Recorder.evaluate, Session.finish, session.leave_report


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs leave out what takes a third of their time: evaluations, the last checkpoint of a run without others, and
    the report. For files whose tests look at what is trained; a test of such a file that looks at these takes `whole`.
    """

    def finish(self: Session) -> None:
        if self.recorder._saved_at == self.progress.step or self._finished or self.config.training.checkpoint_every:
            _FINISH(self)
        else:
            self.run.dir.log("event", self.progress.step, {"event": "finished"})

    monkeypatch.setattr(Recorder, "evaluate", lambda self, moment: None)
    monkeypatch.setattr(Session, "finish", finish)
    monkeypatch.setattr(session, "leave_report", lambda run: None)


@pytest.fixture
def whole(bare: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs as users have them."""
    monkeypatch.setattr(Recorder, "evaluate", _EVALUATE)
    monkeypatch.setattr(Session, "finish", _FINISH)
    monkeypatch.setattr(session, "leave_report", _REPORT)


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
