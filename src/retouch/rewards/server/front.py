"""The front process of one instance: `python -m retouch.rewards.server.front`. `launch.py` starts it."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import sys
import threading
from typing import Any, BinaryIO

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from retouch.machine import return_memory_regularly
from retouch.rewards.server.admission import Limits
from retouch.rewards.server.app import app_of
from retouch.rewards.server.worker import ProcessWorker

logger = logging.getLogger(__name__)


class HeadersInTime(H11Protocol):
    """Closes a connection whose request line and headers do not arrive within `header_s` seconds of the connection, or
    of the first byte of a later request."""

    header_s: float
    _due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_headers()

    def data_received(self, data: bytes) -> None:
        request: Any = self.cycle
        super().data_received(data)
        if self.cycle is not request:
            self._stop_waiting()
        elif self._due is None and request is not None and request.response_complete:
            self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _expect_headers(self) -> None:
        self._due = self.loop.call_later(self.header_s, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None


def protocol_of(limits: Limits) -> type[HeadersInTime]:
    """The HTTP protocol with the limit for headers, for uvicorn."""
    return type("HeadersInTime", (HeadersInTime,), {"header_s": limits.header_s})


def run_app(app: FastAPI, listener: socket.socket, limits: Limits) -> None:
    """Serve on a bound socket until SIGTERM or SIGINT; open requests are finished first."""
    config = uvicorn.Config(
        app, http=protocol_of(limits), log_level="warning", timeout_graceful_shutdown=30, backlog=2048
    )
    uvicorn.Server(config).run(sockets=[listener])


def main() -> None:
    """Serve what one line of JSON on standard input describes, until standard input ends: a killed supervisor leaves no
    process behind."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("retouch").setLevel(logging.INFO)
    settings = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_exit_at_end_of, args=(sys.stdin.buffer,), daemon=True, name="supervisor").start()
    return_memory_regularly()
    listener = socket.socket(fileno=settings["listener"])
    logger.info("serving %s on %s (pid %d)", ", ".join(settings["scorers"]), settings["url"], os.getpid())
    worker = ProcessWorker(settings["scorers"], settings["device"], settings["was_ready"])
    token, limits = settings["token"], Limits(**settings["limits"])
    run_app(app_of(worker, settings["device"], token, limits, local=token is None), listener, limits)


def _exit_at_end_of(stream: BinaryIO) -> None:
    stream.read()
    os._exit(0)


if __name__ == "__main__":
    main()
