"""A run whose rewards do not answer at its start."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from retouch.config import RunConfig
from retouch.rewards.table import RewardTable
from retouch.training import scoring
from retouch.training.scoring import RewardOutage


@pytest.mark.parametrize(("wait", "at_least"), [(0.0, 0.6), (1.2, 1.2)])
def test_servers_get_time_to_start_and_the_message_says_how_to(
    config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: float, at_least: float
) -> None:
    monkeypatch.setattr(scoring, "STARTING_S", 0.6)
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
    said = str(outage.value)
    assert said.startswith(f"rewards are not ready: {url}: ConnectError")
    assert said.endswith("; start the server with `retouch reward serve ocr`, or set rewards.ocr.url")
