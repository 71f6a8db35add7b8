"""n in, n out, in order, in time: against servers that lie, hang, hang up and come back."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import logging
import math
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from retouch.config import ConfigError
from retouch.rewards.client.client import RewardClient
from retouch.rewards.client.exchange import Exchange
from retouch.rewards.client.revisions import Revisions
from retouch.rewards.client.servers import readiness
from retouch.rewards.foreign import MOST_CHARACTERS
from retouch.rewards.protocol import Scorer
from retouch.rewards.scorers.judge_budget import Budget
from retouch.rewards.scorers.judge_client import JudgeClient
from retouch.types import Failure, Score
from tests.rewards.fakes import (
    HANG_S,
    Answer,
    Asked,
    Brightness,
    FakeServer,
    Gated,
    Unloadable,
    black_hole,
    brightness,
    closed_port,
    free_port,
    half_closed,
    honest,
    item,
    items,
    raw_server,
    reply,
    reset,
    serving,
    slow_drip,
    unhurried,
    until,
    values,
)


def client_of(*urls: str, **options: Any) -> RewardClient:
    return RewardClient(urls, ["r"], **{"timeout_s": 60.0, **options})


def late(failure: Failure) -> bool:
    """Whether a busy machine held an answer up until the short deadline of a test was over."""
    return failure.code == "unavailable" and "no answer within" in failure.message


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    unhurried(monkeypatch)


def failures(outcomes: list[Any]) -> list[Failure]:
    assert all(isinstance(one, Failure) for one in outcomes), outcomes
    return outcomes


def unavailable(asked: Asked, number: int) -> Answer:
    return Answer(b"", 503)


# --- order ---


@pytest.mark.parametrize("batch_size", [1, 3, 7, 16, 100])
def test_order_is_that_of_the_items_whatever_the_chunks_and_the_order_of_replies(batch_size: int) -> None:
    """The fake server answers items backwards, and later requests first."""

    def script(asked: Asked, number: int) -> Answer:
        time.sleep(0.02 * (number == 0))
        prompts = {one["id"]: int(one["prompt"].split()[1]) for one in asked.manifest["items"]}
        return Answer(reply(asked.ids[::-1], lambda i: float(prompts[i])))

    with FakeServer(script) as server, client_of(server.url, batch_size=batch_size) as client:
        assert values(client.score(items(16))["r"]) == [float(i) for i in range(16)]
        assert sorted(len(asked.ids) for asked in server.asked) == sorted(
            min(batch_size, 16 - start) for start in range(0, 16, batch_size)
        )


def test_callers_may_repeat_their_ids() -> None:
    batch = [item(i, id=7) for i in range(5)]
    with serving({"r": Brightness()}) as url, client_of(url, batch_size=2) as client:
        assert values(client.score(batch)["r"]) == [brightness(one) for one in batch]


def test_nothing_in_nothing_out() -> None:
    with FakeServer(honest) as server, RewardClient([server.url], ["a", "b"]) as client:
        assert client.score([]) == {"a": [], "b": []}
        assert server.asked == []


def test_what_is_sent() -> None:
    one = item(3, group=8, metadata={"text": "Meer"})
    with FakeServer(honest) as server, client_of(server.url, timeout_s=60.0) as client:
        client.score([one])
    (asked,) = server.asked
    (sent,) = asked.manifest["items"]
    assert asked.manifest["protocol"] == 1 and asked.manifest["rewards"] == ["r"] and asked.manifest["request_id"]
    assert 30_000 < asked.manifest["deadline_ms"] <= 60_000
    assert (sent["prompt"], sent["group"], sent["metadata"]) == ("item 3", 8, {"text": "Meer"})


# --- totality: replies that lie ---


Reply = dict[str, Any]


def lie(change: Callable[[Reply], Any]) -> Callable[[Asked, int], Answer]:
    """A server whose sound reply was tampered with."""
    return lambda asked, number: Answer(change(reply(asked.ids, lambda i: 0.5)))


def with_items(change: Callable[[list[Any]], list[Any]]) -> Callable[[Reply], Reply]:
    return lambda sound: {**sound, "items": change(sound["items"])}


def with_item(**changes: Any) -> Callable[[Reply], Reply]:
    """The second of three items, changed."""
    return with_items(lambda three: [three[0], {**three[1], **changes}, three[2]])


def with_score(**score: Any) -> Callable[[Reply], Reply]:
    return with_item(scores={"r": score})


BROKEN_REPLIES: dict[str, Callable[[Reply], Any]] = {
    "one too few": with_items(lambda three: three[:2]),
    "one too many": with_items(lambda three: [*three, {"id": 3, "scores": {"r": {"value": 0.5}}}]),
    "none": with_items(lambda three: []),
    "a double id": with_item(id=0),
    "an item twice": with_items(lambda three: [*three, three[0]]),
    "an unknown id": with_item(id=99),
    "an id as string": with_item(id="1"),
    "an id as float": with_item(id=1.0),
    "an id as bool": with_item(id=True),
    "no id": with_items(lambda three: [three[0], {"scores": three[1]["scores"]}, three[2]]),
    "null for a value": with_score(value=None),
    "a string for a value": with_score(value="0.7"),
    "a bool for a value": with_score(value=True),
    "a bare number for a score": with_item(scores={"r": 0.7}),
    "no value": with_score(detail={}),
    "NaN": with_score(value=math.nan),
    "infinity": with_score(value=math.inf),
    "NaN in a detail": with_score(value=0.5, detail={"x": math.nan}),
    "an integer that no float holds": with_score(value=10**400),
    "an integer that no float holds in a detail": with_score(value=0.5, detail={"x": 10**400}),
    "half a surrogate pair": with_score(value=0.5, detail={"text": "\ud800"}),
    "half a surrogate pair for a key": with_score(value=0.5, detail={"\udc00": 1}),
    "an unknown key": lambda sound: {**sound, "extra": 1},
    "null": lambda sound: None,
    "a list": lambda sound: [0.5, 0.5, 0.5],
    "html": lambda sound: b"<html>it works</html>",
    "nothing": lambda sound: b"",
    "cut off": lambda sound: json.dumps(sound).encode()[:-1],
    "no text": lambda sound: b"\xff\xfe",
    "deep": lambda sound: b"[" * 200_000,
}


def test_the_reply_is_sound_before_it_is_tampered_with() -> None:
    with FakeServer(lie(lambda sound: sound)) as server, client_of(server.url) as client:
        assert values(client.score(items(3))["r"]) == [0.5] * 3


@pytest.mark.parametrize("change", BROKEN_REPLIES.values(), ids=BROKEN_REPLIES)
def test_a_reply_that_breaks_the_protocol_is_never_a_number(change: Callable[[Reply], Any]) -> None:
    with FakeServer(lie(change)) as server, client_of(server.url) as client:
        found = failures(client.score(items(3))["r"])
        assert len(server.asked) == 1  # asked again it would lie again
    assert [(one.code, one.retryable) for one in found] == [("bad_reply", False)] * 3
    assert server.url in found[0].message


BROKEN_ITEMS = {
    "a detail of many keys": with_item(scores={"r": {"value": 0.5, "detail": dict.fromkeys(map(str, range(500)), 1)}}),
    "a detail of many values": with_item(scores={"r": {"value": 0.5, "detail": {"x": [0] * 20_000}}}),
    "a detail that is nested deep": with_item(
        scores={"r": {"value": 0.5, "detail": json.loads('{"x":' * 102 + "0" + "}" * 102)}}
    ),
    "both": with_item(errors={"r": {"code": "bad_item", "message": "m"}}),
    "neither": with_item(scores={}),
    "under another name": with_item(scores={"s": {"value": 0.5}}),
}


@pytest.mark.parametrize("change", BROKEN_ITEMS.values(), ids=BROKEN_ITEMS)
def test_neither_or_both_of_score_and_error_fails_alone(change: Callable[[Reply], Any]) -> None:
    with FakeServer(lie(change)) as server, client_of(server.url) as client:
        assert values(client.score(items(3))["r"]) == [0.5, "bad_reply", 0.5]


def test_an_error_of_an_item_is_its_failure() -> None:
    error = {"code": "bad_item", "message": "no mask", "retryable": True}
    with FakeServer(lie(with_item(scores={}, errors={"r": error}))) as server, client_of(server.url) as client:
        outcomes = client.score(items(3))["r"]
    assert outcomes == [Score(0.5), Failure("bad_item", "no mask", True), Score(0.5)]


def test_one_lying_server_spoils_only_its_chunk() -> None:
    def script(asked: Asked, number: int) -> Answer:
        lies = any(one["prompt"] == "item 2" for one in asked.manifest["items"])
        return Answer(b"{}") if lies else honest(asked, number)

    with FakeServer(script) as server, client_of(server.url, batch_size=2) as client:
        assert values(client.score(items(6))["r"]) == [0.0, 1.0, "bad_reply", "bad_reply", 0.0, 1.0]


def test_items_that_cannot_be_sent_fail_alone_and_here() -> None:
    batch = [item(0), item(1, image=np.zeros((2, 2), np.uint8)), item(2, metadata={"x": {1}}), item(3)]
    with FakeServer(honest) as server, client_of(server.url) as client:
        assert values(client.score(batch)["r"]) == [0.0, "bad_item", "bad_item", 1.0]
        assert [one["prompt"] for one in server.asked[0].manifest["items"]] == ["item 0", "item 3"]


# --- retries ---


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
def test_what_may_pass_is_tried_again(status: int) -> None:
    def script(asked: Asked, number: int) -> Answer:
        return honest(asked, number) if number >= 2 else Answer({"error": "later"}, status)

    global_state = random.getstate()
    with FakeServer(script) as server, client_of(server.url) as client:
        assert values(client.score(items(2))["r"]) == [0.0, 1.0]
        assert len(server.asked) == 3
        assert len({asked.manifest["request_id"] for asked in server.asked}) == 1  # a server may know it again
    assert random.getstate() == global_state  # checkpoints hold it, and must not depend on when a server answers


@pytest.mark.parametrize("status", [301, 307, 400, 401, 403, 404, 405, 413, 415, 422])
def test_what_will_not_pass_is_asked_once(status: int) -> None:
    script = lambda asked, number: Answer({"error": "no such luck"}, status, {"Location": "/elsewhere"})  # noqa: E731
    with FakeServer(script) as server, client_of(server.url) as client:
        found = failures(client.score(items(2))["r"])
        assert len(server.asked) == 1
    assert [(one.code, one.retryable) for one in found] == [("refused", False)] * 2
    assert f"HTTP {status}" in found[0].message and "no such luck" in found[0].message


def test_retry_after_is_kept_to() -> None:
    times: list[float] = []

    def script(asked: Asked, number: int) -> Answer:
        times.append(time.monotonic())
        return honest(asked, number) if number else Answer(b"", 429, {"Retry-After": "0.4"})

    with FakeServer(script) as server, client_of(server.url) as client:
        assert values(client.score(items(1))["r"]) == [0.0]
    assert times[1] - times[0] >= 0.4


@pytest.mark.parametrize("header", ["soon", "", "-5", "nan", "Wed, 21 Oct 2015 07:28:00 GMT"])
def test_a_retry_after_that_says_nothing_delays_nothing(header: str) -> None:
    def script(asked: Asked, number: int) -> Answer:
        return honest(asked, number) if number else Answer(b"", 503, {"Retry-After": header})

    with FakeServer(script) as server, client_of(server.url) as client:
        assert values(client.score(items(1))["r"]) == [0.0]


@pytest.mark.parametrize("after", ["3600", "inf", "1e300"])
def test_retry_after_does_not_outlast_the_deadline(after: str) -> None:
    script = lambda asked, number: Answer(b"", 429, {"Retry-After": after})  # noqa: E731
    with FakeServer(script) as server, client_of(server.url, timeout_s=0.3) as client:
        started = time.monotonic()
        (failure,) = failures(client.score(items(1))["r"])
        assert time.monotonic() - started < HANG_S
    assert failure.retryable and (failure.code == "overloaded" or late(failure))


def test_a_reset_connection_is_tried_again() -> None:
    honest_now = threading.Event()

    def behave(connection: socket.socket) -> None:
        if not honest_now.is_set():
            honest_now.set()
            return reset(connection)
        body = json.dumps(reply([0])).encode()
        while connection.recv(65536):  # /info, too
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        return None

    with raw_server(behave) as url, client_of(url) as client:
        assert values(client.score(items(1))["r"]) == [0.0]


def test_a_refused_connection_is_tried_until_the_server_is_there() -> None:
    port = free_port()
    with client_of(f"http://127.0.0.1:{port}") as client:
        pending = client.submit(items(2))
        time.sleep(0.15)
        assert not pending.done()
        with FakeServer(honest, port=port):
            assert values(pending.result(HANG_S)["r"]) == [0.0, 1.0]


def test_refused_to_the_end_is_unavailable_and_may_be_tried_later() -> None:
    with client_of(f"http://127.0.0.1:{closed_port()}", timeout_s=0.3) as client:
        found = failures(client.score(items(3))["r"])
    assert [(one.code, one.retryable) for one in found] == [("unavailable", True)] * 3


@pytest.mark.parametrize("body", [gzip.compress(bytes(50_000_000)), b"not gzip"], ids=["bomb", "a lie"])
def test_a_compressed_reply_is_not_unpacked(body: bytes) -> None:
    """A few megabytes would become gigabytes, past every deadline."""
    with (
        FakeServer(lambda *_: Answer(body, 200, {"Content-Encoding": "gzip"})) as server,
        client_of(server.url) as client,
    ):
        (failure,) = failures(client.score(items(1))["r"])
        assert [asked.headers["Accept-Encoding"] for asked in server.asked] == ["identity"]
    assert failure.code == "bad_reply" and "compressed (gzip)" in failure.message


def test_a_reply_without_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retouch.rewards.client.exchange.MAX_REPLY", 100_000)
    with FakeServer(lambda *_: Answer(b" " * 200_000)) as server, client_of(server.url) as client:
        (failure,) = failures(client.score(items(1))["r"])
    assert failure.code == "bad_reply" and "over 100000 bytes" in failure.message


@pytest.mark.parametrize("status", [200, 418, 503])
def test_words_of_a_server_are_one_short_line_without_the_token(status: int) -> None:
    """Escape sequences would reach the terminal, and 100,000 characters held up its highlighter for minutes."""
    timeout_s = 0.5 if status == 503 else 60.0  # 503 is tried again until time is up
    words = f"\x1b[2J\r\n\u202e{TOKEN} " * 3 + "x" * 100_000

    def script(asked: Asked, number: int) -> Answer:
        row = {"id": 0, "scores": {}, "errors": {"r": {"code": words, "message": words, "retryable": False}}}
        return Answer({"items": [row], "scorers": {}} if status == 200 else words.encode(), status)

    with FakeServer(script) as server, client_of(server.url, token=TOKEN, timeout_s=timeout_s) as client:
        (failure,) = failures(client.score(items(1))["r"])
    for text in (failure.code, failure.message):
        assert text.isprintable() and len(text) <= MOST_CHARACTERS and TOKEN not in text
    assert "***" in failure.message or (status == 503 and (late(failure) or "Timeout" in failure.message))


def test_the_longest_message_of_a_served_scorer_arrives_whole() -> None:
    """It ends with the place of an error in custom code."""
    message = "x" * (MOST_CHARACTERS - 16) + ", at mine.py:123"
    error = {"code": "scorer_error", "message": message, "retryable": False}
    with FakeServer(lie(with_item(scores={}, errors={"r": error}))) as server, client_of(server.url) as client:
        assert client.score(items(3))["r"][1] == Failure("scorer_error", message)


def test_a_detail_is_plain_text_without_the_token() -> None:
    """It goes to files, to tables of a terminal and to the report."""
    detail = {f"\x1b[31m{TOKEN}": 1.0, "text": f"A\n{TOKEN}\x1b[2J\x9b" + "x" * 100_000, "lines": [{"text": "\x07"}]}
    with FakeServer(lie(with_score(value=0.5, detail=detail))) as server, client_of(server.url, token=TOKEN) as client:
        score = client.score(items(3))["r"][1]
    assert isinstance(score, Score)
    assert list(score.detail) == [" [31m***", "text", "lines"]
    assert score.detail["text"].startswith("A\n*** [2J xxx") and len(score.detail["text"]) < 11_000
    assert score.detail["lines"] == [{"text": " "}]


def test_a_value_outside_the_range_that_its_server_declares_is_a_failure() -> None:
    """Until the server reports another revision, which may have another range."""
    revision = "1"

    def script(asked: Asked, number: int) -> Answer:
        told = reply(asked.ids, lambda i: (0.5, 1e30, -0.1)[i])
        return Answer({**told, "scorers": {"r": {"revision": revision}}})

    info = {"scorers": {"r": {"range": [0, 1], "revision": "1"}}}
    with FakeServer(script, info=info) as server, client_of(server.url) as client:
        assert client.wait_ready(60.0) == []
        first, *others = client.score(items(3))["r"]
        assert isinstance(first, Score)
        assert [one.code for one in failures(others)] == ["bad_reply"] * 2
        assert "r is 1e+30, outside its range of 0 to 1" in failures(others)[0].message
        revision = "2"
        assert values(client.score(items(3))["r"]) == [0.5, 1e30, -0.1]


@pytest.mark.parametrize("ready", [True, False])
def test_the_range_of_another_revision_is_read_again(ready: bool) -> None:
    """Also where nobody asked whether the server is ready."""
    info = {"scorers": {"r": {"range": [0, 1], "revision": "1"}}}
    revision = "1"

    def script(asked: Asked, number: int) -> Answer:
        told = reply(asked.ids, lambda i: (0.5, 1.5, 1e30)[i])
        return Answer({**told, "scorers": {"r": {"revision": revision}}})

    with FakeServer(script, info=info) as server, client_of(server.url) as client:
        assert not ready or client.wait_ready(60.0) == []
        kinds = [type(one) for one in client.score(items(3))["r"]]
        assert kinds == [Score, Failure, Failure]
        info["scorers"]["r"], revision = {"range": [0, 2], "revision": "2"}, "2"
        kinds = [type(one) for one in client.score(items(3))["r"]]
        assert kinds == [Score, Score, Failure]


@pytest.mark.parametrize(
    "told", [5, {}, {"range": 5}, {"range": ["x", 1], "revision": "1"}, {"range": [10**400, 1], "revision": "1"}]
)
def test_a_declaration_that_is_none_binds_nothing(told: object) -> None:
    with FakeServer(honest, info={"scorers": {"r": told}}) as server, client_of(server.url) as client:
        assert client.wait_ready(60.0) == []
        assert all(isinstance(one, Score) for one in client.score(items(2))["r"])


def test_names_of_rewards_of_a_server_are_one_short_line() -> None:
    info = {"scorers": {f"\x1b[2J{TOKEN}" + "x" * 100_000: {}}}
    with FakeServer(honest, info=info) as server, client_of(server.url, token=TOKEN) as client:
        (problem,) = client.wait_ready(60.0)
    assert problem.isprintable() and len(problem) < 1100 and TOKEN not in problem


def test_a_server_that_reports_another_revision_every_time(caplog: pytest.LogCaptureFixture) -> None:
    """It fills neither the memory nor the log."""
    revisions = Revisions(["r"], TOKEN)
    for i in range(1000):
        revisions.note("http://a", "r", f"{i}\x1b[2J{TOKEN}" + "x" * 10_000)
    assert revisions.changes == 999
    told = revisions.told("r")
    assert told.startswith("999 [2J***x") and len(told) < 420
    logged = [record.getMessage() for record in caplog.records if record.name == "retouch.rewards.client.revisions"]
    assert len(logged) == 20 and sum(map(len, logged)) < 20_000
    assert not revisions.others_since(time.monotonic(), {"r": told})
    assert revisions.others_since(0.0, {"r": told})
    assert len(revisions._heard["r"]) == 64


def test_long_revisions_that_differ_at_their_end_are_two() -> None:
    revisions = Revisions(["r"], None)
    for end in ("first", "second"):
        revisions.note("http://a", "r", "x" * 1000 + end)
    assert revisions.changes == 1


def test_cookies_of_a_server_are_not_kept() -> None:
    with FakeServer(lambda asked, n: Answer(reply(asked.ids), 200, {"Set-Cookie": f"c{n}=1"})) as server:
        with client_of(server.url) as client:
            for _ in range(3):
                client.score(items(1))
        assert [asked.headers.get("Cookie") for asked in server.asked] == [None] * 3


# --- several servers ---


@pytest.mark.parametrize("dead", ["refuses", "resets", "503", "black hole"])
def test_a_dead_server_is_failed_over(dead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request succeeds although two of three find a dead server first, one with the other, which has half of the
    time: .1 s of it is waited for."""
    shares, real = list[float](), Exchange.ask

    async def ask(self: Exchange, where: str, *request: Any) -> Any:
        *rest, until = request
        shares.append(until - time.monotonic())
        return await real(self, where, *rest, time.monotonic() + 0.1 if where == url else until)

    monkeypatch.setattr(Exchange, "ask", ask)
    with contextlib.ExitStack() as stack:
        alive = stack.enter_context(FakeServer(honest))
        url = {
            "refuses": lambda: f"http://127.0.0.1:{closed_port()}",
            "resets": lambda: stack.enter_context(raw_server(reset)),
            "503": lambda: stack.enter_context(FakeServer(unavailable)).url,
            "black hole": lambda: stack.enter_context(raw_server(black_hole)),
        }[dead]()
        client = stack.enter_context(client_of(url, alive.url, url, batch_size=1))
        outcomes = client.score(items(6))["r"]
    assert values(outcomes) == [0.0] * 6 and 0 < max(shares) <= 30


