"""Start reward servers: `retouch reward serve`, and the server of `url: auto`."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import httpx

from retouch import plain_json
from retouch.config.errors import nearest
from retouch.disk import append_to
from retouch.errors import ConfigError
from retouch.rewards.addresses import LOOPBACK, TOKEN_VARIABLE, name_of, reward_token
from retouch.rewards.client.endpoints import read_endpoints, write_endpoints
from retouch.rewards.client.status import Status, readiness
from retouch.rewards.devices import CPU, require, serve_argument
from retouch.rewards.scorers import make_scorer
from retouch.signals import ENDING, ignore_notices

logger = logging.getLogger(__name__)

_WATCH_S = 0.1
_EARLY_S = 5.0  # a front that ends sooner than this after its start may never become ready
_EARLY_DEATHS = 5
_DRAIN_S = 40.0
_STATUS_S = 1.0
_ASK_S = 0.5


@dataclass(frozen=True)
class ServeOptions:
    """How scorers are served.

    Attributes:
        port: port of the first instance, counted up for the others; 0 takes a free port for each.
        devices: "cpu" or numbers of GPUs; one instance per device and replica.
        endpoints: file to write, or to add to, once every port is bound (`retouch.rewards.client.endpoints`).
        log_dir: folder of one log file per instance.
        with_parent: id of the process that starts this one and at whose end it ends; it keeps the output, without log
            files.
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
        ConfigError: an unknown scorer or option, a taken port, an open address without a token, or an instance that
            cannot be started at all.
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
        make_scorer(str(given.get("scorer", name)), {k: v for k, v in given.items() if k != "scorer"})
    places = [device for device in options.devices for _ in range(options.replicas)]
    if options.port and options.port + len(places) > 65536:
        raise ConfigError(
            f"--port: given {options.port}, from which {len(places)} instances count up past 65535; set at most "
            f"{65536 - len(places)}, or 0 for free ones"
        )
    instances: list[Instance] = []
    for number, device in enumerate(places):
        if options.listeners:
            listener = socket.socket(fileno=options.listeners[number])
        else:
            listener = _listen(options.host, options.port + number if options.port else 0)
        instances.append(Instance(listener, options.host, device, _log_file(options, listener)))
    if options.with_parent is not None:
        exit_with_parent(options.with_parent)
        ignore_notices()
    told = {"scorers": {n: dict(o) for n, o in scorers.items()}, "token": token, "limits": dict(options.limits)}
    supervisor = Supervisor(instances, told, watch_loading=options.with_parent is None)
    supervisor.start()
    if options.endpoints is not None:
        write_endpoints(options.endpoints, [{"rewards": list(scorers), **one.entry()} for one in instances])
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
    supervisor.run()


def _given(devices: Sequence[str]) -> str:
    return f"--devices: given {','.join(devices)}"


class Instance:
    """A front process, and its port, which stays bound while the process is restarted: clients wait meanwhile.

    Attributes:
        local_url: where this machine reaches it.
        status: "ready" or "failed", of this process, once it is known.
    """

    def __init__(self, listener: socket.socket, host: str, device: str, log: Path | None) -> None:
        self.listener = listener
        self.device = device
        self.log = log
        port = listener.getsockname()[1]
        self.url = f"http://{name_of(host)}:{port}"
        self.local_url = f"http://{_reachable_here(host)}:{port}"
        self.process: subprocess.Popen[bytes] | None = None
        self.early_deaths = 0
        self.status: Status | None = None
        self._started = 0.0
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
            self.status = None
        assert self.process.stdin is not None
        line = {**settings, "listener": self.listener.fileno(), "device": self.device, "url": self.url}
        with suppress(BrokenPipeError):  # it died already, which the supervisor notices
            self.process.stdin.write(json.dumps(line).encode() + b"\n")
            self.process.stdin.flush()
        self._started = time.monotonic()

    def ask(self) -> Status | None:
        """Ask the front, and keep what it reports as `status` once its scorers are loaded or failed -> it, then."""
        process = self.process
        try:
            found = readiness(self.local_url, _STATUS_S, direct=True)
        except (httpx.RequestError, TimeoutError):  # it is being started
            return None
        with self._lock:
            if found.status not in ("ready", "failed") or process is not self.process:
                return None
            self.status = found
        return found

    def died(self) -> bool:
        """Whether the front has ended; counts consecutive deaths soon after the start."""
        if self.process is None or self.process.poll() is None:
            return False
        early = time.monotonic() - self._started < _EARLY_S
        self.early_deaths = self.early_deaths + 1 if early else 0
        return True


