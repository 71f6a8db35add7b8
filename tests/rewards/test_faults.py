"""The promises of the client (docs/rewards.md lists them) that test_client.py does not test, and all of them at once
under random faults."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
import math
import sqlite3
import threading
import time
import tracemalloc
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from retouch.rewards.client import cache as cache_module
from retouch.rewards.client.cache import (
    ScoreCache,
    cache_key,
)
from retouch.rewards.client.client import RewardClient, _Request  # pyright: ignore[reportPrivateUsage]
from retouch.rewards.client.config import RewardClientConfig
from retouch.rewards.client.servers import (
    BREAKER_FAILURES,
    Balance,
    Balancer,
    RetryBudget,
)
from retouch.types import Failure, Score
from tests.rewards.fakes import (
    Answer,
    Asked,
    Brightness,
    FakeServer,
    Poisoned,
    closed_port,
    half_mask,
    honest,
    item,
    items,
    picture,
    reply,
    serving,
    until,
    values,
)
from tests.rewards.faults import INSTEAD, FaultyProxy, FaultyServer, true_value


def client_of(*urls: str, cache: ScoreCache | None = None, **options: Any) -> RewardClient:
    return RewardClient(urls, ["r"], options=RewardClientConfig(**{"timeout_s": 60.0, **options}), cache=cache)


# --- everything at once ---


@pytest.mark.parametrize(
    "count", [120, pytest.param(500, marks=pytest.mark.full), pytest.param(10_000, marks=pytest.mark.slow)]
)
def test_requests_under_random_faults(count: int) -> None:
    """Three servers that delay, refuse, lie and reorder, two of them behind proxies that cut, stall and reset, one
    restarted again and again: n in, n out, in order, no number that the scorer did not give, in bounded time, and at
    most 1.2 times the requests."""
    batch = [item(i, image=picture(i % 50, 4, 4), prompt=f"picture {i}") for i in range(count)]
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(FaultyServer(seed)) for seed in range(3)]
        proxies = [stack.enter_context(FaultyProxy(server.url, 10 + n)) for n, server in enumerate(servers[:2])]
        urls = [*(proxy.url for proxy in proxies), servers[2].url]
        client = stack.enter_context(client_of(*urls, batch_size=1, timeout_s=60.0, requests_per_server=8))
        over = threading.Event()

        def restarts() -> None:
            """Eight of them, spread over the requests."""
            while not over.wait(0.05):
                if len(servers[0].asked) > (proxies[0].faults["restart"] + 1) * count / 30:
                    proxies[0].restart()

        threading.Thread(target=restarts, daemon=True).start()
        started = time.monotonic()
        outcomes = client.score(batch)["r"]
        took = time.monotonic() - started
        over.set()
        statistics = client.statistics
    assert len(outcomes) == count
    scores = [(one, outcome) for one, outcome in zip(batch, outcomes, strict=True) if isinstance(outcome, Score)]
    assert [outcome.value for _, outcome in scores] == [true_value(one) for one, _ in scores]
    failed = Counter(outcome.code for outcome in outcomes if isinstance(outcome, Failure))
    lies = Counter[str]()
    for faulty in (*servers, *proxies):
        lies += faulty.faults
    assert set(failed) <= {"bad_reply", "unavailable", "overloaded"}
    assert sum(lies[lie] for lie in INSTEAD) > 0.01 * count
    assert failed["bad_reply"] < 0.01 * count  # another server is asked once, within the budget of retries
    assert failed["unavailable"] + failed["overloaded"] < 0.05 * count  # 0 unless the machine is starved
    asked = sum(len(server.asked) for server in servers)
    assert asked <= 1.2 * count and statistics.requests == count
    assert took < 2 * 60 + 0.3 * count  # a starved machine; .02 s each on an idle one
    logging.getLogger(__name__).error(  # pytest shows it with -s
        "%d requests, %d attempts, failures %s, %.1f s, faults %s", count, asked, dict(failed), took, dict(lies)
    )


# --- which server ---


def makespan(balance: Balance, seconds: list[float], requests: int, most: int = 4) -> float:
    """Of requests to servers that answer one at a time, in simulated seconds."""
    balancer = Balancer([f"http://s{n}" for n in range(len(seconds))], balance, most)
    cost = dict(zip(balancer.servers, seconds, strict=True))
    free = dict.fromkeys(balancer.servers, 0.0)
    now, left, events = 0.0, requests, list[tuple[float, int, Any, float]]()
    while left or events:
        while left:
            server, _ = balancer.choose(now)
            if server is None:
                break
            server.sent(now)
            left -= 1
            free[server] = max(now, free[server]) + cost[server]
            heapq.heappush(events, (free[server], left, server, now))
        now, _, server, sent = heapq.heappop(events)
        server.under_way -= 1
        server.answered(now - sent, now)
    return now


def test_one_slow_server_of_four_costs_little() -> None:
    """88 requests, one of four servers 4x slow: dealt out in turn, the slow one's share takes three times as long."""
    seconds = [1.0, 1.0, 1.0, 4.0]
    ideal = 88 / sum(1 / s for s in seconds)
    assert makespan("least_outstanding", seconds, 88) <= 1.25 * ideal
    assert makespan("round_robin", seconds, 88) <= 1.7 * ideal  # no more than `most` wait at the slow one
    assert makespan("round_robin", seconds, 88, most=88) == 88.0 > 3 * ideal
    assert makespan("least_outstanding", [1.0] * 4, 88) == 22.0