def test_the_next_attempt_goes_to_another_server_whatever_other_requests_do() -> None:
    """With one counter for all attempts, two requests in step meet the dead server again and again; and where the other
    one has all that it may be sent, a request waits for it."""

    def unhurried(asked: Asked, number: int) -> Answer:
        time.sleep(0.1)
        return honest(asked, number)

    with FakeServer(unhurried) as alive, FakeServer(unavailable) as dead:
        client = client_of(dead.url, alive.url, batch_size=1)
        assert values(client.score(items(20))["r"]) == [0.0] * 20
        client.close()
        assert 1 <= len(dead.asked) <= 10 and len(alive.asked) == 20
        for asked in dead.asked:  # none met it twice
            assert [a.manifest["request_id"] for a in dead.asked].count(asked.manifest["request_id"]) == 1


# --- bounded time ---


@pytest.mark.parametrize("behave", [black_hole, slow_drip, half_closed, reset], ids=lambda b: b.__name__)
@pytest.mark.parametrize("servers", [1, 3])
def test_no_server_holds_a_caller_beyond_the_deadline(behave: Callable[[socket.socket], None], servers: int) -> None:
    timeout = 0.5
    with raw_server(behave) as url, client_of(*[url] * servers, timeout_s=timeout, batch_size=2) as client:
        started = time.monotonic()
        found = failures(client.score(items(6))["r"])
        took = time.monotonic() - started
    assert took < HANG_S
    assert [(one.code, one.retryable) for one in found] == [("unavailable", True)] * 6


