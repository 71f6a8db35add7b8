"""One process writes to a run directory."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from retouch.config import ConfigError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

logger = logging.getLogger(__name__)


class RunLock:
    """`flock` on RUN/.lock, which holds the number of the process that has it. The kernel lets go of it when that dies,
    however it does."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._file: Any = None

    def take(self) -> None:
        """Hold it until `release`; nothing where it is held here already, or on a system without `flock`. A file system
        without locks is warned about.

        Raises:
            ConfigError: another process has it.
        """
        if self._file is not None or fcntl is None:
            return
        self._run.mkdir(parents=True, exist_ok=True)
        file = (self._run / ".lock").open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._taken(file) from None
        except OSError as error:
            file.close()
            logger.warning("%s cannot be locked (%s): see to it that no other process writes there", self._run, error)
            return
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        self._file = file

    def require_free(self) -> None:
        """Before minutes go into loading a model; takes nothing and makes no file.

        Raises:
            ConfigError: another process has it.
        """
        place = self._run / ".lock"
        if self._file is not None or fcntl is None or not place.exists():
            return
        with place.open(encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise self._taken(file) from None
            except OSError:
                return

    def release(self) -> None:
        if self._file is not None and fcntl is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)  # also of copies that a child has inherited
            self._file.close()
            self._file = None

    def _taken(self, file: Any) -> ConfigError:
        with file:
            file.seek(0)
            number = file.read().strip() or "unknown"
        return ConfigError(
            f"another process (pid {number}) is writing to {self._run}; wait for it, or choose another name=..."
        )