def test_a_fast_server_that_hangs_does_not_keep_work_from_a_slow_one() -> None:
    """It took .1 s, the other 5 s: work waits for it until it has been silent for longer than the other would take."""
    balancer = Balancer(["http://fast", "http://slow"], "least_outstanding", 4)
    fast, slow = balancer.servers
    for server, seconds in ((fast, 0.1), (slow, 5.0)):
        server.sent(0.0)
        server.answered(seconds, 5.0)
        server.under_way = 0
    for _ in range(4):
        assert balancer.choose(10.0)[0] is fast
        fast.sent(10.0)
    assert balancer.choose(10.5) == (None, 1.0)
    assert balancer.choose(11.1)[0] is slow  # five times 1.1 s
    fast.answered(1.2, 11.2)
    assert balancer.choose(11.3)[0] is None


def test_round_robin_takes_the_servers_in_turn() -> None:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(FakeServer(honest)) for _ in range(3)]
        urls = [server.url for server in servers]
        client = stack.enter_context(client_of(*urls, batch_size=1, balance="round_robin"))
        client.score(items(9))
        for _ in range(3):
            client.score(items(1))
        assert [len(server.asked) for server in servers] == [4, 4, 4]


def test_no_more_requests_than_allowed_are_under_way_at_a_server() -> None:
    here, most, lock = 0, 0, threading.Lock()

    def script(asked: Asked, number: int) -> Answer:
        nonlocal here, most
        with lock:
            here += 1
            most = max(most, here)
        time.sleep(0.02)
        with lock:
            here -= 1
        return honest(asked, number)

    with FakeServer(script) as server, client_of(server.url, batch_size=1, requests_per_server=3) as client:
        assert values(client.score(items(20))["r"]) == [0.0] * 20
    assert most == 3


# --- breaker, back-pressure, budget ---


@pytest.mark.full
def test_the_breaker_leaves_a_dead_server_alone_and_finds_it_again() -> None:
    alive = threading.Event()

    def script(asked: Asked, number: int) -> Answer:
        return honest(asked, number) if alive.is_set() else Answer(b"", 500)

    with FakeServer(script) as dead, FakeServer(honest) as good, client_of(dead.url, good.url, batch_size=1) as client:
        for _ in range(5):
            assert values(client.score(items(12))["r"]) == [0.0] * 12
        # under way when the breaker opens: at most `most`; after that one probe each half second or more
        assert len(dead.asked) <= BREAKER_FAILURES + 4 + 4
        alive.set()
        before, deadline = len(dead.asked), time.monotonic() + 20
        while len(dead.asked) < before + 3 and time.monotonic() < deadline:
            assert values(client.score(items(8))["r"]) == [0.0] * 8
        assert len(dead.asked) >= before + 3


