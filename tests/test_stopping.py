"""Signals that stop a run: the first asks for it, those that a launcher passes on belong to it, a later one leaves."""

from __future__ import annotations

import os
import signal
import time

import pytest

from retouch.training import stopping
from retouch.training.stopping import StopRequests


@pytest.fixture
def requests() -> StopRequests:
    return StopRequests(None, lambda flag: flag, "the next step")


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_a_launcher_passes_on_is_the_same_request(requests: StopRequests, second: signal.Signals) -> None:
    with requests.handling_signals():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), second)
        time.sleep(0.01)
    assert requests.asked() == ("received SIGINT", 3, stopping.CONTINUE)


def test_a_later_signal_leaves_at_once(requests: StopRequests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "SAME_REQUEST_S", 0.05)
    with requests.handling_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
    assert requests.asked() == ("received SIGTERM", 3, stopping.CONTINUE)


def test_handlers_are_those_before_it(requests: StopRequests) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, *stopping.ENDING)]
    with requests.handling_signals():
        assert [signal.getsignal(number) for number in (signal.SIGINT, *stopping.ENDING)] != before
    assert [signal.getsignal(number) for number in (signal.SIGINT, *stopping.ENDING)] == before


def test_an_alarm_has_a_cause_that_has_to_go_before_the_run_continues(requests: StopRequests) -> None:
    requests.alarm = "the gold reward fell"
    asked = requests.asked()
    assert asked is not None and asked.message(7) == (
        "the gold reward fell at step 7; correct the cause, then continue with resume=auto"
    )
    over = StopRequests(0.0, lambda flag: flag, "the next step").asked()
    assert (
        over is not None and over.message(7) == "training.max_minutes = 0 reached at step 7; continue with resume=auto"
    )
