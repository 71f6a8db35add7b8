"""What docs/measured.md says of speed is what benchmarks/rewards.py measured and committed."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.rewards.fakes import Brightness, serving

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import rewards as benchmark  # noqa: E402

FOUND: dict[str, Any] = json.loads((REPOSITORY / "benchmarks/results/rewards.json").read_text(encoding="utf-8"))
PAGE = (REPOSITORY / "docs/measured.md").read_text(encoding="utf-8")


def servers(part: str) -> dict[str, dict[str, Any]]:
    return {row["server"]: row for row in FOUND[part]["found"]}


def test_batching_is_three_times_one_picture_a_request_and_not_at_the_price_of_latency() -> None:
    rows = servers("batching")
    ours, theirs = rows["retouch"], rows["one per request"]
    assert ours["requests_per_s"] >= 3 * theirs["requests_per_s"] and ours["latency_p95_s"] < theirs["latency_p95_s"]


def test_on_a_cpu_the_service_costs_at_most_a_tenth_of_the_throughput() -> None:
    for part in ("convnet", "ocr"):
        rows = servers(part)
        best = max(row["requests_per_s"] for row in rows.values())
        assert rows["retouch"]["requests_per_s"] >= 0.9 * best
        assert rows["retouch"]["latency_p95_s"] <= min(row["latency_p95_s"] for row in rows.values())


def test_balance_with_one_slow_server_of_four() -> None:
    least, capped, dealt = FOUND["balance"]["found"]
    assert least["of_ideal"] <= 1.7 and capped["of_ideal"] <= 1.7 < dealt["of_ideal"]


def test_the_reward_is_hidden_behind_the_rollout() -> None:
    found = FOUND["overlap"]["found"]
    assert found["groups"] >= 8 and found["reward_s"] >= 0.75 * found["rollout_s"] and found["of_bound"] <= 1.1


def test_the_overlap_of_the_page_is_the_measured_one() -> None:
    assert f"{FOUND['overlap']['found']['of_bound']:.2f} of the larger" in PAGE


def test_the_load_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a server without a token, which answers to the names of its own machine alone."""
    with serving({"fn": Brightness()}) as url:
        monkeypatch.setitem(benchmark.PORTS, "retouch", int(url.rpartition(":")[2]))
        counter = [0]
        latencies = asyncio.run(benchmark.load("retouch", "gpu_like", 2, 0.0, counter))
    assert len(latencies) == counter[0] == 2


def test_the_ways_to_balance_answer_every_request() -> None:
    rows = benchmark.balance(requests=8, seconds=0.001)
    assert [sum(row["answered"]) for row in rows] == [8, 8, 8]
