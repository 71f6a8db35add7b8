"""benchmarks/broken_servers.py: its committed numbers are those that docs/measured.md promises."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import broken_servers

ROOT = Path(__file__).parents[2]
FOUND = json.loads((ROOT / "benchmarks/results/broken_servers.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("way", broken_servers.WAYS)
def test_every_item_is_scored_at_the_rate_of_the_sound_server(way: str) -> None:
    found = FOUND["items"][way]
    assert found["items"] == found["scored"] == 10_000 and found["share_of_alone"] >= 0.9
    assert found["attempts"] <= 1.2 * found["requests"]


@pytest.mark.parametrize("way", broken_servers.WAYS)
def test_runs_and_restarts_beside_a_broken_server_end_well(way: str) -> None:
    assert FOUND["restarts"][way]["exit_codes"] == [0] * 4
