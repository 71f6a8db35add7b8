"""A run whose rewards do not answer at its start."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from retouch import errors
from retouch.config import RunConfig
from retouch.data.checking import Alone
from retouch.engine.checkpoint import verify_once
from retouch.rewards.table import RewardTable
from retouch.training import scoring
from retouch.training.scoring import RewardOutage
from tests.rewards.fakes import (
    HANG_S,
    Answer,
    FakeServer,
    black_hole,
    closed_port,
    honest,
    raw_server,
    reply,
    unhurried,
)

from .runs import train

pytestmark = pytest.mark.usefixtures("shallow")


@pytest.mark.parametrize(("wait", "at_least"), [(0.0, 0.6), (1.2, 1.2)])
def test_servers_get_time_to_start_and_the_message_says_how_to(
    config: Callable[..., RunConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    wait: float,
    at_least: float,
) -> None:
    """The log names the rewards and the end of the wait, once and early."""
    monkeypatch.setattr(scoring, "STARTING_S", 0.6)
    monkeypatch.setattr(errors, "LONG_S", 0.2)
    caplog.set_level(logging.INFO)
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{one.getsockname()[1]}"
    rewards = {"preservation": {}, "ocr": {"url": url}, "clip": {"url": url, "weight": 0}}
    run = config(rewards=rewards, reward_client={"outage_wait_s": wait})
    table = RewardTable(run.rewards, run.reward_client, tmp_path)
    begun = time.monotonic()
    try:
        table.start()
        with pytest.raises(RewardOutage) as outage:
            scoring.wait_for_rewards(table, run.reward_client)
    finally:
        table.close()
    assert time.monotonic() - begun >= at_least
    lines = [line for line in caplog.messages if line.startswith("waiting")]
    told = f"waiting up to {at_least:.0f} s (reward_client.outage_wait_s) for rewards: "
    assert lines == [f"{told}preservation (this process), ocr ({url}), clip ({url})"]
    said = str(outage.value)
    assert said.startswith(f"rewards are not ready: {url}: ConnectError")
    assert said.endswith("; start the server with `retouch reward serve ocr`, or set rewards.ocr.url")


class AtOnce:
    """A timer whose time is up when it starts."""

    def __init__(self, after_s: float, work: Callable[..., None], given: tuple[str, ...]) -> None:
        self.start, self.cancel = lambda: work(*given), lambda: None


def test_long_work_before_the_first_step_is_logged(
    config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(errors.threading, "Timer", AtOnce)
    caplog.set_level(logging.INFO)
    run, _ = train(config(training__max_steps=1))
    verify_once(run.dir.path / "checkpoints" / "step-000001", Alone())
    begun = ("comparing", "waiting", "evaluating", "step 0,")
    assert [" ".join(line.split()[:4]) for line in caplog.messages if line.startswith(begun)] == [
        "comparing the images of",
        "waiting up to 300",
        "evaluating before the first",
        "step 0, 2 held-out",
        "comparing the files of",
    ]


def loading(connection: socket.socket) -> None:
    while connection.recv(65536):
        connection.sendall(b"HTTP/1.1 503 loading\r\nContent-Length: 0\r\n\r\n")


@pytest.mark.parametrize("way", ["HTML", "refuses", "hangs", "loads for ever"])
def test_a_run_starts_without_a_server_whose_rewards_another_has(
    config: Callable[..., RunConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    way: str,
) -> None:
    """It stopped with exit code 3, at every restart."""
    monkeypatch.setattr(scoring, "STARTING_S", 0.6)
    with contextlib.ExitStack() as stack:
        good = stack.enter_context(FakeServer(honest, info={"scorers": {"ocr": {}}}))
        bad = {
            "HTML": lambda: stack.enter_context(FakeServer(honest, info="it works")).url,
            "refuses": lambda: f"http://127.0.0.1:{closed_port()}",
            "hangs": lambda: stack.enter_context(raw_server(black_hole)),
            "loads for ever": lambda: stack.enter_context(raw_server(loading)),
        }[way]()
        run = config(rewards={"ocr": {"url": [bad, good.url]}}, reward_client={"outage_wait_s": 600.0})
        table = RewardTable(run.rewards, run.reward_client, tmp_path)
        stack.callback(table.close)
        table.start()
        unhurried(monkeypatch, good.url)
        begun = time.monotonic()
        scoring.wait_for_rewards(table, run.reward_client)
        assert time.monotonic() - begun < HANG_S
    (line,) = [
        r.getMessage() for r in caplog.records if r.levelname == "WARNING" and "starts without" in r.getMessage()
    ]
    assert bad in line and good.url not in line


def test_the_servers_that_are_up_are_compared_without_one_that_is_not(
    config: Callable[..., RunConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The one that is missing comes first."""
    monkeypatch.setattr(scoring, "STARTING_S", 0.6)
    about = {"scorers": {"ocr": {}}}
    with contextlib.ExitStack() as stack:
        values = ((lambda _: 0.25), (lambda _: 0.75))
        scripts = [lambda asked, _, value=value: Answer(reply(asked.ids, value, "ocr")) for value in values]
        servers = [stack.enter_context(FakeServer(script, info=about)).url for script in scripts]
        urls = [f"http://127.0.0.1:{closed_port()}", *servers]
        run = config(rewards={"ocr": {"url": urls}}, reward_client={"outage_wait_s": 30.0})
        table = RewardTable(run.rewards, run.reward_client, tmp_path)
        stack.callback(table.close)
        table.start()
        unhurried(monkeypatch, *servers)
        scoring.wait_for_rewards(table, run.reward_client)
    assert f"ocr: {servers[0]} and {servers[1]} differ by 0.5 on the same images" in caplog.text
