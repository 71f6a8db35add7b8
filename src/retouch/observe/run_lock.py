"""One process writes to a run directory."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from filelock import FileLock, Timeout

from retouch.errors import ConfigError

logger = logging.getLogger(__name__)


class RunLock:
    """A lock on RUN/.lock, which holds the pid of its process. The kernel releases it when that process dies."""

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
        self._require_file()
        self._run.mkdir(parents=True, exist_ok=True)
        self._place.touch()  # a full or read-only disk is an error
        try:
            self._lock.acquire()
        except Timeout:
            raise self._taken() from None
        except OSError as error:
            logger.warning("%s cannot be locked (%s); make sure that no other process writes there", self._run, error)
            return
        self._place.write_text(f"{os.getpid()}\n", encoding="utf-8")

    def require_free(self) -> None:
        """Check before a model is loaded; takes nothing and creates no file.

        Raises:
            ConfigError: another process holds it.
        """
        self._require_file()
        if self._lock.is_locked or not os.access(self._place, os.W_OK):
            return
        try:
            self._lock.acquire()
        except Timeout:
            raise self._taken() from None
        except OSError:
            return
        self._lock.release()

    def release(self) -> None:
        self._lock.release()

    def _require_file(self) -> None:
        if self._place.exists() and not self._place.is_file():  # opening a pipe waits for its other end
            raise ConfigError(f"{self._place} is not a file; delete it")

    def _taken(self) -> ConfigError:
        number = self._place.read_text(encoding="utf-8").strip() or "unknown"
        return ConfigError(
            f"another process (pid {number}) is writing to {self._run}; wait for it, or set another name=..."
        )
