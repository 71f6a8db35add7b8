"""Scorers, servers and pictures to test rewards with. Servers listen on a free loopback port in a thread."""

from __future__ import annotations

import asyncio
import email
import json
import os
import re
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn
from fastapi import FastAPI

from retouch.rewards import REWARDS
from retouch.rewards.client.exchange import Exchange, NotReady
from retouch.rewards.protocol import CheckedScorer, Pixels, RewardItem, Scorer, ScorerSpec
from retouch.rewards.server.admission import Limits
from retouch.rewards.server.app import app_of
from retouch.rewards.server.connections import protocol_of
from retouch.rewards.server.frames import Scored
from retouch.rewards.server.process import load_all, score_rewards
from retouch.types import Failure, Outcome, Score

# --- items ---


def picture(seed: int, height: int = 6, width: int = 5) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def half_mask(height: int = 6, width: int = 5) -> Pixels:
    """The left two columns."""
    mask = np.zeros((height, width), np.uint8)
    mask[:, :2] = 255
    return mask


def item(number: int = 0, **fields: Any) -> RewardItem:
    given: dict[str, Any] = {"id": number, "prompt": f"item {number}", "image": picture(number), **fields}
    return RewardItem(**given)


def items(count: int) -> list[RewardItem]:
    """Their image says which one they are: `Brightness` scores each differently."""
    return [item(i) for i in range(count)]


def values(outcomes: Sequence[Outcome]) -> list[float | str]:
    """Values of scores, codes of failures."""
    return [o.value if isinstance(o, Score) else o.code for o in outcomes]


# --- scorers ---


def make_with(monkeypatch: pytest.MonkeyPatch, make: Callable[[str, dict[str, Any]], Any]) -> None:
    """Let entries make what `make` returns for the name and the options of their scorer."""
    for entry in REWARDS.values():
        monkeypatch.setattr(entry, "make", lambda self: make(self.scorer, self.scorer_options()))


def score_checked(scorer: Scorer, items: Sequence[RewardItem]) -> list[Outcome]:
    return CheckedScorer(scorer).score(items)


class Brightness:
    """The mean of the picture over 255: exact, and different for every random picture."""

    span = (0.0, 1.0)

    def __init__(self, name: str = "brightness", needs: Sequence[str] = (), delay_s: float = 0.0) -> None:
        self.spec = ScorerSpec(name, self.span, frozenset(needs), "fake 1", "Apache-2.0")
        self.delay_s = delay_s
        self.seen: list[RewardItem] = []

    def load(self, device: str) -> None: ...

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        time.sleep(self.delay_s)
        self.seen += items
        return [self.one(item) for item in items]

    def one(self, item: RewardItem) -> Outcome:
        return Score(brightness(item), {"pixels": int(item.image.shape[0] * item.image.shape[1])})


def brightness(item: RewardItem) -> float:
    return float(item.image.mean() / 255)


class Scripted(Brightness):
    """Returns whatever a function of the batch returns, typed or not."""

    span = (-1000.0, 1000.0)

    def __init__(self, script: Callable[[Sequence[RewardItem]], Any], needs: Sequence[str] = ()) -> None:
        super().__init__("scripted", needs)
        self.script = script

    def score(self, items: Sequence[RewardItem]) -> Any:
        self.seen += items
        return self.script(items)


class Poisoned(Brightness):
    """Raises for a batch that holds a prompt "poison", and fails a prompt "refused" alone."""

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        if any(item.prompt == "poison" for item in items):
            raise RuntimeError("choked")
        return super().score(items)

    def one(self, item: RewardItem) -> Outcome:
        return Failure("bad_item", "not this one") if item.prompt == "refused" else super().one(item)


class Gated(Brightness):
    """Loads, or scores, only once a test lets it."""

    def __init__(self, gate_load: bool = False, gate_score: bool = False) -> None:
        super().__init__()
        self.may_load, self.may_score, self.scoring = threading.Event(), threading.Event(), threading.Event()
        if not gate_load:
            self.may_load.set()
        if not gate_score:
            self.may_score.set()

    def load(self, device: str) -> None:
        assert self.may_load.wait(60)

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        self.scoring.set()
        assert self.may_score.wait(60)
        return super().score(items)

    def open(self) -> None:
        self.may_load.set()
        self.may_score.set()


