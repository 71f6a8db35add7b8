"""docs/trust.md is what tools/trust_table.py writes today, and its numbers are those that are promised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tools import trust_table

from retouch.algorithms import ALGORITHMS

RESULTS = trust_table.RESULTS


def result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def test_the_page_is_current() -> None:
    """Run `python tools/trust_table.py` where it is not."""
    assert Path(trust_table.PAGE).read_text(encoding="utf-8") == trust_table.page()


def test_no_kill_was_noticed() -> None:
    """Runs and servers are counted apart, and every algorithm is there."""
    found = result("kill")
    assert found["kills_of_runs"] >= 100 and found["runs_that_differ"] == 0 and found["problems"] == []
    assert {target.removesuffix("_server") for target in found["by_target"]} == set(ALGORITHMS)
    kills = [one["way"] for trial in found["trials"] for one in trial["kills"]]
    of_servers = kills.count("server")
    assert found["kills_of_runs"] == len(kills) - of_servers
    assert all(sum(ways.values()) >= 10 for ways in found["by_target"].values())
    assert of_servers and found["by_target"]["grpo_server"]["server"] == of_servers
    assert found["kills_of_servers"] == of_servers + sum(found["rewards"]["kills"].values())
    assert found["rewards"]["wrong"] == 0 and found["rewards"]["scored"] > 10_000
    assert sum(found["rewards"]["kills"].values()) >= 40


def test_no_input_is_a_traceback() -> None:
    found = result("fuzz")
    assert found["cases"] >= 10_000 and sum(found["targets"].values()) == found["cases"]
    assert [found[fault] for fault in ("tracebacks", "hangs", "over_memory", "failed_tests")] == [0] * 4


@pytest.mark.parametrize(("part", "least"), [("train", ("steps", 2000)), ("rewards", ("images", 100_000))])
def test_growth_is_what_the_page_states(part: str, least: tuple[str, int]) -> None:
    """Memory by less than 1 % over the run, that of the server within its noise; handles and threads by less than one;
    times within their noise."""
    found = result("long_run")[part]
    assert found[least[0]] >= least[1]
    slopes = {name: one for name, one in found.items() if isinstance(one, dict)}
    assert slopes
    for name, one in slopes.items():
        if name.endswith("rss_mb"):
            assert one["growth"] < 0.01 * one["mean"], name
        elif name.endswith(("handles", "threads")):
            assert one["growth"] < 1, name
        else:
            assert name in ("step_s", "time_s") and one["interval_per_1000"][0] < 0 < one["interval_per_1000"][1]
    if part == "rewards":
        low, high = found["front_rss_mb"]["interval_per_1000"]
        assert low < 0 < high


def test_every_test_of_the_page_exists() -> None:
    for file, name in trust_table.all_tests():
        assert f"def {name}(" in (trust_table.ROOT / "tests" / file).read_text(encoding="utf-8"), name
