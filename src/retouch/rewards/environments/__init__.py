"""Environments of rewards whose dependencies cannot be installed beside the rest: `retouch reward env`.

An environment is a file `NAME.toml` in this folder: requirements, the releases that were resolved together, and the
commands that start its server. No torch.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from threading import Thread
from typing import IO, Any
from urllib.parse import unquote, urlsplit

from retouch.config.errors import nearest
from retouch.errors import ConfigError
from retouch.files.disk import only_writer, writing
from retouch.rewards import REWARDS

logger = logging.getLogger(__name__)

_PIP = (23, 3)
"""Oldest pip whose dry run reads metadata alone; earlier ones download every package."""

_PIP_NOW = "pip>=24.1"
_TIMEOUT_S = 3600.0

_MODULE = ("-P", "-m")
"""Runs a module of Python, and none of that name in the working directory."""

_READ_S = 10.0
"""Time in seconds for the last errors of a program that has ended; one that it started may hold the pipe open."""

_KEPT = 1 << 16
"""Bytes of the errors of a program that are kept, from their end."""


@dataclass(frozen=True)
class Environment:
    """One environment.

    Attributes:
        name: of the file, and of the folder that is made by default.
        rewards: scorers that it serves.
        extras: of retouch; empty: retouch is not installed in it.
        requirements: as of pip.
        constraints: releases that were resolved together.
        paired: packages that must come from the index of torch.
        start: commands by reward, "default" for the others; {reward}, {devices} and {endpoints} are filled in.
    """

    name: str
    title: str
    rewards: Sequence[str]
    extras: Sequence[str]
    requirements: Sequence[str]
    constraints: Sequence[str]
    paired: Sequence[str]
    start: Mapping[str, Sequence[str]]

    def commands(
        self, reward: str, folder: Path, devices: str | None = None, endpoints: Path | None = None
    ) -> list[list[str]]:
        """The commands that start its server, as words; programs are those of the environment in `folder`.

        Raises:
            ConfigError: `devices` or `endpoints`, which no command reads.
        """
        found: list[list[str]] = []
        lines = self.start.get(reward, self.start["default"])
        for name, given in (("devices", devices), ("endpoints", endpoints)):
            if given is not None and not any(f"{{{name}}}" in line for line in lines):
                remedy = "; CUDA_VISIBLE_DEVICES chooses its GPUs" if name == "devices" else ""
                raise ConfigError(f"--{name}: given {given}, but the server of {reward} reads none; omit it{remedy}")
        filled = {"reward": reward, "devices": devices or "0", "endpoints": str(endpoints or "endpoints.json")}
        for line in lines:
            words = [word.format(**filled) for word in shlex.split(line)]
            found.append([str(program(folder, words[0])), *words[1:]])
        return found


def environments() -> dict[str, Environment]:
    """All environments by name."""
    files = sorted((f for f in resources.files(__name__).iterdir() if f.name.endswith(".toml")), key=lambda f: f.name)
    return {
        file.name.removesuffix(".toml"): Environment(
            file.name.removesuffix(".toml"), **tomllib.loads(file.read_text(encoding="utf-8"))
        )
        for file in files
    }


def environment_of(name: str) -> tuple[Environment, str]:
    """The environment of a name, or of a reward, and the reward that it shall serve.

    Raises:
        ConfigError: no such environment, or a reward that needs none.
    """
    known = environments()
    if name in known:
        return known[name], known[name].rewards[0]
    for environment in known.values():
        if name in environment.rewards:
            return environment, name
    if name in REWARDS:
        raise ConfigError(
            f"NAME: given {name!r}, which needs no environment of its own; serve it with `retouch reward serve {name}`"
        )
    raise ConfigError(
        f"NAME: given {name!r}; {nearest(name, [*known, *(r for e in known.values() for r in e.rewards)])}"
    )


def make(environment: Environment, folder: Path, torch_index: str | None = None) -> None:
    """Make the virtual environment in `folder` and install everything into it.

    Args:
        torch_index: package index of `environment.paired`; None: of the configured index.

    Raises:
        ConfigError: the folder holds other files, another process makes an environment in it, or pip failed.
    """
    other = f"--path: {folder} exists and is no virtual environment; set --path to another folder"
    if folder.exists() and not folder.is_dir():
        raise ConfigError(other)
    with writing(folder, "--path"):
        folder.mkdir(parents=True, exist_ok=True)
    with only_writer(folder, "--path"):
        if any(folder.iterdir()) and not (folder / "pyvenv.cfg").is_file():
            raise ConfigError(other)
        _make(environment, folder, torch_index)


def _make(environment: Environment, folder: Path, torch_index: str | None) -> None:
    made = f"--path: no virtual environment can be made in {folder}"
    _run([sys.executable, *_MODULE, "venv", str(folder.absolute())], made)
    pip = [str(program(folder, "python")), *_MODULE, "pip", "--disable-pip-version-check", "install"]
    with _constraints(environment) as limits:
        wanted = list(environment.requirements)
        if torch_index:
            paired = [one for one in wanted if name_of(one) in environment.paired] or list(environment.paired)
            _run([*pip, "--index-url", torch_index, *paired], "pip could not install torch")
        own = [own_requirement(environment.extras)] if environment.extras else []
        _run([*pip, "-c", limits, *wanted, *own], f"pip could not install the environment {environment.name}")


def run_until_stopped(command: Sequence[str]) -> int:
    """Run a server -> its exit code. A signal to this process ends the server, which is waited for: one that is killed
    leaves its own processes, and its addresses in the endpoints file."""
    with subprocess.Popen(command) as server:
        try:
            return server.wait()
        except KeyboardInterrupt:
            server.terminate()
            server.wait()
            raise


def resolve(environment: Environment, python: str | None = None) -> dict[str, str]:
    """Resolve an environment without installing or downloading its packages: only their metadata is read.

    Args:
        python: interpreter with pip 23.3 or newer; None: this one, or a temporary environment with a newer pip.

    Returns:
        Package -> release.

    Raises:
        ConfigError: no releases fit together, or no index.
    """
    with tempfile.TemporaryDirectory(prefix="retouch-env-") as folder, _constraints(environment) as limits:
        pip = [python or _with_new_pip(Path(folder)), *_MODULE, "pip", "--disable-pip-version-check", "install"]
        report = Path(folder) / "report.json"
        wanted = [*environment.requirements, *(own_dependencies(environment.extras) if environment.extras else ())]
        options = ["--dry-run", "--ignore-installed", "--quiet", "--report", str(report), "-c", limits]
        _run([*pip, *options, *wanted], f"the environment {environment.name} cannot be resolved")
        found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return {one["metadata"]["name"]: one["metadata"]["version"] for one in found["install"]}


def program(folder: Path, name: str) -> Path:
    """A program of the virtual environment in a folder."""
    return folder.absolute() / ("Scripts" if os.name == "nt" else "bin") / name


def own_requirement(extras: Sequence[str]) -> str:
    """The requirement of this retouch with extras, for pip: its source folder, or its release."""
    listed = f"[{','.join(extras)}]"
    told = importlib.metadata.distribution("retouch").read_text("direct_url.json")
    origin: dict[str, Any] = json.loads(told) if told else {}
    if "dir_info" in origin:
        return unquote(urlsplit(origin["url"]).path) + listed
    return f"retouch{listed}=={importlib.metadata.version('retouch')}"


def own_dependencies(extras: Sequence[str]) -> list[str]:
    """Requirements of this retouch with extras, which pip resolves without building it."""
    found: list[str] = []
    for listed in importlib.metadata.requires("retouch") or ():
        requirement, _, marker = (part.strip() for part in listed.partition(";"))
        if not marker or any(marker == f"extra == {quote}{extra}{quote}" for extra in extras for quote in "'\""):
            found.append(requirement)
    return found


def name_of(requirement: str) -> str:
    """The package that a requirement names."""
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


@contextmanager
def _constraints(environment: Environment) -> Iterator[str]:
    """A temporary file of an environment's constraints."""
    with tempfile.TemporaryDirectory(prefix="retouch-constraints-") as folder:
        file = Path(folder) / "constraints.txt"
        file.write_text("\n".join(environment.constraints), encoding="utf-8")
        yield str(file)


