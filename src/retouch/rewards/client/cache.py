"""Scores on disk, keyed by everything they depend on: a resumed run requests no score twice. Failures are not kept."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import sqlite3
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from filelock import FileLock

from retouch.files import plain_json
from retouch.files.disk import require_no_link
from retouch.rewards.protocol import PICTURES, Pixels, RewardItem
from retouch.types import Outcome, Score

logger = logging.getLogger(__name__)

_TABLE = "CREATE TABLE IF NOT EXISTS scores (key BLOB PRIMARY KEY, value REAL NOT NULL, detail TEXT NOT NULL)"

_PARTS = ("", "-wal", "-shm", "-journal")
"""Endings of the files of a database: a write-ahead log would be played back into a new file of its name."""

_LOCK = ".lock"
"""Ending of the file that is locked while one that is no database is replaced."""

_WAIT_S, _PAUSE_S = 30.0, 0.1
"""Seconds to wait for a file that another process holds; seconds between two attempts to open it."""


class ScoreCache:
    """A table of scores in one sqlite file for several threads and processes of one machine (the write-ahead log is
    shared memory). A file that is not a database is renamed and replaced. Every method raises sqlite3.Error where the
    file cannot be used at the moment: another process holds it, or the disk is full.
    """

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if a link or a pipe is in the place of one of its files."""
        for ending in (*_PARTS, _LOCK):
            require_no_link(path.with_name(path.name + ending))
        self.path = path
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._pid = 0

    def get(self, keys: Sequence[bytes]) -> dict[bytes, Score]:
        """The stored scores of these keys."""
        with self._lock:
            connection = self._open()
            rows = [
                (key, row)
                for key in keys
                if (row := connection.execute("SELECT value, detail FROM scores WHERE key = ?", (key,)).fetchone())
            ]
        found: dict[bytes, Score] = {}
        for key, (value, detail) in rows:
            with suppress(ValueError, TypeError):  # a damaged row counts as missing
                score = Score(float(value), dict(plain_json.loads(detail, finite=True)))
                if math.isfinite(score.value):
                    found[key] = score
        return found

    def put(self, outcomes: Mapping[bytes, Outcome]) -> None:
        """Store the scores among the outcomes."""
        rows = [(key, o.value, json.dumps(dict(o.detail))) for key, o in outcomes.items() if isinstance(o, Score)]
        with self._lock:
            connection = self._open()
            with connection:
                connection.executemany("INSERT OR REPLACE INTO scores VALUES (?, ?, ?)", rows)

    def close(self) -> None:
        with self._lock:
            if self._connection and self._pid == os.getpid():
                self._connection.close()
            self._connection = None

    def _open(self) -> sqlite3.Connection:
        if self._connection is None or self._pid != os.getpid():  # a fork must not share a connection
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._connection = self._connect()
            except sqlite3.OperationalError:  # locked, or an error of the disk: its scores may have had a price
                raise
            except sqlite3.DatabaseError:
                self._connection = self._replace()
            self._pid = os.getpid()
        return self._connection

    def _replace(self) -> sqlite3.Connection:
        """Move a file that is no database and open a new one, unless another process did since."""
        with FileLock(self.path.with_name(self.path.name + _LOCK), fallback_to_soft=False):
            try:
                return self._connect()
            except sqlite3.OperationalError:
                raise
            except sqlite3.DatabaseError as error:
                aside = self.path.with_suffix(self.path.suffix + ".broken")
                logger.warning("%s is not a cache of scores (%s); it is moved to %s", self.path, error, aside)
                for ending in reversed(_PARTS):  # the database last: until then, no process makes a new one
                    with suppress(FileNotFoundError):
                        self.path.with_name(self.path.name + ending).replace(aside.with_name(aside.name + ending))
            return self._connect()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=_PAUSE_S, check_same_thread=False)
        start, waits = time.monotonic(), False
        while True:  # sqlite itself does not wait for another process that sets the journal mode
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = NORMAL")
                connection.execute(_TABLE)
                connection.execute(f"PRAGMA busy_timeout = {round(1000 * _WAIT_S)}")
                return connection
            except sqlite3.Error as error:
                busy = error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
                if not busy or time.monotonic() - start >= _WAIT_S:
                    connection.close()
                    raise
                if not waits:
                    logger.info("%s is in use by another process; waiting for up to %g s", self.path, _WAIT_S)
                waits = True
                time.sleep(_PAUSE_S)


def cache_key(item: RewardItem, reward: str, revision: str) -> bytes:
    """Digest of everything that a score depends on: pixels and their shapes, prompt, metadata, the reward, and its
    revision, which covers the options of the scorer (`PackageScorer.set_revision`)."""
    digest = hashlib.blake2b(digest_size=20)
    text = json.dumps([reward, revision, item.prompt, dict(item.metadata)], sort_keys=True)
    digest.update(text.encode())
    for name in PICTURES:
        pixels: Pixels | None = getattr(item, name)
        digest.update(b"-" if pixels is None else repr((name, pixels.shape)).encode() + pixels.tobytes())
    return digest.digest()
