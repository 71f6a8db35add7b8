"""Starting reward servers, and finding those that run."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from retouch.config.errors import ConfigError, nearest
from retouch.rewards.protocol import LOOPBACK, base_url, usable_token
from retouch.rewards.scorers import make_scorer

logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "RETOUCH_REWARD_TOKEN"
"""Environment variable with the bearer token of server and client; an argument would show in `ps`."""


def serve(
    scorers: Mapping[str, Mapping[str, Any]],
    host: str = "127.0.0.1",
    port: int = 8000,
    endpoints: Path | None = None,
    device: str = "cpu",
    with_parent: int | None = None,
) -> None:
    """Serve scorers (name -> options) until told to stop.

    Args:
        port: 0 takes a free one.
        endpoints: file to write once the port is bound: {"endpoints": [{"url", "rewards", "device", "pid"}]}.
        with_parent: id of the process that starts this one, to end when it does.

    Raises:
        ConfigError: an unknown scorer or option, a taken port, or an open address without a token.
    """
    try:
        from retouch.rewards.server import create_app, exit_with_parent, run_app
    except ImportError as error:
        raise ConfigError(f'the reward server needs {error.name}: pip install "retouch[serve]"') from None
    token = reward_token()
    if host not in LOOPBACK and not token:
        raise ConfigError(
            f"--host: given {host}, which others can reach; set {TOKEN_VARIABLE} to a secret, or stay on 127.0.0.1"
        )
    made = {name: make_scorer(str(o.get("scorer", name)), _without(o, "scorer")) for name, o in scorers.items()}
    app = create_app(made, device, token)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        raise ConfigError(
            f"--port: cannot listen on {host}:{port} ({error.strerror}); choose another, or 0 for a free one"
        ) from None
    address = f"[{host}]" if ":" in host else host
    url = f"http://{address}:{listener.getsockname()[1]}"
    if with_parent is not None:
        exit_with_parent(with_parent)
    if endpoints is not None:
        write_endpoints(endpoints, [{"url": url, "rewards": list(scorers), "device": device, "pid": os.getpid()}])
    logger.info("serving %s on %s", ", ".join(scorers), url)
    run_app(app, listener)


def _without(options: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != key}


def requested(names: str, options: str) -> dict[str, dict[str, Any]]:
    """Scorers and their options from "NAME,NAME" and the JSON of {name: {option: value}}.

    Raises:
        ConfigError: no name, no such JSON, or options of a scorer that is not named.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if not wanted:
        raise ConfigError(f"NAME: given {names!r}, which names no scorer; give one or several, like ocr,preservation")
    try:
        given: object = json.loads(options)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--options: not valid JSON: {error}") from None
    if not isinstance(given, dict) or not all(isinstance(value, dict) for value in given.values()):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        raise ConfigError(f'--options: given {options}; write it as {{"{wanted[0]}": {{"option": value}}}}')
    table = cast("dict[str, dict[str, Any]]", given)
    for name in table:
        if name not in wanted:
            raise ConfigError(f"--options: {name!r} is not served; {nearest(name, wanted)}")
    return {name: table.get(name, {}) for name in wanted}


def reward_token() -> str | None:
    """The token of the environment, None without one.

    Raises:
        ConfigError: it cannot be sent; the message does not show it.
    """
    token = os.environ.get(TOKEN_VARIABLE, "")
    try:
        return usable_token(token) if token.strip() else None
    except ValueError as error:
        raise ConfigError(f"{TOKEN_VARIABLE}: {error}; set it anew (its value is not shown)") from None


def write_endpoints(path: Path, endpoints: Sequence[Mapping[str, Any]]) -> None:
    """Write the file in one rename, so that nobody reads half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.write_text(json.dumps({"endpoints": list(endpoints)}, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


def resolve_urls(url: str | Sequence[str], reward: str) -> list[str]:
    """Addresses that a reward entry means: as given, or those of an endpoints file that hold the reward.

    Raises:
        ConfigError: neither an address nor a readable endpoints file, or no endpoint with the reward.
    """
    if not isinstance(url, str):
        if not url:
            raise ConfigError(f"rewards.{reward}.url: an empty list; give http://host:port, or leave url out")
        return [address for one in url for address in resolve_urls(one, reward)]
    try:
        if "://" in url:
            return [base_url(url)]
        found = _addresses(Path(url), reward)
    except OSError as error:
        raise ConfigError(
            f"rewards.{reward}.url: given {url!r}: {(error.strerror or str(error)).lower()}; give http://host:port, "
            "the endpoints file that `retouch reward serve` wrote, or auto"
        ) from None
    except ValueError as error:
        raise ConfigError(f"rewards.{reward}.url: {error}") from None
    if not found:
        raise ConfigError(
            f"rewards.{reward}.url: no server in {url} has {reward}; start one with `retouch reward serve {reward}`"
        )
    return found


def _addresses(path: Path, reward: str) -> list[str]:
    """Addresses in an endpoints file that hold the reward.

    Raises:
        OSError, ValueError: it cannot be read, or is none.
    """
    text = path.read_text(encoding="utf-8")
    try:
        entries = cast("dict[str, Any]", json.loads(text))["endpoints"]
        found = [e["url"] for e in entries if reward in e["rewards"]]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is not an endpoints file of `retouch reward serve`") from None
    return [base_url(str(url)) for url in found]


class LocalServer:
    """A reward server on loopback in its own process, for the time of a run (`url: auto`)."""

    def __init__(self, scorers: Mapping[str, Mapping[str, Any]], log: Path) -> None:
        self.log = log
        self._folder = tempfile.TemporaryDirectory(prefix="retouch-rewards-")
        self._endpoints = Path(self._folder.name) / "endpoints.json"
        command = [sys.executable, "-m", "retouch", "reward", "serve", ",".join(scorers), "--port", "0"]
        command += ["--endpoints", str(self._endpoints), "--options", json.dumps(scorers)]
        command += ["--with-parent", str(os.getpid())]
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as stream:
            self._process = subprocess.Popen(
                command, stdout=stream, stderr=stream, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def url(self, timeout_s: float = 60.0) -> str:
        """The address, once the port is bound.

        Raises:
            ConfigError: the server ended or did not come up; the message ends with its last words.
        """
        deadline = time.monotonic() + timeout_s
        while not self._endpoints.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                words = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
                raise ConfigError(f"the reward server did not start (log: {self.log}): " + " | ".join(words))
            time.sleep(0.05)
        return str(json.loads(self._endpoints.read_text(encoding="utf-8"))["endpoints"][0]["url"])

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=35)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()