class Unloadable(Brightness):
    def load(self, device: str) -> None:
        raise RuntimeError("no weights")


# --- our server in a thread ---


class ThreadWorker:
    """Scorers in one thread of this process."""

    def __init__(self, scorers: Mapping[str, Scorer], device: str) -> None:
        self.scorers = {name: CheckedScorer(scorer) for name, scorer in scorers.items()}
        self.device = device
        self.ready = False
        self.problem: str | None = None
        self.specs: Mapping[str, ScorerSpec] = {name: scorer.spec for name, scorer in scorers.items()}
        self.restarts = 0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="scorer")

    @property
    def pid(self) -> int:
        return os.getpid()

    async def start(self) -> None:
        self._thread.submit(self._load)

    async def stop(self) -> None:
        await asyncio.to_thread(self._thread.shutdown, wait=True, cancel_futures=True)

    async def score(self, names: Sequence[str], items: Sequence[RewardItem], deadlines: Sequence[float]) -> Scored:
        loop = asyncio.get_running_loop()
        scored = await loop.run_in_executor(self._thread, score_rewards, self.scorers, names, items, deadlines)
        self._describe()
        return scored

    def _load(self) -> None:
        try:
            load_all({name: checked.scorer for name, checked in self.scorers.items()}, self.device)
        except Exception as error:  # shown by /readyz and in the log
            self.problem = f"{type(error).__name__}: {error}"
        else:
            self._describe()
            self.ready = True

    def _describe(self) -> None:
        self.specs = {name: checked.scorer.spec for name, checked in self.scorers.items()}


def create_app(
    scorers: Mapping[str, Scorer], device: str = "cpu", token: str | None = None, limits: Limits | None = None
) -> FastAPI:
    """The ASGI app of the package over scorers in a thread of this process."""
    return app_of(ThreadWorker(scorers, device), device, token, limits)


@contextmanager
def serving(
    scorers: Mapping[str, Scorer],
    token: str | None = None,
    limits: Limits | None = None,
    port: int = 0,
    wait: bool = True,
) -> Iterator[str]:
    """The app of the package under uvicorn -> its address. `wait`: until it is ready."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    app = create_app(scorers, token=token, limits=limits)
    protocol = protocol_of(limits or Limits(), token)
    server = uvicorn.Server(uvicorn.Config(app, http=protocol, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        until(lambda: server.started)
        if wait:
            until(lambda: b" 200 " in get(url, "/readyz", token), 60)
        yield url
    finally:
        for scorer in scorers.values():
            if isinstance(scorer, Gated):
                scorer.open()
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


def get(url: str, path: str, token: str | None = None) -> bytes:
    """A raw GET: the tests of the server do not rest on the client's library."""
    host, _, port = url.removeprefix("http://").partition(":")
    header = f"Authorization: Bearer {token}\r\n" if token else ""
    with socket.create_connection((host, int(port)), timeout=HANG_S) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n{header}\r\n".encode())
        return b"".join(iter(lambda: connection.recv(65536), b""))


HANG_S = 20.0
"""Only what hangs takes longer: a busy machine holds a process up for a second or two, again and again. Where a test
asserts that something does not wait for another thing, that takes 60 s or more."""


def until(condition: Callable[[], bool], timeout_s: float = HANG_S) -> None:
    """Wait for a condition, which must come true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def freeze(pid: int) -> None:
    """Stop a process, and wait until it is: the thread that gets the signal may come after others that still run."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: all(state(thread) == "T" for thread in Path(f"/proc/{pid}/task").iterdir()))


def state(folder: Path) -> str:
    """The state of a process or thread, by its folder in /proc."""
    return (folder / "stat").read_text().rpartition(")")[2].split()[0]


def unhurried(monkeypatch: pytest.MonkeyPatch, *urls: str) -> None:
    """Whether these servers are ready (without addresses: all) is waited for until they answer, however short the time
    that a test gives to those that do not."""
    real = Exchange.readiness

    async def readiness(self: Exchange, url: str, timeout_s: float) -> NotReady | None:
        return await real(self, url, HANG_S if url in urls or not urls else timeout_s)

    monkeypatch.setattr(Exchange, "readiness", readiness)


# --- servers that misbehave ---


