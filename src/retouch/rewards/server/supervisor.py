"""The instances of `retouch reward serve`, and the supervisor that restarts those that end."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx

from retouch.errors import ConfigError
from retouch.process.signals import ENDING
from retouch.rewards.addresses import name_of
from retouch.rewards.client.servers import ServerStatus, readiness
from retouch.rewards.server import FINISH_S

logger = logging.getLogger(__name__)

WATCH_S = 0.1
_EARLY_S = 5.0  # a front that ends sooner than this after its start may never become ready
_EARLY_DEATHS = 5
DRAIN_S = FINISH_S + 15.0
"""Seconds for a front to end: `FINISH_S` for its open requests, and 10 for its worker."""

_STATUS_S = 1.0
_ASK_S = 0.5
_BACKOFF_S = 0.2
_BACKOFF_MAX_S = 30.0


def backoff_s(attempts: int) -> float:
    """Seconds before a process is started again: none after the first failed attempt, then twice as long each time."""
    return 0.0 if attempts < 2 else min(_BACKOFF_MAX_S, _BACKOFF_S * 2 ** min(attempts, 10))


class Instance:
    """A front process, and its port, which stays bound while the process is restarted: clients wait meanwhile.

    Attributes:
        local_url: where this machine reaches it.
        status: "ready" or "failed", of this process, once it is known.
        was_ready: whether a process of it, also of an earlier supervisor, has been ready: its scorers can be loaded.
        attempts: starts since it was last ready.

    Args:
        ready_mark: file that is made once it is ready, for the supervisor that takes the place of a killed one.
    """

    def __init__(
        self, listener: socket.socket, host: str, device: str, log: Path | None, ready_mark: Path | None = None
    ) -> None:
        self.listener = listener
        self.device = device
        self.log = log
        port = listener.getsockname()[1]
        self.url = f"http://{name_of(host)}:{port}"
        self.local_url = f"http://{_reachable_here(host)}:{port}"
        self.process: subprocess.Popen[bytes] | None = None
        self.early_deaths = 0
        self.attempts = 0
        self.was_ready = ready_mark is not None and ready_mark.exists()
        self._ready_mark = ready_mark
        self.status: ServerStatus | None = None
        self._started = 0.0
        self._start_at: float | None = None
        self._retired = False  # it was ended, and what it still reports does not count
        self._lock = threading.Lock()  # of `process` and `status`

    def entry(self) -> dict[str, Any]:
        """The entry of the endpoints file."""
        log = {} if self.log is None else {"log": str(self.log)}
        return {"url": self.url, "device": self.device, "pid": os.getpid(), **log}

    def start(self, settings: Mapping[str, Any]) -> None:
        """Start the front; it reads its settings from standard input, and ends when that ends."""
        command = [sys.executable, "-P", "-m", "retouch.rewards.server.front"]
        with ExitStack() as stack, self._lock:
            stream = None
            if self.log is not None:
                self.log.parent.mkdir(parents=True, exist_ok=True)
                stream = stack.enter_context(self.log.open("ab"))
            # a session of its own: Ctrl-C is handled by the supervisor, which lets requests finish
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=stream,
                pass_fds=[self.listener.fileno()],
                start_new_session=True,
            )
            self.status, self._retired = None, False
        assert self.process.stdin is not None
        line = {**settings, "listener": self.listener.fileno(), "device": self.device, "url": self.url}
        line["was_ready"] = self.was_ready
        with suppress(BrokenPipeError):  # it died already, which the supervisor notices
            self.process.stdin.write(json.dumps(line).encode() + b"\n")
            self.process.stdin.flush()
        self._started = time.monotonic()
        self.attempts += 1

    def ask(self) -> ServerStatus | None:
        """Ask the front, and keep what it reports as `status` once its scorers are loaded or failed -> it, then."""
        process = self.process
        try:
            found = readiness(self.local_url, _STATUS_S, direct=True)
        except (httpx.RequestError, TimeoutError):  # it is being started
            return None
        with self._lock:
            if found.status not in ("ready", "failed") or process is not self.process or self._retired:
                return None
            self.status = found
            if found.status == "ready":
                self.was_ready, self.attempts = True, 0
                if self._ready_mark is not None:
                    with suppress(OSError):
                        self._ready_mark.touch()
        return found

    def retire(self) -> None:
        """End the front, which failed to load what another instance has loaded: it is then started again."""
        with self._lock:
            self.was_ready, self._retired, self.status = True, True, None
            if self.process is not None:
                self.process.terminate()

    def died(self) -> bool:
        """Whether the front has ended since the last call; counts consecutive deaths soon after the start."""
        if self.process is None or self.process.poll() is None or self._start_at is not None:
            return False
        early = time.monotonic() - self._started < _EARLY_S
        self.early_deaths = self.early_deaths + 1 if early else 0
        self._start_at = time.monotonic() + (backoff_s(self.attempts) if self.was_ready else 0.0)
        return True

    def start_if_due(self, settings: Mapping[str, Any]) -> None:
        """Start a front that has ended, once its time has come; with no memory or process for it, later."""
        if self._start_at is None or time.monotonic() < self._start_at:
            return
        try:
            self.start(settings)
        except OSError as error:
            self.attempts += 1
            self._start_at = time.monotonic() + max(1.0, backoff_s(self.attempts))
            logger.error("the server on %s cannot be started (%s); the next attempt follows", self.url, error)
        else:
            self._start_at = None


class Supervisor:
    """Keeps every instance running until SIGINT or one of `ENDING`; then they finish their requests and end.

    One that never was ready is given up after a few attempts, because its scorers may not be loadable at all; one that
    was, or whose scorers another instance has loaded, is started again for ever, less and less often.
    """

    def __init__(self, instances: Sequence[Instance], settings: Mapping[str, Any], *, watch_loading: bool) -> None:
        """Args:
        watch_loading: log when an instance is ready, and end when none of them can load its scorers.
        """
        self.instances = instances
        self.settings = settings
        self._stop = threading.Event()
        self._watch_loading = watch_loading

    def start(self) -> None:
        for number in (signal.SIGINT, *ENDING):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup's choice, or that of a run for its own server
                signal.signal(number, lambda *_: self._stop.set())
        for one in self.instances:
            one.start(self.settings)

    def run(self) -> None:
        """Raises:
        ConfigError: an instance that repeatedly ends as soon as it is started, or no instance can load its scorers.
        """
        # in a thread: a server that is being started does not reply, and may take its time
        threading.Thread(target=self._ask, daemon=True, name="loading-watch").start()
        try:
            while not self._stop.wait(WATCH_S):
                for one in self.instances:
                    if one.died():
                        self._report(one)
                    one.start_if_due(self.settings)
                self._retry_failed()
                if self._watch_loading:
                    self._require_one_loads()
        finally:
            self._end()

    def _report(self, one: Instance) -> None:
        code = one.process.returncode if one.process else None
        if one.early_deaths >= _EARLY_DEATHS and not one.was_ready:
            raise ConfigError(
                f"the reward server on {one.url} ends as soon as it is started (exit code {code}); see "
                f"{one.log or 'the lines above'}"
            )
        logger.error("the server on %s ended (exit code %s); it is restarted", one.url, code)

    def _retry_failed(self) -> None:
        """End the front of an instance that failed to load what another one has loaded: it is then started again."""
        if not any(one.was_ready for one in self.instances):
            return
        for one in self.instances:
            if one.status is not None and one.status.status == "failed" and one.process is not None:
                one.retire()

    def _ask(self) -> None:
        """Log that an instance is ready or failed, once for each of its starts."""
        while not self._stop.wait(_ASK_S):
            for one in self.instances:
                found = None if one.status is not None else one.ask()
                if found is None or not self._watch_loading:
                    continue
                if found.status == "ready":
                    logger.info("ready: %s", one.url)
                elif len(self._problems()) < len(self.instances):
                    logger.error("%s cannot load its scorers: %s", one.url, found.problem)

    def _problems(self) -> list[str]:
        """Why scorers failed to load, one for each instance where they did."""
        known = [one.status for one in self.instances]
        return [status.problem for status in known if status is not None and status.status == "failed"]

    def _require_one_loads(self) -> None:
        problems = self._problems()
        if len(problems) == len(self.instances):
            log = self.instances[0].log
            raise ConfigError(
                f"the scorers cannot be loaded: {problems[0]}{'' if log is None else f'; the log is {log}'}"
            )

    def _end(self) -> None:
        for one in self.instances:
            one.listener.close()  # clients now get "connection refused"
            if one.process:
                one.process.terminate()
        deadline = time.monotonic() + DRAIN_S
        for one in self.instances:
            if one.process:
                try:
                    one.process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    one.process.kill()
                    one.process.wait()


def _reachable_here(host: str) -> str:
    """Host of a listening address in a URL of this machine."""
    every = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}
    return every.get(host) or name_of(host)