class Supervisor:
    """Keeps every instance running until SIGINT or one of `ENDING`; then they finish their requests and end."""

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
        if self._watch_loading:  # in a thread: a server that is being started does not reply, and may take its time
            threading.Thread(target=self._ask, daemon=True, name="loading-watch").start()
        try:
            while not self._stop.wait(_WATCH_S):
                for one in self.instances:
                    if one.died():
                        self._again(one)
                self._require_one_loads()
        finally:
            self._end()

    def _again(self, one: Instance) -> None:
        code = one.process.returncode if one.process else None
        if one.early_deaths >= _EARLY_DEATHS:
            raise ConfigError(
                f"the reward server on {one.url} ends as soon as it is started (exit code {code}); see "
                f"{one.log or 'the lines above'}"
            )
        logger.error("the server on %s ended (exit code %s); it is restarted", one.url, code)
        one.start(self.settings)

    def _ask(self) -> None:
        """Log that an instance is ready or failed, once for each of its starts."""
        while not self._stop.wait(_ASK_S):
            for one in self.instances:
                found = None if one.status is not None else one.ask()
                if found is not None and found.status == "ready":
                    logger.info("ready: %s", one.url)
                elif found is not None and len(self._problems()) < len(self.instances):
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
        deadline = time.monotonic() + _DRAIN_S
        for one in self.instances:
            if one.process:
                try:
                    one.process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    one.process.kill()
                    one.process.wait()


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        raise ConfigError(
            f"--port: cannot listen on {host}:{port} ({error.strerror}); choose another, or 0 for a free one"
        ) from None
    listener.listen(2048)
    return listener


def _reachable_here(host: str) -> str:
    """Host of a listening address in a URL of this machine."""
    every = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}
    return every.get(host) or name_of(host)


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
    again if it ends; its ports stay bound, and clients wait meanwhile."""

    def __init__(self, scorers: Mapping[str, Mapping[str, Any]], log: Path, devices: Sequence[str] = CPU) -> None:
        self.log = log
        self._folder = tempfile.TemporaryDirectory(prefix="retouch-rewards-")
        self._endpoints = Path(self._folder.name) / "endpoints.json"
        self._listeners = [_listen("127.0.0.1", 0) for _ in devices]
        self._command = [sys.executable, "-P", "-m", "retouch", "reward", "serve", ",".join(scorers)]
        self._command += ["--listeners", ",".join(str(one.fileno()) for one in self._listeners)]
        self._command += ["--endpoints", str(self._endpoints), "--options", json.dumps(scorers)]
        self._command += ["--devices", serve_argument(devices), "--with-parent", str(os.getpid())]
        log.parent.mkdir(parents=True, exist_ok=True)
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
                start_new_session=True,
                pass_fds=[one.fileno() for one in self._listeners],
            )

    def _keep(self) -> None:
        """Start the server again when it ends, except after its own error: clients are then refused."""
        early_deaths, started = 0, time.monotonic()
        while not self._closing.wait(_WATCH_S):
            code = self._process.poll()
            if code is None:
                continue
            if code >= 0 and not self._endpoints.exists():
                return  # it ended with an error before it was up, which `urls` reports
            early_deaths = early_deaths + 1 if time.monotonic() - started < _EARLY_S else 0
            if code == ConfigError.exit_code or early_deaths >= _EARLY_DEATHS:
                logger.error("the reward server ended (exit code %s) and is not restarted; see %s", code, self.log)
                self._refuse()
                return
            logger.error("the reward server ended (exit code %s); it is restarted, see %s", code, self.log)
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

    def close(self) -> None:
        self._closing.set()
        self._watch.join()
        self._refuse()
        self._process.terminate()
        try:
            self._process.wait(timeout=35)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()
