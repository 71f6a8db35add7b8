"""log.txt: the log lines of a run."""

from __future__ import annotations

import logging
from pathlib import Path

_NAME = "retouch"


class LogFile:
    """Appends the records of the logger `retouch` from INFO on to a file, at any level of the program. Other handlers
    receive the same records as before; without any, warnings still go to standard error."""

    def __init__(self, path: Path) -> None:
        self._logger = logging.getLogger(_NAME)
        self._level = self._logger.level
        self._threshold = self._logger.getEffectiveLevel()
        file = logging.FileHandler(path, encoding="utf-8")
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self._others = _handlers(self._logger)
        self._added: list[logging.Handler] = [file]
        if not self._others and logging.lastResort is not None:  # Python uses it only without other handlers
            self._others = [logging.lastResort]
            self._added += self._others
        for handler in self._added:
            self._logger.addHandler(handler)
        for handler in self._others:
            handler.addFilter(self._passes)
        if self._threshold > logging.INFO:
            self._logger.setLevel(logging.INFO)

    def close(self) -> None:
        """Close the file, and put the level and the other handlers back."""
        if self._threshold > logging.INFO:
            self._logger.setLevel(self._level)
        for handler in self._others:
            handler.removeFilter(self._passes)
        for handler in self._added:
            self._logger.removeHandler(handler)
        self._added[0].close()

    def _passes(self, record: logging.LogRecord) -> bool:
        """Whether the other handlers would receive the record at the original level."""
        return record.levelno >= self._threshold or record.name.partition(".")[0] != _NAME


def _handlers(logger: logging.Logger) -> list[logging.Handler]:
    """The handlers of a logger and its parents."""
    above = _handlers(logger.parent) if logger.propagate and logger.parent is not None else []
    return [*logger.handlers, *above]
