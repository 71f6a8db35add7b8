"""The front process of one instance: `python -m retouch.rewards.server.front`. `launch.py` starts it."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
from typing import BinaryIO

import uvicorn
from fastapi import FastAPI

from retouch.rewards.server.admission import Limits
from retouch.rewards.server.app import app_of
from retouch.rewards.server.worker import ProcessWorker

logger = logging.getLogger(__name__)


def run_app(app: FastAPI, listener: socket.socket) -> None:
    """Serve on a bound socket until SIGTERM or SIGINT; open requests are finished first."""
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=30, backlog=2048)
    uvicorn.Server(config).run(sockets=[listener])


def main() -> None:
    """Serve what one line of JSON on standard input describes, until standard input ends: a killed supervisor leaves no
    process behind."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("retouch").setLevel(logging.INFO)
    settings = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_exit_at_end_of, args=(sys.stdin.buffer,), daemon=True, name="supervisor").start()
    listener = socket.socket(fileno=settings["listener"])
    logger.info("serving %s on %s (pid %d)", ", ".join(settings["scorers"]), settings["url"], os.getpid())
    worker = ProcessWorker(settings["scorers"], settings["device"])
    token, limits = settings["token"], Limits(**settings["limits"])
    run_app(app_of(worker, settings["device"], token, limits, local=token is None), listener)


def _exit_at_end_of(stream: BinaryIO) -> None:
    stream.read()
    os._exit(0)


if __name__ == "__main__":
    main()
