"""Resources that the processes of a run share on a machine: the servers of `url: auto`, and the cache of scores."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retouch.errors import ConfigError
from retouch.process.machine import this_machine
from retouch.rewards.client.cache import ScoreCache
from retouch.rewards.devices import CPU, Devices, instances, serve_argument
from retouch.rewards.server.launch import LocalServer

Gather = Callable[[Sequence[Any]], list[Any]]
"""Gathers the objects of every process into one list; every process must call it."""


@dataclass
class MachineShare:
    """The first process of each machine starts the servers, one per set of devices, which end when it does; the others
    receive their addresses.

    Attributes:
        wanted: devices -> name -> options of the scorers that a server of the run computes there.
        device: the device that this process trains on.
        log_dir: folder of the cache and of the logs of the servers.
        cached: whether scores are kept in a cache.
        spending: folder in which judges share what they spend.
        cache: the cache, once started.
        urls: devices -> addresses of their server, once started.
    """

    wanted: Mapping[Devices, Mapping[str, Mapping[str, Any]]]
    device: str
    log_dir: Path
    cached: bool
    spending: Path | None
    cache: ScoreCache | None = None
    urls: Mapping[Devices, list[str]] = field(default_factory=dict[Devices, Any])
    _servers: list[LocalServer] = field(default_factory=list[LocalServer])

    def start(self, gather: Gather) -> None:
        """Start or find what is shared.

        Raises:
            ConfigError, OSError: a server cannot be started; on all processes.
        """
        if not self.wanted and not self.cached:
            return
        machine, me = this_machine(), uuid.uuid4().hex
        processes = gather([(machine, me, self.device)])
        apart = machine.among({one for one, _, _ in processes})  # several machines may share the run directory
        if self.cached:
            self.cache = ScoreCache(self.log_dir / f"rewards{apart}.sqlite")
        if not self.wanted:
            return
        urls: dict[Devices, list[str]] = {}
        problem = None
        if next(process for one, process, _ in processes if one == machine) == me:
            trained_on = [device for one, _, device in processes if one == machine]
            try:
                for devices, scorers in self.wanted.items():
                    one_each = instances(devices, trained_on)
                    gpus = "" if devices == CPU else f"-gpu-{serve_argument(one_each).replace(',', '-')}"
                    log = self.log_dir / f"reward-server{gpus}{apart}.log"
                    self._servers.append(LocalServer(scorers, log, one_each, self.spending))
                urls = {devices: server.urls() for devices, server in zip(self.wanted, self._servers, strict=True)}
            except (ConfigError, OSError) as error:  # reported below: the other processes wait in gather
                problem = error
        everywhere = gather([(machine, urls, problem and str(problem))])
        if problem is not None:
            raise problem
        if elsewhere := [message for _, _, message in everywhere if message is not None]:
            raise ConfigError(elsewhere[0])
        self.urls = next(urls for one, urls, _ in everywhere if one == machine and urls)

    def close(self) -> None:
        for server in self._servers:
            server.close()
        self._servers.clear()
        if self.cache:
            self.cache.close()