def test_a_retry_waits_for_a_full_server_rather_than_meeting_the_one_that_failed_it() -> None:
    balancer = Balancer(["http://failed", "http://full"], "least_outstanding", 4)
    failed, full = balancer.servers
    full.sent(0.0)
    full.answered(2.0, 2.0)
    full.under_way = 0
    for _ in range(4):
        full.sent(10.0)
    assert balancer.choose(10.1, [failed]) == (None, 1.0)
    assert balancer.choose(17.9, [failed]) == (None, 1.0)
    assert balancer.choose(18.1, [failed])[0] is failed  # the other hangs, by four times what it took before
    full.answered(8.2, 18.2)
    assert balancer.choose(18.2, [failed]) == (None, 1.0)
    full.under_way -= 1
    assert balancer.choose(18.2, [failed])[0] is full
    full.under_way += 1
    assert balancer.choose(18.2, [failed], ends=18.3)[0] is failed  # the other would answer too late
    full.held(18.2, 10.0)  # it wants to be left alone: the one that failed is the only one
    assert balancer.choose(18.3, [failed])[0] is failed


def test_the_breaker_half_opens_for_one_request() -> None:
    balancer = Balancer(["http://a"], "least_outstanding", 4)
    (server,) = balancer.servers
    for _ in range(BREAKER_FAILURES):
        server.failed(10.0)
    assert balancer.choose(10.0) == (None, 0.5)
    assert balancer.choose(10.6)[0] is server
    server.under_way = 1
    assert balancer.choose(10.6)[0] is None  # the probe is under way
    server.failed(11.0)
    assert balancer.choose(11.9)[0] is None  # twice as long
    server.under_way = 0
    server.answered(0.1, 11.9)
    assert balancer.choose(11.9)[0] is server


def test_retry_after_holds_back_every_request_to_that_server() -> None:
    times: list[float] = []

    def script(asked: Asked, number: int) -> Answer:
        times.append(time.monotonic())
        return honest(asked, number) if number else Answer(b"", 429, {"Retry-After": "0.5"})

    with FakeServer(script) as server, client_of(server.url, batch_size=1) as client:
        first = client.submit(items(1))
        until(lambda: client._balancer.servers[0].held_until > 0)
        assert values(client.score([item(1)])["r"]) == [0.0] and values(first.result()["r"]) == [0.0]
    assert len(times) == 3 and min(times[1:]) - times[0] >= 0.5


def test_retries_are_a_share_of_the_requests() -> None:
    budget = RetryBudget(60.0, share=0.25, reserve=3.0, per_second=1.0)
    assert [budget.take(0.0) for _ in range(4)] == [True, True, True, False]
    for _ in range(8):
        budget.request(0.0)
    assert [budget.take(0.0) for _ in range(3)] == [True, True, False]
    assert budget.take(1.0) and not budget.take(1.0)
    assert [budget.take(100.0) for _ in range(4)] == [True, True, True, False]  # time refills the reserve, no more


def test_the_memory_of_the_budget_does_not_grow_with_the_requests() -> None:
    """400 KB were held for the requests of a minute at 200 a second."""
    budget = RetryBudget(60.0, share=0.1, reserve=0.0, per_second=0.0)
    tracemalloc.start()
    try:
        for i in range(12_000):
            budget.request(i / 200)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 20_000
    assert sum(budget.take(59.9) for _ in range(2000)) == 1200  # every request counts until its minute is over
    assert not budget.take(119.5) and not budget.take(200.0)


def test_retries_are_not_saved_up() -> None:
    """10,000 requests that needed none, ten a second, then nothing but failures: as many as the last minute's pay for,
    and the reserve; in the minute after it, what time adds to that."""
    budget = RetryBudget(60.0)
    for number in range(10_000):
        budget.request(number / 10)
    assert sum(budget.take(999.95) for _ in range(10_000)) == 0.15 * 600 + 15
    taken = 0
    for tick in range(600):  # each fails, and would be tried again at once
        budget.request(1000 + tick / 10)
        taken += budget.take(1000 + tick / 10)
    assert taken == pytest.approx(0.5 * 60, abs=1)


def test_a_server_that_only_fails_is_not_stormed() -> None:
    """Breaker and budget together: 100 requests to it are at most 120 attempts, and end as unavailable."""
    with FakeServer(lambda asked, number: Answer(b"", 500)) as server:
        client = client_of(server.url, batch_size=1, timeout_s=1.0, requests_per_server=100)
        outcomes = client.score(items(100))["r"]
        client.close()
        assert len(server.asked) <= 1.2 * 100
    assert values(outcomes) == ["unavailable"] * 100


