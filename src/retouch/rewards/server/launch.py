"""Start reward servers: `retouch reward serve`, and the server of `url: auto`."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from retouch.config.errors import nearest
from retouch.errors import ConfigError, logging_long
from retouch.files import plain_json
from retouch.files.disk import append_to
from retouch.process.signals import ignore_notices
from retouch.rewards.addresses import LOOPBACK, TOKEN_VARIABLE, reward_token
from retouch.rewards.base import PARTS_OF_GROUPS
from retouch.rewards.client.endpoints import read_endpoints, remove_endpoints, write_endpoints
from retouch.rewards.devices import CPU, require, serve_argument
from retouch.rewards.scorers import make_scorer
from retouch.rewards.scorers.judge_budget import SPENDING_VARIABLE, sharing_among_workers
from retouch.rewards.server.supervisor import DRAIN_S, WATCH_S, Instance, Supervisor, backoff_s

logger = logging.getLogger(__name__)

_READY = "ready"
"""File beside the endpoints of a run's server that is made once an instance is ready."""

_EARLY_S = 5.0  # a server that ends sooner than this after its start may do so again


@dataclass(frozen=True)
class ServeOptions:
    """How scorers are served.

    Attributes:
        port: port of the first instance, counted up for the others; 0 takes a free port for each.
        devices: "cpu" or numbers of GPUs; one instance per device and replica.
        endpoints: file to write, or to add to, once every port is bound (`retouch.rewards.client.endpoints`).
        log_dir: folder of one log file per instance.
        with_parent: id of the process that starts this one and at whose end it ends; it keeps the output, without log
            files, and `endpoints`, beside which this process marks that its scorers could be loaded.
        listeners: file descriptors of sockets that listen, one per instance, in place of `port`: they stay bound while
            this process is restarted.
        limits: fields of `admission.Limits`.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    devices: Sequence[str] = ("cpu",)
    replicas: int = 1
    endpoints: Path | None = None
    log_dir: Path = Path("reward-logs")
    with_parent: int | None = None
    listeners: Sequence[int] = ()
    limits: Mapping[str, float] = field(default_factory=dict[str, float])


def serve(scorers: Mapping[str, Mapping[str, Any]], options: ServeOptions) -> None:
    """Serve scorers (name -> options) until stopped: one instance (a front and its worker) per device and replica, each
    restarted if it dies.

    Raises:
        ConfigError: an unknown scorer or option, a scorer that compares a group, a taken port, an open address without
            a token, or an instance that cannot be started at all.
    """
    for module in ("fastapi", "prometheus_client", "uvicorn"):
        if importlib.util.find_spec(module) is None:
            raise ConfigError(f'the reward server needs {module}: pip install "retouch[serve]"')
    token = reward_token()
    if options.host not in LOOPBACK and not token:
        raise ConfigError(
            f"--host: given {options.host}, which others can reach; set {TOKEN_VARIABLE} to a secret, or stay on "
            "127.0.0.1"
        )
    if options.endpoints is not None:
        try:
            read_endpoints(options.endpoints)
        except ValueError as error:
            raise ConfigError(f"--endpoints: {error}; give another file") from None
    if importlib.util.find_spec("torch") is not None:  # a scorer without torch may count GPUs itself
        require(
            [device if device == "cpu" else f"cuda:{device}" for device in options.devices], _given(options.devices)
        )
    for name, given in scorers.items():  # report wrong options here, once
        made = make_scorer(str(given.get("scorer", name)), {k: v for k, v in given.items() if k != "scorer"})
        if getattr(made, "compares_group", False):
            raise ConfigError(f"reward {name!r}: {PARTS_OF_GROUPS}; set against=reference")
    places = [device for device in options.devices for _ in range(options.replicas)]
    if options.port and options.port + len(places) > 65536:
        raise ConfigError(
            f"--port: given {options.port}, from which {len(places)} instances count up past 65535; set at most "
            f"{65536 - len(places)}, or 0 for free ones"
        )
    instances: list[Instance] = []
    mark = None if options.with_parent is None or options.endpoints is None else options.endpoints.with_name(_READY)
    for number, device in enumerate(places):
        if options.listeners:
            listener = socket.socket(fileno=options.listeners[number])
        else:
            listener = _listen(options.host, options.port + number if options.port else 0)
        instances.append(Instance(listener, options.host, device, _log_file(options, listener), mark))
    if options.with_parent is not None:
        exit_with_parent(options.with_parent)
        ignore_notices()
    told = {"scorers": {n: dict(o) for n, o in scorers.items()}, "token": token, "limits": dict(options.limits)}
    supervisor = Supervisor(instances, told, watch_loading=options.with_parent is None)
    with sharing_among_workers():
        supervisor.start()
        entries = [{"rewards": list(scorers), **one.entry()} for one in instances]
        if options.endpoints is not None:
            write_endpoints(options.endpoints, entries)
        for one in instances:
            logger.info(
                "serving %s on %s (%s)%s",
                ", ".join(scorers),
                one.url,
                one.device,
                f", log: {one.log}" * (one.log is not None),
            )
        if options.endpoints is not None:
            logger.info("endpoints file: %s", options.endpoints)
        try:
            supervisor.run()
        finally:
            if options.endpoints is not None and options.with_parent is None:
                with suppress(OSError, ValueError):  # the folder is gone, or another program's file has its place
                    remove_endpoints(options.endpoints, entries)


def _given(devices: Sequence[str]) -> str:
    return f"--devices: given {','.join(devices)}"


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        raise ConfigError(
            f"--port: cannot listen on {host}:{port} ({error.strerror}); choose another, or 0 for a free one"
        ) from None
    return listener


def _log_file(options: ServeOptions, listener: socket.socket) -> Path | None:
    return None if options.with_parent is not None else options.log_dir / f"port-{listener.getsockname()[1]}.log"


def parse_devices(text: str) -> list[str]:
    """The devices in "0,1,2" or "cpu".

    Raises:
        ConfigError: no device, or another form.
    """
    devices = [one.strip() for one in text.split(",") if one.strip()]
    if not devices or not all(one == "cpu" or one.isdecimal() for one in devices):
        raise ConfigError(f"--devices: given {text!r}; write cpu, or numbers of GPUs like 0,1,2")
    return devices


def exit_with_parent(parent: int) -> None:
    """End this process when the process `parent` that started it is gone: a killed run leaves no server behind."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(0)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()