def _with_new_pip(folder: Path) -> str:
    """An interpreter whose pip resolves by metadata alone."""
    try:
        major, minor = (int(part) for part in importlib.metadata.version("pip").split(".")[:2])
    except (importlib.metadata.PackageNotFoundError, ValueError):
        major, minor = 0, 0
    if (major, minor) >= _PIP:
        return sys.executable
    _run([sys.executable, *_MODULE, "venv", str(folder / "pip")], "no temporary environment can be made")
    python = str(program(folder / "pip", "python"))
    update = [python, *_MODULE, "pip", "--disable-pip-version-check", "install", "--quiet", _PIP_NOW]
    _run(update, "pip cannot be updated")
    return python


def _run(command: Sequence[str], problem: str) -> None:
    """Run a program and show its output as it comes.

    Raises:
        ConfigError: it failed; with the last line of its errors.
    """
    logger.info("%s", shlex.join(command))
    end = bytearray()
    try:
        with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
            reader = Thread(target=_keep_end, args=(process.stderr, end), daemon=True)
            reader.start()
            try:
                code = process.wait(_TIMEOUT_S)
            except BaseException:
                process.kill()
                raise
            reader.join(_READ_S)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{problem}: no end after {_TIMEOUT_S:.0f} s") from None
    except OSError as error:
        raise ConfigError(f"{problem}: {command[0]}: {(error.strerror or str(error)).lower()}") from None
    if code:
        told = end.decode("utf-8", "replace").splitlines()
        lines = [line for line in told if line.startswith("ERROR:")] or told
        raise ConfigError(f"{problem}: {lines[-1].removeprefix('ERROR: ') if lines else f'exit code {code}'}")


def _keep_end(stream: IO[bytes], end: bytearray) -> None:
    """Read a stream to its end, of which the last bytes are kept."""
    while part := stream.read1(_KEPT):  # type: ignore[attr-defined]
        end += part
        del end[:-_KEPT]