def test_a_request_that_is_cancelled_before_it_begins_gives_its_place_back() -> None:
    with FakeServer(honest) as server, client_of(server.url) as client:

        async def cancelled() -> int:
            place = client._balancer.servers[0]
            place.sent(time.monotonic())
            task = client._begin(place, _Request(items(1), ["r"], "r", time.monotonic() + 5))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await asyncio.sleep(0)
            return place.under_way

        assert client._call(cancelled()).result() == 0


def test_waiting_for_a_server_is_bounded_by_the_progress_of_all() -> None:
    """40 requests, 4 under way: when none is answered, none waits longer than one deadline."""
    over = threading.Event()
    with FakeServer(lambda asked, number: Answer(b"", 500 * over.wait(600))) as server:
        client = client_of(server.url, batch_size=1, timeout_s=0.5)
        assert values(client.score(items(40))["r"]) == ["unavailable"] * 40
        over.set()
        assert client.statistics.attempts <= 12  # each would have one, four at a time
        client.close()


# --- revisions, probes ---


def revised(revision: str) -> Any:
    def script(asked: Asked, number: int) -> Answer:
        return Answer({**reply(asked.ids), "scorers": {"r": {"revision": revision}}})

    return script


def warnings_of_revisions(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and "compare" in r.getMessage()]


def test_a_scorer_that_changes_in_the_middle_of_a_run_is_flagged(caplog: pytest.LogCaptureFixture) -> None:
    def script(asked: Asked, number: int) -> Answer:
        return revised("a 1" if number < 2 else "a 2")(asked, number)

    with FakeServer(script) as server, client_of(server.url) as client:
        for changes in (0, 0, 1, 1):
            client.score(items(1))
            assert client.revisions.changes == changes
    (warned,) = warnings_of_revisions(caplog)
    assert "r is now 'a 2' and was 'a 1'" in warned


