"""Whoever can reach the port of a server, and has no token, keeps nobody out: with connections, headers, requests and
bodies of every form."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol

from retouch.process.machine import MOST_HANDLES, raise_handle_limit
from retouch.rewards.client.client import RewardClient
from retouch.rewards.protocol import RewardItem
from retouch.rewards.server.admission import Limits
from retouch.types import Outcome, Score
from tests.rewards import test_launch
from tests.rewards.fakes import HANG_S, Brightness, brightness, item, items, serving, values
from tests.rewards.test_launch import TOKEN, served
from tests.rewards.test_server import as_json
from tests.rewards.test_serving import read_to_the_end

SECRET = "hunter2"
CHUNKED = (
    b"POST /score HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n%s\r\n"
)


def connect(url: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), HANG_S)


@contextlib.contextmanager
def many(url: str, count: int, first: bytes = b"") -> Iterator[list[socket.socket]]:
    """Open connections, each of which sends `first`."""
    opened: list[socket.socket] = []
    try:
        for _ in range(count):
            opened.append(connect(url))
            if first:
                with contextlib.suppress(OSError):
                    opened[-1].sendall(first)
        yield opened
    finally:
        for one in opened:
            one.close()


HEADS = {
    "nothing": b"",
    "half a head": b"POST /score HTTP/1.1\r\nHost:",
    "a huge head": b"GET /info HTTP/1.1\r\nX: " + b"x" * 15_000,
    "a wrong token, and no body": b"POST /score HTTP/1.1\r\nHost: a\r\nAuthorization: no\r\nContent-Length: 9\r\n\r\n",
    "requests that need none": b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n" * 50,
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_connections_without_the_token_keep_nobody_out(head: bytes) -> None:
    """Four times as many as there may be; every one is closed within seconds."""
    limits = Limits(connections=32, header_s=1.0)
    with (
        serving({"b": Brightness()}, token=SECRET, limits=limits) as url,
        RewardClient([url], ["b"], token=SECRET) as client,
    ):
        client.score(items(1))
        with many(url, 128, head) as opened:
            started = time.monotonic()
            with RewardClient([url], ["b"], token=SECRET) as newcomer:
                assert values(newcomer.score(items(4))["b"]) == [brightness(one) for one in items(4)]
                assert newcomer.statistics.retries == 0
            for _ in range(4):
                assert values(client.score(items(4))["b"]) == [brightness(one) for one in items(4)]
            assert time.monotonic() - started < HANG_S
            for one in opened:
                read_to_the_end(one)  # a timeout where it stays open
        assert client.statistics.retries == 0


def test_a_known_connection_does_not_give_way() -> None:
    """A slow upload of a client with the token, among strangers."""
    with serving({"b": Brightness()}, token=SECRET, limits=Limits(connections=8)) as url, connect(url) as known:
        known.sendall(CHUNKED % f"Authorization: Bearer {SECRET}\r\n".encode())
        time.sleep(0.2)
        with many(url, 64):
            known.sendall(b"2\r\n{}\r\n0\r\n\r\n")
            assert known.recv(9999).startswith(b"HTTP/1.1 422")


EARLY = {
    "401": (401, Limits(), "wrong", "sized"),
    "401 in chunks": (401, Limits(), "wrong", "chunks"),
    "413": (413, Limits(body=1000), SECRET, "sized"),
    "413 in chunks": (413, Limits(body=1000), SECRET, "chunks"),
}


@pytest.mark.parametrize(("status", "limits", "token", "form"), EARLY.values(), ids=EARLY)
def test_an_answer_before_the_body_is_not_lost(status: int, limits: Limits, token: str, form: str) -> None:
    """A socket that is closed with unread bytes is reset, and an asynchronous client that still writes reads no more:
    nine of ten such answers were lost, and a client with a wrong token retried until its deadline."""
    body = b"x" * 1_000_000

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 60_000):
            yield body[start : start + 60_000]

    async def statuses(url: str) -> list[int]:
        headers = {"Authorization": f"Bearer {token}"}
        async with httpx.AsyncClient(trust_env=False) as client:
            return [
                (await client.post(url, content=body if form == "sized" else pieces(), headers=headers)).status_code
                for _ in range(20)
            ]

    with serving({"b": Brightness()}, token=SECRET, limits=limits) as url:
        assert asyncio.run(statuses(f"{url}/score")) == [status] * 20


def test_a_body_after_its_answer_ends() -> None:
    """Whoever sends for ever is read for `header_s` seconds, or for as many bytes as a request may have."""
    head = b"POST /score HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999\r\n\r\n"
    for limits in (Limits(header_s=0.5), Limits(body=2_000_000)):
        with serving({"b": Brightness()}, token=SECRET, limits=limits) as url, connect(url) as one:
            one.sendall(head)
            assert one.recv(9999).startswith(b"HTTP/1.1 401")
            started = time.monotonic()
            with pytest.raises(OSError, match=r"reset|[Bb]roken pipe"):
                while time.monotonic() < started + 60:
                    one.sendall(b"x" * 60_000)
                    time.sleep(0.01)


def test_a_body_that_is_no_http_frees_its_place_at_once() -> None:
    """400 and the timer that ends the connection came within one call, which then took the timer back."""
    limits = Limits(header_s=0.5, waiting=1)
    with serving({"b": Brightness()}, token=SECRET, limits=limits) as url, connect(url) as one:
        one.sendall(CHUNKED % f"Authorization: Bearer {SECRET}\r\n".encode() + b"ZZ\r\n")
        started = time.monotonic()
        assert read_to_the_end(one).startswith(b"HTTP/1.1 400")
        with RewardClient([url], ["b"], token=SECRET) as client:
            assert values(client.score(items(1))["b"]) == [brightness(item(0))]
        assert time.monotonic() - started < HANG_S
        with pytest.raises(OSError, match=r"reset|[Bb]roken pipe"):
            while time.monotonic() < started + 60:
                one.sendall(b"x")
                time.sleep(0.05)


def test_a_wrong_token_ten_thousand_times(capfd: pytest.CaptureFixture[str]) -> None:
    with serving({"b": Brightness()}, token=SECRET) as url:
        head = b"GET /info HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer wrong\r\n\r\n"

        def ask(_: int) -> bytes:
            with connect(url) as one:
                one.sendall(head * 10)
                return read_to_the_end(one)

        with ThreadPoolExecutor(4) as pool:
            for reply in pool.map(ask, range(1000)):
                assert reply.count(b"HTTP/1.1 401") == 1  # the first ends the connection
        assert httpx.get(f"{url}/livez", trust_env=False).status_code == 200
    assert len("".join(capfd.readouterr())) < 10_000


@pytest.mark.parametrize("known", [True, False], ids=["with the token", "without"])
def test_chunks_of_one_byte_do_not_hold_the_loop(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body of them held it for 2 s: of one connection, a turn of the loop reads 4 KB."""
    turns, real = [Counter[int]()], H11Protocol.data_received

    def spy(self: H11Protocol, data: bytes) -> None:
        if not turns[-1]:
            asyncio.get_running_loop().call_soon(lambda: turns.append(Counter()))
        turns[-1][id(self)] += len(data)
        real(self, data)

    monkeypatch.setattr(H11Protocol, "data_received", spy)
    authorization = f"Authorization: Bearer {SECRET}\r\n".encode() if known else b""
    with serving({"b": Brightness()}, token=SECRET) as url, connect(url) as hostile, connect(url) as other:
        with contextlib.suppress(OSError):  # without the token it is closed
            hostile.sendall(CHUNKED % authorization + b"1\r\nx\r\n" * 40_000)
        for _ in range(20):
            other.sendall(b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n")
            reply = b""
            while not reply.endswith(b"}"):
                reply += other.recv(9999)
            assert reply.startswith(b"HTTP/1.1 200")
            if not known:
                break
        if known:
            hostile.sendall(b"0\r\n\r\n")
            assert hostile.recv(9999).startswith(b"HTTP/1.1 422")
    assert max(size for turn in turns for size in turn.values()) <= 2 * 4096  # a turn may end between two connections
    assert not known or sum(turn.total() for turn in turns) > 240_000


def test_a_body_in_chunks_is_whole() -> None:
    """Slices end in the middle of chunks."""
    body = json.dumps({**as_json(items(8)), "rewards": ["b"]}).encode()
    with serving({"b": Brightness()}) as url:
        for size in (1, 7, 4096, 100_000):
            chunks = (body[i : i + size] for i in range(0, len(body), size))
            reply = httpx.post(
                f"{url}/score",
                content=chunks,
                headers={"Content-Type": "application/json"},
                trust_env=False,
                timeout=30,
            )
            found = [one["scores"]["b"]["value"] for one in reply.json()["items"]]
            assert found == [brightness(one) for one in items(8)]


def test_requests_in_one_piece_are_all_answered() -> None:
    with serving({"b": Brightness()}) as url, connect(url) as one:
        one.sendall(b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 2000)
        received = b""
        while received.count(b"HTTP/1.1 200") < 2000:
            received += one.recv(65536)


class Verbose(Brightness):
    def one(self, item: RewardItem) -> Outcome:
        return Score(brightness(item), {"text": "x" * 9000})


@pytest.mark.parametrize("takes", [True, False], ids=["slowly", "never"])
def test_a_reply_that_nobody_takes_ends_its_connection(takes: bool) -> None:
    """Of 9 MB, more than a socket buffers."""
    body = json.dumps({**as_json([item(0, id=i) for i in range(1000)]), "rewards": ["b"]}).encode()
    head = b"POST /score HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    with serving({"b": Verbose()}, limits=Limits(reply_s=3.0)) as url, socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.settimeout(20)
        one.connect(("127.0.0.1", int(url.rpartition(":")[2])))
        one.sendall(head % len(body) + body)
        received = len(one.recv(4096))
        time.sleep(0.2 if takes else 6.0)
        with contextlib.suppress(ConnectionError):
            while (takes and received < 9_000_000) or not takes:
                received += len(chunk := one.recv(1 << 20))
                if not chunk:
                    break
        assert (received > 9_000_000) == takes
        assert httpx.get(f"{url}/livez", trust_env=False).status_code == 200


def test_the_limit_of_handles_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"now": (1024, 20_000)}
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.update(now=new))
    assert raise_handle_limit() == 20_000 and limits["now"] == (20_000, 20_000)
    assert raise_handle_limit() == 20_000
    limits["now"] = (256, resource.RLIM_INFINITY)
    assert raise_handle_limit() == MOST_HANDLES and limits["now"] == (MOST_HANDLES, resource.RLIM_INFINITY)


def test_more_idle_connections_than_handles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server whose limits are low, soft and hard: 64 images are scored, and the log stays short."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nulimit -Sn 128\nulimit -Hn 256\nexec '{sys.executable}' \"$@\"\n")
    python.chmod(0o755)
    monkeypatch.setattr(test_launch, "SERVE", (str(python), *test_launch.SERVE[1:]))
    logs = tmp_path / "logs"
    with served(tmp_path, "jpeg_size", "--log-dir", str(logs), **{TOKEN: SECRET}) as one:
        with many(one.url, 400), RewardClient([one.url], ["jpeg_size"], token=SECRET) as client:
            started = time.monotonic()
            found = values(client.score(items(64))["jpeg_size"])
            assert all(isinstance(value, float) for value in found) and time.monotonic() - started < HANG_S
        assert one.get("/livez").status_code == 200
        assert sum(path.stat().st_size for path in logs.iterdir()) < 200_000
