"""The lock of a run directory."""

from __future__ import annotations

import logging
import os
import platform
from pathlib import Path

from filelock import FileLock, Timeout

from retouch.errors import ConfigError
from retouch.files.disk import require_no_link

logger = logging.getLogger(__name__)

_PROBES_S = 0.5
"""Seconds that a start, or the check before it, waits for the lock: a page that is watched
(`status.lock_holder`) and `require_free` hold it for an instant."""


class RunLock:
    """A lock on RUN/.lock, which holds the pid of its process and its host. The kernel releases it when that process
    dies."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._place = run / ".lock"
        self._lock = FileLock(self._place, blocking=False, thread_local=False, fallback_to_soft=False)

    def take(self) -> None:
        """Hold the lock until `release`. A file system without locks is warned about.

        Raises:
            ConfigError: another process holds it.
        """
        if self._lock.is_locked:
            return
        require_no_link(self._place)
        self._run.mkdir(parents=True, exist_ok=True)
        self._place.touch()  # a full or read-only disk is an error
        try:
            self._lock.acquire(blocking=True, timeout=_PROBES_S)
        except Timeout:
            raise self._taken() from None
        except OSError as error:
            logger.warning("%s cannot be locked (%s); make sure that no other process writes there", self._run, error)
            return
        self._place.write_text(f"{os.getpid()}\n{platform.node()}\n", encoding="utf-8")

    def require_free(self) -> None:
        """Check before a model is loaded; takes nothing and creates no file.

        Raises:
            ConfigError: another process holds it.
        """
        require_no_link(self._place)
        if self._lock.is_locked or not os.access(self._place, os.W_OK):
            return
        try:
            self._lock.acquire(blocking=True, timeout=_PROBES_S)
        except Timeout:
            raise self._taken() from None
        except OSError:
            return
        self._lock.release()

    def release(self) -> None:
        self._lock.release()

    def _taken(self) -> ConfigError:
        number = self._place.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
        number = number if number.isdecimal() else "unknown"
        return ConfigError(
            f"another process (pid {number}) is writing to {self._run}; wait for it, or set another name=..."
        )