def test_servers_of_two_revisions_are_flagged_once_and_nothing_is_kept(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    cache = ScoreCache(tmp_path / "scores.sqlite")
    with (
        FakeServer(revised("a 1")) as one,
        FakeServer(revised("a 2")) as two,
        client_of(one.url, two.url, balance="round_robin", cache=cache) as client,
    ):
        for _ in range(6):
            client.score(items(1))
        assert (client.revisions.changes, client.statistics.cache_hits) == (1, 0)
    (warned,) = warnings_of_revisions(caplog)
    assert "r is 'a 2' and of other servers 'a 1'" in warned


@pytest.mark.parametrize("row", ["value = 'a'", "detail = '{'", "detail = '[1]'", "value = 1e999", "value = NULL"])
def test_a_damaged_row_of_the_cache_is_asked_again(row: str, tmp_path: Path) -> None:
    cache = ScoreCache(tmp_path / "scores.sqlite")
    cache.put({b"a": Score(0.5), b"b": Score(0.25)})
    with sqlite3.connect(cache.path) as connection, contextlib.suppress(sqlite3.IntegrityError):  # no NULL
        connection.execute(f"UPDATE scores SET {row} WHERE key = ?", (b"a",))
    found = cache.get([b"a", b"b"])
    assert found.get(b"a") in (None, Score(0.5)) and found[b"b"] == Score(0.25)
    assert b"a" in found or "NULL" not in row


def test_the_revision_of_a_server_that_is_gone_keeps_no_score_from_the_cache(tmp_path: Path) -> None:
    def script(asked: Asked, number: int) -> Answer:
        return revised("a 1")(asked, number) if number == 0 else Answer(b"", 503)

    cache = ScoreCache(tmp_path / "scores.sqlite")
    with (
        FakeServer(script) as old,
        FakeServer(revised("a 2")) as new,
        client_of(old.url, new.url, balance="round_robin", cache=cache) as client,
    ):
        for asked in range(2 * BREAKER_FAILURES):
            assert values(client.score(items(1))["r"]) == [0.0], asked
            if len(old.asked) <= BREAKER_FAILURES:  # it may come back
                assert client.statistics.cache_hits == 0
        assert client.score(items(1)) and client.statistics.cache_hits >= 1


def test_a_server_of_another_revision_that_comes_and_goes_while_it_is_asked_leaves_nothing_in_the_cache(
    tmp_path: Path,
) -> None:
    """Nobody knew of it when keys were made, and at the end it is gone again."""

    def short_lived(asked: Asked, number: int) -> Answer:
        return revised("a 1")(asked, number) if number < 2 else Answer(b"", 503)

    cache = ScoreCache(tmp_path / "scores.sqlite")
    with (
        FakeServer(revised("a 2")) as stays,
        FakeServer(short_lived) as other,
        client_of(stays.url, other.url, balance="round_robin", batch_size=1, timeout_s=30.0, cache=cache) as client,
    ):
        client.revisions.note(stays.url, "r", "a 2")
        assert values(client.score(items(40))["r"]) == [0.0] * 40
        assert len(other.asked) >= 2 + BREAKER_FAILURES  # it is gone, and counts no more
        client.score(items(40))
        assert client.statistics.cache_hits == 0
        client.score(items(40))
        assert client.statistics.cache_hits == 40  # of the second time, when one alone answered


def test_what_is_in_the_cache_is_known_while_every_server_is_gone(tmp_path: Path) -> None:
    def script(asked: Asked, number: int) -> Answer:
        return revised("a 1")(asked, number) if number < 2 else Answer(b"", 503)

    cache = ScoreCache(tmp_path / "scores.sqlite")
    with FakeServer(script) as server, client_of(server.url, cache=cache) as client:
        for _ in range(2):  # the first answer tells the revision
            assert values(client.score(items(1))["r"]) == [0.0]
        client.options = client.options.model_copy(update={"timeout_s": 2.0})
        while len(server.asked) < 2 + BREAKER_FAILURES:
            assert values(client.score([item(7)])["r"]) == ["unavailable"]
        assert values(client.score(items(1))["r"]) == [0.0]
        assert client.statistics.cache_hits == 1


def test_a_probe_asks_every_server_by_itself() -> None:
    dead = f"http://127.0.0.1:{closed_port()}"
    with (
        serving({"r": Brightness()}) as url,
        FakeServer(honest) as other,
        client_of(url, other.url, dead) as client,
    ):
        found = {at: values(columns["r"]) for at, columns in client.probe(items(2)).items()}
    assert found[other.url] == [0.0, 1.0] and found[dead] == ["unavailable"] * 2
    assert found[url] == [float(one.image.mean() / 255) for one in items(2)]


# --- cache ---


def test_scores_are_kept_over_a_restart(tmp_path: Path) -> None:
    with serving({"r": Brightness()}) as url:
        for asked_again in (False, True):
            cache = ScoreCache(tmp_path / "scores.sqlite")
            with client_of(url, cache=cache) as client:
                expected = values(client.score(items(3))["r"])
                assert expected == [float(one.image.mean() / 255) for one in items(3)]
                assert client.statistics.requests == (0 if asked_again else 1)
                assert client.statistics.cache_hits == (3 if asked_again else 0)
            cache.close()


def test_a_failed_item_is_asked_again_with_a_cache(tmp_path: Path) -> None:
    batch = [item(0), item(1, prompt="refused")]
    with serving({"r": Poisoned()}) as url, client_of(url, cache=ScoreCache(tmp_path / "c")) as client:
        for requests in (1, 2):
            assert values(client.score(batch)["r"])[1] == "bad_item"
            assert client.statistics.requests == requests
        assert client.statistics.cache_hits == 1  # the other one


def test_every_part_of_an_item_is_part_of_its_key() -> None:
    base = item(0, mask=half_mask(), source=picture(5), reference=picture(6), metadata={"text": "a"})
    changed: list[dict[str, Any]] = [
        {"prompt": "other"}, {"mask": 255 - half_mask()}, {"source": picture(7)}, {"reference": None},
        {"metadata": {"text": "b"}}, {"image": picture(1)}, {"image": base.image.reshape(5, 6, 3)},
    ]  # fmt: skip
    keys = [cache_key(item(0, **{**vars(base), **change}), "r", "1") for change in changed]
    keys += [cache_key(base, "s", "1"), cache_key(base, "r", "2")]
    assert len({cache_key(base, "r", "1"), *keys}) == len(keys) + 1
    assert cache_key(item(9, **{**vars(base), "id": 9, "group": 4}), "r", "1") == cache_key(base, "r", "1")


def test_the_cache_keeps_the_bits_and_survives_a_broken_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "scores.sqlite"
    path.write_bytes(b"not a database, but long enough to look like one" * 50)
    cache = ScoreCache(path)
    kept = {b"a": Score(math.pi, {"x": 0.1 + 0.2}), b"b": Failure("bad_item", "no"), b"c": Score(5e-324)}
    cache.put(kept)
    assert cache.get([b"a", b"b", b"c", b"d"]) == {b"a": kept[b"a"], b"c": kept[b"c"]}
    cache.close()
    assert "is not a cache of scores" in caplog.text and (tmp_path / "scores.sqlite.broken").exists()
    assert sqlite3.connect(path).execute("SELECT count(*) FROM scores").fetchone() == (2,)


def test_a_cache_that_is_in_use_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow disk or another process may hold it for longer than sqlite waits: its scores are not given up."""
    path = tmp_path / "scores.sqlite"
    cache = ScoreCache(path)
    cache.put({b"k": Score(0.5)})
    cache.close()
    monkeypatch.setattr(cache_module, "_WAIT_S", 0.0)
    monkeypatch.setattr(cache_module, "_PAUSE_S", 0.01)
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("PRAGMA locking_mode = EXCLUSIVE")
        other.execute("DELETE FROM scores WHERE key = x'00'")
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            ScoreCache(path).get([b"k"])
    assert list(ScoreCache(path).get([b"k"])) == [b"k"]
    assert not path.with_name("scores.sqlite.broken").exists()


@pytest.mark.parametrize(
    ("code", "waited"),
    [
        (sqlite3.SQLITE_BUSY, 30), (sqlite3.SQLITE_BUSY_SNAPSHOT, 30), (sqlite3.SQLITE_LOCKED, 30),
        (sqlite3.SQLITE_READONLY, 0), (sqlite3.SQLITE_FULL, 0),
    ],
)  # fmt: skip
def test_a_cache_in_use_is_waited_for_30_s_and_no_other_error(
    code: int, waited: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each attempt at a file that is locked exclusively lasts sqlite's whole timeout."""
    clock = [0.0]

    class Held:
        def __init__(self, path: Path, timeout: float, **options: Any) -> None:
            self.timeout, self.close = timeout, lambda: None

        def execute(self, statement: str) -> None:
            error = sqlite3.OperationalError("of the disk")
            error.sqlite_errorcode = code
            clock[0] += self.timeout if waited else 0.0
            raise error

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(sqlite3, "connect", Held)
    monkeypatch.setattr(cache_module, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    with caplog.at_level("INFO"), pytest.raises(sqlite3.OperationalError, match="of the disk"):
        ScoreCache(tmp_path / "scores.sqlite").get([b"k"])
    assert clock[0] == pytest.approx(waited, abs=0.5)
    assert caplog.text.count("is in use by another process; waiting for up to 30 s") == bool(waited)


def test_a_broken_cache_that_another_process_replaced_is_not_moved_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "scores.sqlite"
    path.write_bytes(b"not a database" * 400)
    first, second, connect = ScoreCache(path), ScoreCache(path), ScoreCache._connect

    def between(cache: ScoreCache) -> sqlite3.Connection:
        """The first process replaces the file after the second has found it broken."""
        try:
            return connect(cache)
        except sqlite3.DatabaseError:
            if cache is second and not path.with_name("scores.sqlite.broken").exists():
                first.put({b"a": Score(0.5)})
            raise

    monkeypatch.setattr(ScoreCache, "_connect", between)
    second.put({b"b": Score(0.25)})
    assert first.get([b"a", b"b"]) == second.get([b"a", b"b"]) == {b"a": Score(0.5), b"b": Score(0.25)}
    assert path.with_name("scores.sqlite.broken").read_bytes() == b"not a database" * 400


# --- statistics ---


def test_what_a_client_counts() -> None:
    def script(asked: Asked, number: int) -> Answer:
        return Answer(b"", 503) if number == 0 else honest(asked, number)

    with FakeServer(script) as server, client_of(server.url, batch_size=2) as client:
        client.score([*items(3), item(9, image=np.zeros((2, 2), np.uint8))])
        told = client.statistics
        assert (told.requests, told.attempts, told.retries) == (2, 3, 1)
        assert told.scores["r"] == 3 and told.failures["r"] == {"bad_item": 1}
        assert 0 < told.latency(0.5) <= told.latency(0.95)
