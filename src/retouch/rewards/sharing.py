"""The shared parts of the processes of a run on one machine: the servers of `url: auto`, and the cache of scores."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retouch.errors import ConfigError
from retouch.process.machine import this_machine
from retouch.rewards.client.cache import ScoreCache
from retouch.rewards.devices import CPU, TRAINED_ON, Devices, instances, serve_argument, visible_gpus
from retouch.rewards.server.launch import LocalServer

Gather = Callable[[Sequence[Any]], list[Any]]
"""Gathers the objects of every process into one list; every process must call it."""


@dataclass
class MachineShare:
    """The first process of each machine starts the servers, one per set of devices, which end when it does; the others
    receive their addresses. Where different GPUs are visible to the processes, as with one to each, the server of the
    GPUs that the run trains on has a part for each set of them, which its first process starts.

    Attributes:
        wanted: devices -> name -> options of the scorers that a server of the run computes there.
        device: the device that this process trains on.
        log_dir: folder of the cache and of the logs of the servers; None: no cache, and logs in a temporary folder.
        cached: whether scores are kept in a cache.
        spending: folder in which judges share what they spend.
        cache: the cache, once started.
        urls: devices -> addresses of their server, once started.
    """

    wanted: Mapping[Devices, Mapping[str, Mapping[str, Any]]]
    device: str
    log_dir: Path | None
    cached: bool
    spending: Path | None
    cache: ScoreCache | None = None
    urls: Mapping[Devices, list[str]] = field(default_factory=dict[Devices, Any])
    _servers: list[LocalServer] = field(default_factory=list[LocalServer])
    _made: list[Path] = field(default_factory=list[Path])

    def start(self, gather: Gather) -> None:
        """Start or find what is shared.

        Raises:
            ConfigError, OSError: a server cannot be started; on all processes.
        """
        if not self.wanted and not self.cached:
            return
        machine, me = this_machine(), uuid.uuid4().hex
        visible = visible_gpus() if self.device.startswith("cuda") else ()
        processes = gather([(machine, me, self.device, visible)])
        apart = machine.among({one for one, *_ in processes})  # several machines may share the run directory
        if self.cached and self.log_dir is not None:
            self.cache = ScoreCache(self.log_dir / f"rewards{apart}.sqlite")
        if not self.wanted:
            return
        seeing = defaultdict[Sequence[str], list[tuple[str, str]]](list)  # GPUs -> processes here, and their devices
        for one, process, device, seen in processes:
            if one == machine:
                seeing[seen].append((process, device))
        firsts = [together[0][0] for together in seeing.values()]
        urls: dict[Devices, list[str]] = {}
        problem = None
        try:
            if me in firsts:
                part = firsts.index(me)
                mine = {d: scorers for d, scorers in self.wanted.items() if d == TRAINED_ON or not part}
                trained_on = [device for _, device in [*seeing.values()][part]]
                for devices, scorers in mine.items():
                    one_each = instances(devices, trained_on)
                    gpus = "" if devices == CPU else f"-gpu-{serve_argument(one_each).replace(',', '-')}"
                    gpus += f"-part-{part + 1}" if part else ""
                    log = self._log_dir() / f"reward-server{gpus}{apart}.log"
                    self._servers.append(LocalServer(scorers, log, one_each, self.spending))
                urls = {devices: server.urls() for devices, server in zip(mine, self._servers, strict=True)}
        except (ConfigError, OSError) as error:  # reported below: the other processes wait in gather
            problem = error
            self._made.clear()  # the message names a log there
        everywhere = gather([(machine, urls, problem and str(problem))])
        if problem is not None:
            raise problem
        if elsewhere := [message for _, _, message in everywhere if message is not None]:
            raise ConfigError(elsewhere[0])
        here = [urls for one, urls, _ in everywhere if one == machine]
        self.urls = {devices: [url for urls in here for url in urls.get(devices, [])] for devices in self.wanted}

    def _log_dir(self) -> Path:
        if self.log_dir is not None:
            return self.log_dir
        self._made.append(Path(tempfile.mkdtemp(prefix="retouch-rewards-")))
        return self._made[-1]

    def close(self) -> None:
        for server in self._servers:
            server.terminate()
        for server in self._servers:
            server.close()
        if self._made and any(server.has_failed for server in self._servers):
            self._made.clear()  # as well
        self._servers.clear()
        if self.cache:
            self.cache.close()
        for folder in self._made:
            shutil.rmtree(folder, ignore_errors=True)