def test_a_server_that_does_not_accept_is_bounded_too() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        full = [socket.socket() for _ in range(4)]
        for one in full:  # the backlog takes these; later SYNs are dropped
            one.setblocking(False)
            one.connect_ex(address)
        with client_of(f"http://127.0.0.1:{address[1]}", timeout_s=0.4) as client:
            started = time.monotonic()
            failures(client.score(items(1))["r"])
            assert time.monotonic() - started < HANG_S
        for one in full:
            one.close()


def test_the_server_is_told_the_time_that_is_left() -> None:
    def script(asked: Asked, number: int) -> Answer:
        time.sleep(0.2 * (number == 0))
        return honest(asked, number) if number else Answer(b"", 503)

    with FakeServer(script) as server, client_of(server.url, timeout_s=60.0) as client:
        client.score(items(1))
    first, second = (asked.manifest["deadline_ms"] for asked in server.asked)
    assert 30_000 < first <= 60_000 and first - second >= 200


# --- threads, loops, processes, the end ---


def test_many_threads_share_a_client() -> None:
    batches = [[item(10 * n + k) for k in range(10)] for n in range(12)]
    with serving({"r": Brightness()}) as url, client_of(url, batch_size=3) as client, ThreadPoolExecutor(12) as pool:
        for batch, found in zip(batches, pool.map(client.score, batches), strict=True):
            assert values(found["r"]) == [brightness(one) for one in batch]


