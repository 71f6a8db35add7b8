"""Signals that stop a run: the first asks for it, those that a launcher passes on belong to it, a later one leaves."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from retouch.process.signals import ENDING, NOTICES, interrupt_on_signals
from retouch.training import stopping
from retouch.training.stopping import StopRequests


@pytest.fixture
def requests() -> StopRequests:
    return StopRequests(None, lambda flag: flag, "the next step")


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_a_launcher_passes_on_is_the_same_request(
    requests: StopRequests, second: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "SAME_REQUEST_S", 60.0)  # a busy machine may take seconds between the two
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
    before = [signal.getsignal(number) for number in (signal.SIGINT, *ENDING)]
    with requests.handling_signals():
        assert [signal.getsignal(number) for number in (signal.SIGINT, *ENDING)] != before
    assert [signal.getsignal(number) for number in (signal.SIGINT, *ENDING)] == before


def test_a_notice_of_the_scheduler_is_no_first_of_two_requests(
    requests: StopRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SLURM sends SIGUSR1 to every process of a step, and SIGTERM when the time is up: the run has until SIGKILL."""
    monkeypatch.setattr(stopping, "SAME_REQUEST_S", 0.05)
    with requests.handling_signals():
        try:
            for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
                os.kill(os.getpid(), number)
                time.sleep(0.1)
        except KeyboardInterrupt:  # would end pytest
            pytest.fail("left at once")
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
    assert requests.asked() == ("received SIGUSR1", 3, stopping.CONTINUE)


@pytest.mark.parametrize("number", NOTICES)
def test_whose_a_notice_is(requests: StopRequests, number: signal.Signals) -> None:
    """A launcher that ignores it passes that on; a program that trains through the Python interface may use it."""
    heard: list[int] = []
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, *ENDING)}
    try:
        signal.signal(number, lambda received, frame: heard.append(received))
        interrupt_on_signals()
        with requests.handling_signals():
            os.kill(os.getpid(), number)
            time.sleep(0.01)
        assert (heard, requests.asked()) == ([number], None)
        signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup's
        interrupt_on_signals()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
            time.sleep(1)
        with requests.handling_signals():
            os.kill(os.getpid(), signal.SIGHUP)
            assert not requests.heard
            os.kill(os.getpid(), number)
            time.sleep(0.01)
        assert requests.asked() == (f"received {number.name}", 3, stopping.CONTINUE)
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def test_an_alarm_has_a_cause_that_has_to_go_before_the_run_continues(
    requests: StopRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests.alarm = "the gold reward fell"
    asked = requests.asked()
    assert asked is not None and asked.message(7, Path("runs/a b")) == (
        "the gold reward fell at step 7; correct the cause, then continue with retouch train 'runs/a b/config.yaml' "
        "resume=auto"
    )
    monkeypatch.setenv("WORLD_SIZE", "2")  # the command of a launcher is not known
    assert asked.message(7, Path("a")).endswith("at step 7; correct the cause, then continue with resume=auto")
    monkeypatch.delenv("WORLD_SIZE")
    over = StopRequests(0.0, lambda flag: flag, "the next step").asked()
    assert over is not None and over.message(7, Path("a")) == (
        "training.max_minutes = 0 reached at step 7; continue with retouch train a/config.yaml resume=auto"
    )


def test_a_plateau_that_the_first_process_sees_stops_all(requests: StopRequests) -> None:
    """They vote equally often, and none of them fails; without the option nobody votes."""
    votes: list[bool] = []

    def recorded(flag: bool) -> bool:
        votes.append(flag)
        return flag

    first = StopRequests(None, recorded, "the next step", on_plateau=True)
    first.plateau = "ocr no longer rises"
    asked = first.asked()
    assert asked is not None and asked.message(7, Path("a")) == (
        "ocr no longer rises at step 7; continue with retouch train a/config.yaml resume=auto "
        "training.stop_on_plateau=false"
    )
    others = iter(votes)
    second = StopRequests(None, lambda flag: flag or next(others), "the next step", on_plateau=True).asked()
    assert second is not None and (second.exit_code, second.next_step) == (asked.exit_code, asked.next_step) != (3, "")
    assert second.exit_code == 0 and next(others, None) is None
    first.alarm = "the gold reward fell"
    alarm = first.asked()
    assert alarm is not None and alarm.exit_code == 3  # a cause that has to go
    requests.plateau = "ocr no longer rises"
    assert requests.asked() is None
