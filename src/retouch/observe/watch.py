"""`retouch watch`: the page about a run on loopback, which follows the run while it goes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from urllib.parse import parse_qs

from retouch.errors import RetouchError
from retouch.observe.gallery import shown_file
from retouch.observe.loopback import LoopbackHandler, LoopbackServer, open_on
from retouch.observe.page import Page, document
from retouch.observe.report import page_of
from retouch.observe.run_dir import reading_records
from retouch.observe.status import lock_holder

EVERY_MS = 2000
"""Milliseconds between the requests of a page for news."""

WAIT_S = 120.0
"""Longest wait for a run that begins: its directory is made once its model is loaded."""

_LOOK_S = 0.2


class Watched:
    """The page about a run, made again when its files or its lock have changed."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self._making = threading.Lock()
        self._made: tuple[str, Page] | None = None

    def page(self) -> tuple[str, Page]:
        """A text that changes with the page, and the page.

        Raises:
            ConfigError: not a run directory.
        """
        with self._making:
            version = self._version()
            if self._made is None or self._made[0] != version:
                with reading_records(self.run):
                    self._made = version, page_of(self.run, inside=False, live=True)
            return self._made

    def _version(self) -> str:
        """Sizes and times of files, and the holder of the lock. Evaluations are stored before their record."""
        about = [(self.run / name) for name in ("metrics.jsonl", "config.yaml")]
        sizes = [(one.stat().st_size, one.stat().st_mtime_ns) for one in about if one.is_file()]
        return "-".join(map(str, (*(number for pair in sizes for number in pair), lock_holder(self.run)[0])))


class WatchServer(LoopbackServer):
    """Serves one run."""

    def __init__(self, run: Path, port: int = 0) -> None:
        self.watched = Watched(run)
        super().__init__(port, _Handler)


def wait_for(run: Path, tell: Callable[[str], object]) -> None:
    """Wait until a run directory has its run file, at most `WAIT_S`; `tell` takes a line about it."""
    file = run / "config.yaml"
    if file.is_file() or run.is_file() or (run.is_dir() and any(run.iterdir())):
        return
    tell(f"waiting up to {WAIT_S:g} s for {file}, which `retouch train` writes once its model is loaded; Ctrl-C ends")
    last = time.monotonic() + WAIT_S
    while not file.is_file() and time.monotonic() < last:
        time.sleep(_LOOK_S)


def open_server(run: Path, port: int) -> WatchServer:
    """A server whose page can be made.

    Raises:
        ConfigError: not a run directory, or a port that is taken.
    """
    server = open_on(port, lambda: WatchServer(run, port))
    try:
        server.watched.page()
    except RetouchError:
        server.server_close()
        raise
    return server


class _Handler(LoopbackHandler):
    server: WatchServer

    def get(self, place: str, query: str) -> None:
        if place in ("", "data"):
            self._page(place, parse_qs(query).get("since", [""])[0])
        elif (image := shown_file(self.server.watched.run, place)) is not None:
            self.answer(HTTPStatus.OK, image, "image/png")
        else:
            self.answer(HTTPStatus.NOT_FOUND, "no such page")

    def _page(self, place: str, since: str) -> None:
        try:
            version, page = self.server.watched.page()
        except (RetouchError, OSError) as error:  # such as a run directory that was deleted
            self.answer(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
            return
        live = {"version": version, "live": EVERY_MS}
        if place == "":
            self.answer(HTTPStatus.OK, document(page, live), "text/html; charset=utf-8")
        elif since == version:
            self.answer(HTTPStatus.NO_CONTENT, "")
        else:
            news = {"page": {**page.data, **live}, "images": page.images, "parts": page.parts()}
            self.answer(HTTPStatus.OK, json.dumps(news, allow_nan=False), "application/json")