def test_inside_a_running_event_loop() -> None:
    async def caller(client: RewardClient) -> list[Any]:
        blocking = client.score(items(2))["r"]
        beside = (await asyncio.to_thread(client.score, items(2)))["r"]
        future = (await asyncio.wrap_future(client.submit(items(2))))["r"]
        return [values(blocking), values(beside), values(future)]

    with FakeServer(honest) as server, client_of(server.url) as client:
        assert asyncio.run(caller(client)) == [[0.0, 1.0]] * 3
        assert asyncio.run(caller(client)) == [[0.0, 1.0]] * 3  # another loop, the same client


def test_submit_does_not_wait() -> None:
    scorer = Gated(gate_score=True)
    with serving({"r": scorer}) as url, client_of(url) as client:
        pending = client.submit(items(2))
        assert not pending.done()
        scorer.open()
        assert values(pending.result(HANG_S)["r"]) == [brightness(one) for one in items(2)]


def test_after_a_fork_the_child_has_a_thread_of_its_own() -> None:
    """In a process of its own: a test process is full of threads, which a fork does not copy."""
    program = """
import os, sys
from tests.rewards.fakes import FakeServer, honest, items, values
from retouch.rewards.client.client import RewardClient
from retouch.rewards.client.revisions import Revisions
with FakeServer(honest) as server, RewardClient([server.url], ["r"], timeout_s=60.0) as client:
    assert values(client.score(items(1))["r"]) == [0.0]
    child = os.fork()
    if not child:
        scored = values(client.submit(items(1)).result(60)["r"]) == [0.0]
        client.close()
        os._exit(0 if scored else 1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert values(client.score(items(1))["r"]) == [0.0]
sys.exit(code)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def client_threads() -> Counter[str]:
    ours = ("reward-client", "asyncio")
    return Counter(thread.name for thread in threading.enumerate() if thread.name.startswith(ours))


def test_close_is_idempotent_and_leaves_no_thread() -> None:
    before = client_threads()
    with FakeServer(honest) as server:
        client = client_of(server.url, batch_size=1)
        client.score(items(8))
        assert client_threads() != before
        client.close()
        client.close()
    assert client_threads() == before
    with pytest.raises(RuntimeError, match="closed"):
        client.score(items(1))


def test_close_right_after_the_start_leaves_no_thread() -> None:
    """The thread may not have begun: its loop is then not running yet."""
    before = client_threads()
    for _ in range(20):
        client_of("http://127.0.0.1:1").close()
    assert client_threads() == before


def test_close_frees_who_waits() -> None:
    with raw_server(black_hole) as url:
        client = client_of(url, timeout_s=600.0)
        pending = client.submit(items(1))
        until(lambda: client.statistics.attempts == 1)
        started = time.monotonic()
        client.close()
        assert time.monotonic() - started < HANG_S
        with pytest.raises(CancelledError):
            pending.result(1)


# --- proxies, tokens ---


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_loopback_ignores_proxies(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{closed_port()}")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with FakeServer(honest) as server, client_of(server.url.replace("127.0.0.1", host)) as client:
        assert values(client.score(items(1))["r"]) == [0.0]
        assert client.wait_ready(60.0) == []


TOKEN = "hunter2-secret"


def test_the_token_is_sent_to_our_server() -> None:
    with serving({"r": Brightness()}, token=TOKEN) as url:
        with client_of(url, token=TOKEN) as client:
            assert client.wait_ready(60.0) == []
            assert values(client.score(items(1))["r"]) == [brightness(item(0))]
            assert list(client.info()[url]["scorers"]) == ["r"]
        with client_of(url, token="wrong") as client:
            (failure,) = failures(client.score(items(1))["r"])
            (problem,) = client.wait_ready(60.0)
    assert failure.code == "refused" and "401" in failure.message
    told = "HTTP 401: the server needs a token, and this process sent another one; set RETOUCH_REWARD_TOKEN to that of"
    assert problem == f"{url}: {told} the server"


def test_the_token_is_nowhere_to_be_read(caplog: pytest.LogCaptureFixture) -> None:
    """Not in a log at any level, nor in a message, although the server echoes what it was sent."""

    def echo(asked: Asked, number: int) -> Answer:
        status = {0: 503, 1: 200}.get(number, 418)
        return Answer(json.dumps(dict(asked.headers)).encode(), status)

    with FakeServer(echo) as server, client_of(server.url, token=TOKEN) as client:
        found = failures(client.score(items(1))["r"] + client.score(items(1))["r"])
        assert [asked.headers["Authorization"] for asked in server.asked] == [f"Bearer {TOKEN}"] * 3
        shown = repr(client) + str(vars(client)["urls"]) + " ".join(str(one) for one in found)
    assert "HTTP 418" in found[1].message and "***" in found[1].message
    assert TOKEN not in shown
    assert caplog.records and TOKEN not in caplog.text


def test_a_token_that_cannot_be_sent_is_refused_without_showing_it() -> None:
    for bad in ("two words", "new\nline"):
        with pytest.raises(ValueError, match="printable ASCII") as caught:
            client_of("http://127.0.0.1:1", token=bad)
        assert bad not in str(caught.value)


@pytest.mark.parametrize("urls", [[], ["localhost:8000"], ["http://"], ["http://me:pw@host"]])
def test_addresses_that_cannot_be_used_are_refused_at_once(urls: list[str]) -> None:
    before = client_threads()
    with pytest.raises(ValueError, match="address"):
        client_of(*urls)
    assert client_threads() == before


# --- readiness ---


def test_ready_servers_have_no_problem() -> None:
    with serving({"r": Brightness()}) as url, client_of(url) as client:
        assert client.wait_ready(60.0) == []


@pytest.mark.usefixtures("patient")
def test_readiness_waits_for_loading() -> None:
    scorer = Gated(gate_load=True)
    with serving({"r": scorer}, wait=False) as url, client_of(url) as client:
        (problem,) = client.wait_ready(0.0)
        assert "503" in problem and "loading" in problem
        threading.Timer(0.2, scorer.open).start()
        assert client.wait_ready(60.0) == []


@pytest.mark.usefixtures("patient")
def test_readiness_of_every_server_or_of_one() -> None:
    dead = f"http://127.0.0.1:{closed_port()}"
    with serving({"r": Brightness()}) as url, client_of(url, dead) as client:
        (problem,) = client.wait_ready(0.0)
        assert dead in problem
        assert client.wait_ready(60.0, every_server=False) == []


@pytest.mark.parametrize(
    ("scorers", "token", "words"),
    [
        ({"other": Brightness()}, None, "has no reward r; it has: other"),
        ({"r": Unloadable()}, None, "no weights"),
        ({"r": Brightness()}, "secret", "401"),
    ],
    ids=["lacks the reward", "failed to load", "wants a token"],
)
def test_what_no_waiting_will_mend_is_said_at_once(scorers: dict[str, Scorer], token: str | None, words: str) -> None:
    with serving(scorers, token=token, wait=False) as url, client_of(url) as client:
        started = time.monotonic()
        (problem,) = client.wait_ready(600.0)
        assert time.monotonic() - started < HANG_S
    assert words in problem


@pytest.mark.parametrize("behave", [black_hole, slow_drip], ids=lambda b: b.__name__)
def test_readiness_is_bounded(behave: Callable[[socket.socket], None]) -> None:
    with raw_server(behave) as url, client_of(url) as client:
        started = time.monotonic()
        assert len(client.wait_ready(0.3)) == 1
        assert time.monotonic() - started < HANG_S


@pytest.mark.parametrize("info", [b"[]", b"null", b"no", b'{"scorers": null}', b'{"scorers": 5}'])
def test_an_odd_info_is_a_problem_not_an_error(info: bytes) -> None:
    def behave(connection: socket.socket) -> None:
        while b"readyz" in connection.recv(65536):
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(info) + info)

    with raw_server(behave) as url, client_of(url) as client:
        (problem,) = client.wait_ready(60.0)
    assert "has no reward r" in problem


def test_info_of_the_servers_that_answer(caplog: pytest.LogCaptureFixture) -> None:
    dead = f"http://127.0.0.1:{closed_port()}"
    with serving({"r": Brightness()}) as url, client_of(url, dead) as client:
        assert list(client.info()) == [url]
    assert any(record.levelno == logging.WARNING and dead in record.getMessage() for record in caplog.records)


def test_a_client_is_its_process_and_one_thread() -> None:
    before = set(threading.enumerate())  # of which those of earlier tests may end meanwhile
    with client_of("http://127.0.0.1:1"):
        until(lambda: len(set(threading.enumerate()) - before) == 1)


@pytest.mark.parametrize(
    "variables",
    [{"ALL_PROXY": "other://127.0.0.1:1"}, {"HTTP_PROXY": "http://127.0.0.1:1", "NO_PROXY": "fd00::/8"},
     {"SSL_CERT_FILE": "/nowhere.pem"}],
    ids=["a proxy of another kind", "an address of IPv6 that httpx cannot read", "certificates that are gone"],
)  # fmt: skip
def test_an_environment_that_httpx_cannot_use_is_named(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They ended a run with a traceback of httpx."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    url = "http://192.0.2.1:1"
    named = pytest.raises(
        ConfigError, match=r"environment: httpx cannot use its proxies or certificates \(.*\(or in lower"
    )
    with named, client_of(url) as client:
        client.wait_ready(1.0)
    with named:
        readiness(url, 1.0)
    with named:
        JudgeClient(f"{url}/v1", "judge", Budget())
