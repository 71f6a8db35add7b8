"""The front process of one instance: `python -m retouch.rewards.server.front`. `launch.py` starts it."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
from dataclasses import replace
from typing import BinaryIO

import uvicorn
from fastapi import FastAPI

from retouch.process.machine import raise_handle_limit
from retouch.rewards.server import FINISH_S
from retouch.rewards.server.admission import Limits
from retouch.rewards.server.app import app_of
from retouch.rewards.server.connections import protocol_of
from retouch.rewards.server.output import FewRepeats, begin_process
from retouch.rewards.server.worker import ProcessWorker

logger = logging.getLogger(__name__)


def run_app(app: FastAPI, listener: socket.socket, limits: Limits, token: str | None) -> None:
    """Serve on a bound socket until SIGTERM or SIGINT; open requests are finished first."""
    handles = raise_handle_limit()
    limits = replace(limits, connections=min(limits.connections, handles // 2))
    config = uvicorn.Config(
        app,
        loop="asyncio",  # uvloop, which uvicorn prefers where it is installed, cannot start a process in a group
        http=protocol_of(limits, token),
        ws="none",  # an upgrade would replace the protocol, which counts connections
        log_config=None,  # its lines go the way of all others, which bounds them
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=FINISH_S,
        backlog=min(2048, handles // 4),  # connections that may be accepted in one turn of the loop
    )
    uvicorn.Server(config).run(sockets=[listener])


def main() -> None:
    """Serve what one line of JSON on standard input describes, until standard input ends: a killed supervisor leaves no
    process behind."""
    begin_process()
    for handler in logging.getLogger().handlers:
        handler.addFilter(FewRepeats())
    settings = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_exit_at_end_of, args=(sys.stdin.buffer,), daemon=True, name="supervisor").start()
    listener = socket.socket(fileno=settings["listener"])
    logger.info("serving %s on %s (pid %d)", ", ".join(settings["scorers"]), settings["url"], os.getpid())
    worker = ProcessWorker(settings["scorers"], settings["device"], settings["was_ready"])
    token, limits = settings["token"], Limits(**settings["limits"])
    run_app(app_of(worker, settings["device"], token, limits, local=token is None), listener, limits, token)


def _exit_at_end_of(stream: BinaryIO) -> None:
    stream.read()
    os._exit(0)


if __name__ == "__main__":
    main()
