"""A kit of faults: a fake server that misbehaves by a seeded plan, and a TCP proxy that breaks connections.

The scorer behind it gives every item a number that depends on its pixels alone, so that a score that is another item's,
or nobody's, is seen.
"""

from __future__ import annotations

import hashlib
import math
import random
import socket
import struct
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import Any

from retouch.rewards.protocol import RewardItem
from tests.rewards.fakes import Answer, Asked, FakeServer, reply

BEFORE = ("429", "500", "503", "late")
"""Faults in place of an answer, or before it."""

INSTEAD = ("garbage", "nan", "too few", "too many", "twice", "html")
"""Answers that break the protocol."""


def true_value(item: RewardItem) -> float:
    """What the scorer of the kit says of an item: its prompt names it."""
    return value_of(item.prompt)


def value_of(prompt: str) -> float:
    return int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=6).digest(), "big") / 2**48


class FaultyServer(FakeServer):
    """Every request has a fault with probability `rate` of what may pass, and `broken` of what will not."""

    def __init__(self, seed: int, rate: float = 0.08, broken: float = 0.04, port: int = 0) -> None:
        self.plan = random.Random(seed)
        self.rate = rate
        self.broken = broken
        self.faults: Counter[str] = Counter()
        self._lock = threading.Lock()
        super().__init__(self.misbehave, port)

    def misbehave(self, asked: Asked, number: int) -> Answer:
        with self._lock:
            draw, which, shuffled = self.plan.random(), self.plan.random(), self.plan.random()
        prompts = {one["id"]: one["prompt"] for one in asked.manifest["items"]}
        order = sorted(prompts, key=lambda i: (i * shuffled) % 1)  # replies come in any order
        sound: dict[str, Any] = reply(order, lambda i: value_of(prompts[i]))
        if draw < self.rate:
            fault = BEFORE[int(which * len(BEFORE))]
            self.faults[fault] += 1
            if fault == "late":
                time.sleep(0.05)
                return Answer(sound)
            headers = {"Retry-After": "0.02"} if fault == "429" else {}
            return Answer({"error": fault}, int(fault), headers)
        if draw < self.rate + self.broken:
            fault = INSTEAD[int(which * len(INSTEAD))]
            self.faults[fault] += 1
            return Answer(_broken(fault, sound))
        return Answer(sound)


def _broken(fault: str, sound: dict[str, Any]) -> Any:
    rows = sound["items"]
    if fault == "garbage":
        return b"\x00\xff{" + str(rows).encode()
    if fault == "html":
        return b"<html>502</html>"
    if fault == "nan":
        rows[0]["scores"]["r"]["value"] = math.nan
    elif fault == "too few":
        sound["items"] = rows[1:]
    elif fault == "too many":
        sound["items"] = [*rows, {"id": 10**6, "scores": {"r": {"value": 0.5}}}]
    else:
        sound["items"] = [*rows, rows[0]]
    return sound


class FaultyProxy:
    """Forwards TCP to a server, and by a seeded plan resets connections, cuts replies short, or stalls.

    `restart()` closes every connection and refuses new ones for a moment, as a server that is started again.
    """

    def __init__(self, target: str, seed: int, rate: float = 0.03) -> None:
        self.plan = random.Random(seed)
        self.rate = rate
        self.faults: Counter[str] = Counter()
        host, _, port = target.removeprefix("http://").partition(":")
        self._target = (host, int(port))
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self._address = self._listener.getsockname()
        self.url = f"http://127.0.0.1:{self._address[1]}"
        self._closed = False
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def __enter__(self) -> FaultyProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._stop()

    def restart(self, away_s: float = 0.2) -> None:
        self.faults["restart"] += 1
        self._stop()
        time.sleep(away_s)
        self._listener = socket.create_server(self._address, backlog=256)
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def _stop(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for one in self._open:
                _reset(one)
            self._open.clear()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
                server = socket.create_connection(self._target, timeout=30)
            except OSError:
                return
            with self._lock:
                self._open |= {client, server}
            threading.Thread(target=self._forward, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._forward, args=(server, client, True), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, replies: bool) -> None:
        """`replies`: whether these are the server's words, whose first bytes may be all that comes through."""
        with suppress(OSError):
            while data := source.recv(65536):
                fault = self._fault() if replies else None
                if fault == "reset":
                    _reset(sink)
                    break
                if fault == "half-close":
                    sink.sendall(data[: len(data) // 2])
                    sink.shutdown(socket.SHUT_WR)
                    break
                if fault == "stall":
                    time.sleep(0.05)
                sink.sendall(data)
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        with self._lock:
            self._open -= {source, sink}

    def _fault(self) -> str | None:
        with self._lock:
            if self.plan.random() >= self.rate:
                return None
            fault = ("reset", "half-close", "stall")[int(self.plan.random() * 3)]
            self.faults[fault] += 1
            return fault


def _reset(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)