def requested(names: str, options: str) -> dict[str, dict[str, Any]]:
    """Scorers and their options from "NAME,NAME" and the JSON of {name: {option: value}}.

    Raises:
        ConfigError: no name, invalid JSON, or options of a scorer that is not named.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if not wanted:
        raise ConfigError(f"NAME: given {names!r}, which names no scorer; give one or several, like ocr,preservation")
    table = _option_table(options, wanted[0])
    if not all(isinstance(value, dict) for value in table.values()):
        raise _not_a_table(options, wanted[0])
    for name in table:
        if name not in wanted:
            raise ConfigError(f"--options: {name!r} is no scorer of this command; {nearest(name, wanted)}")
    return {name: table.get(name, {}) for name in wanted}


def requested_one(name: str, options: str) -> dict[str, Any]:
    """Options of one scorer from the same JSON of {name: {option: value}}; the former {option: value} is accepted with
    a log line.

    Raises:
        ConfigError: invalid JSON, or options of another scorer.
    """
    if "," in name:
        raise ConfigError(f"--reward: given {name!r}; expected the name of one scorer; set one of them")
    table = _option_table(options, name)
    if any(isinstance(value, dict) for value in table.values()) or not table:
        return requested(name, options)[name]
    logger.warning(
        "--options: given %s; the form is now that of `reward serve`: %s", options, json.dumps({name: table})
    )
    return table


def _option_table(options: str, name: str) -> dict[str, Any]:
    try:
        given: object = plain_json.loads(options)
    except ValueError as error:
        raise ConfigError(f"--options: not valid JSON: {error}") from None
    if not isinstance(given, dict):
        raise _not_a_table(options, name)
    return cast("dict[str, Any]", given)


def _not_a_table(options: str, name: str) -> ConfigError:
    return ConfigError(f'--options: given {options}; write it as {{"{name}": {{"option": value}}}}')


class LocalServer:
    """A reward server on loopback for the duration of a run (`url: auto`), with one instance per device. It is started
    again if it ends; its ports stay bound, and clients wait meanwhile.

    Args:
        spending: folder in which its judges share with the rest of the run what they spend.
    """

    def __init__(
        self,
        scorers: Mapping[str, Mapping[str, Any]],
        log: Path,
        devices: Sequence[str] = CPU,
        spending: Path | None = None,
    ) -> None:
        self.log = log
        self._environment = {**os.environ, **({SPENDING_VARIABLE: str(spending.resolve())} if spending else {})}
        self._folder = tempfile.TemporaryDirectory(prefix="retouch-rewards-")
        self._endpoints = Path(self._folder.name) / "endpoints.json"
        self._listeners = [_listen("127.0.0.1", 0) for _ in devices]
        self._command = [sys.executable, "-P", "-m", "retouch", "reward", "serve", ",".join(scorers)]
        self._command += ["--listeners", ",".join(str(one.fileno()) for one in self._listeners)]
        self._command += ["--endpoints", str(self._endpoints), "--options", json.dumps(scorers)]
        self._command += ["--devices", serve_argument(devices), "--with-parent", str(os.getpid())]
        log.parent.mkdir(parents=True, exist_ok=True)
        self.has_failed = False
        self._killed_at: float | None = None
        self._process = self._start()
        self._closing = threading.Event()
        self._watch = threading.Thread(target=self._keep, daemon=True, name="reward-server-watch")
        self._watch.start()

    def _start(self) -> subprocess.Popen[bytes]:
        with os.fdopen(append_to(self.log), "ab") as stream:
            return subprocess.Popen(
                self._command,
                stdout=stream,
                stderr=stream,
                stdin=subprocess.DEVNULL,
                env=self._environment,
                start_new_session=True,
                pass_fds=[one.fileno() for one in self._listeners],
            )

    def _keep(self) -> None:
        """Start the server again when it ends, except after its own error before it was ever ready: clients are then
        refused. One that was ready has options that can work."""
        early_deaths, started = 0, time.monotonic()
        while not self._closing.wait(WATCH_S):
            code = self._process.poll()
            if code is None:
                continue
            if code >= 0 and not self._endpoints.exists():
                return  # it ended with an error before it was up, which `urls` reports
            self.has_failed = True
            early_deaths = early_deaths + 1 if time.monotonic() - started < _EARLY_S else 0
            if code == ConfigError.exit_code and not self._endpoints.with_name(_READY).exists():
                logger.error("the reward server ended (exit code %s) and is not restarted; see %s", code, self.log)
                self._refuse()
                return
            logger.error("the reward server ended (exit code %s); it is restarted, see %s", code, self.log)
            self._closing.wait(backoff_s(early_deaths))
            started = time.monotonic()
            with suppress(OSError):  # no memory for a process: the next attempt follows
                self._process = self._start()

    def _refuse(self) -> None:
        for one in self._listeners:
            one.close()

    def urls(self, timeout_s: float = 60.0) -> list[str]:
        """The addresses of its instances, once their ports are bound.

        Raises:
            ConfigError: the server ended or did not start in time; the message ends with the last lines of its log.
        """
        deadline = time.monotonic() + timeout_s
        with logging_long(logger, f"waiting up to {timeout_s:.0f} s for the reward server (log: {self.log})"):
            while not self._endpoints.exists():
                failed = not self._watch.is_alive()  # one that was killed is started again
                if failed or time.monotonic() > deadline:
                    lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
                    raise ConfigError(f"the reward server did not start (log: {self.log}): " + " | ".join(lines))
                time.sleep(0.05)
        found = plain_json.loads(self._endpoints.read_text(encoding="utf-8"))["endpoints"]
        return [str(instance["url"]) for instance in found]

    @property
    def pid(self) -> int:
        return self._process.pid

    def terminate(self) -> float:
        """Begin to close it -> when `close` kills it, on the clock of `time.monotonic`. Each of several servers is
        terminated before the first one is waited for."""
        if self._killed_at is None:
            self._closing.set()
            self._watch.join()
            self._refuse()
            self._process.terminate()
            self._killed_at = time.monotonic() + DRAIN_S + 5.0
        return self._killed_at

    def close(self) -> None:
        killed_at = self.terminate()
        try:
            self._process.wait(timeout=max(0.0, killed_at - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()