@dataclass
class Asked:
    """A request as a fake server got it."""

    headers: Mapping[str, str]
    manifest: dict[str, Any]

    @property
    def ids(self) -> list[int]:
        return [item["id"] for item in self.manifest["items"]]


@dataclass
class Answer:
    """What a fake server says."""

    body: Any
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict[str, str])

    def bytes(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


def reply(ids: Sequence[Any], value: Callable[[Any], Any] = float, name: str = "r") -> dict[str, Any]:
    """A sound reply: `value(id)` for every id."""
    scored = [{"id": i, "scores": {name: {"value": value(i)}}} for i in ids]
    return {"items": scored, "scorers": {name: {"revision": "1"}}}


class _Server(ThreadingHTTPServer):
    request_queue_size = 256  # of 5, a burst of connections waits seconds for the kernel to try again


class FakeServer:
    """Answers every POST /score as `script(request, number of it)` says, every GET with `info`, and remembers what it
    was asked."""

    def __init__(self, script: Callable[[Asked, int], Answer], port: int = 0, info: Any = None) -> None:
        self.asked: list[Asked] = []
        fake, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                body = self.rfile.read(length)
                if len(body) < length:  # the caller hung up half-way
                    self.close_connection = True
                    return
                with lock:
                    asked = Asked(dict(self.headers), manifest_of(self.headers["Content-Type"], body))
                    fake.asked.append(asked)
                    number = len(fake.asked) - 1
                self.answer(script(asked, number))

            def do_GET(self) -> None:
                self.answer(Answer({"scorers": {"r": {}}} if info is None else info))

            def answer(self, answer: Answer) -> None:
                payload = answer.bytes()
                with suppress(OSError):  # the client may have left
                    self.send_response(answer.status)
                    for name, value in {"Content-Length": str(len(payload)), **answer.headers}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(payload)

            def log_message(self, format: str, *args: Any) -> None: ...

        self._server = _Server(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def manifest_of(content_type: str, body: bytes) -> dict[str, Any]:
    """Read by the standard library's mail parser, which shares nothing with ours."""
    message = email.message_from_bytes(f"Content-Type: {content_type}\r\n\r\n".encode() + body)
    for part in message.get_payload():  # type: ignore[union-attr]
        if 'name="manifest"' in str(part["Content-Disposition"]):  # type: ignore[index]
            return json.loads(part.get_payload(decode=True))  # type: ignore[union-attr]
    raise AssertionError("no manifest")


def honest(asked: Asked, number: int) -> Answer:
    """Every item scores its id."""
    return Answer(reply(asked.ids))


@contextmanager
def raw_server(behave: Callable[[socket.socket], None]) -> Iterator[str]:
    """A TCP server that does `behave` with every connection -> its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    kept: list[socket.socket] = []

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            kept.append(connection)
            threading.Thread(target=guarded, args=(connection,), daemon=True).start()

    def guarded(connection: socket.socket) -> None:
        with suppress(OSError):
            behave(connection)

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
        listener.close()
        for connection in kept:
            connection.close()


def black_hole(connection: socket.socket) -> None:
    """Reads everything, answers nothing."""
    while connection.recv(65536):
        pass


def slow_drip(connection: socket.socket) -> None:
    """A reply whose bytes come often enough for any read timeout, and never end."""
    read_request(connection)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    while True:
        connection.sendall(b" ")
        time.sleep(0.02)


def reset(connection: socket.socket) -> None:
    """Hangs up with a TCP reset once it was asked."""
    read_request(connection)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def half_closed(connection: socket.socket) -> None:
    """Promises more than it sends, then ends its side."""
    read_request(connection)
    connection.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"items"')
    connection.shutdown(socket.SHUT_WR)


def read_request(connection: socket.socket) -> None:
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536)
    length = re.search(rb"content-length: (\d+)", data.lower())
    left = int(length[1] if length else 0) - len(data.split(b"\r\n\r\n", 1)[1])
    while left > 0:
        left -= len(connection.recv(65536))


_HELD: list[socket.socket] = []


def closed_port() -> int:
    """A port that nobody listens on: held as long as this process lives, or another test's server could get it."""
    held = socket.socket()
    held.bind(("127.0.0.1", 0))
    _HELD.append(held)
    return held.getsockname()[1]


def free_port() -> int:
    """A port to start a server on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
