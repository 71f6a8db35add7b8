"""`retouch watch`: the page about a run on loopback, which follows the run while it goes.

An address holds a token, without which nothing is answered: other users of the machine reach its loopback, too.
The server rejects requests under another host name: no website can read the page through a name that leads here.
"""

from __future__ import annotations

import hmac
import json
import secrets
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from retouch.errors import ConfigError, RetouchError
from retouch.observe.gallery import shown_file
from retouch.observe.page import Page, document
from retouch.observe.report import page_of
from retouch.observe.run_dir import reading_records
from retouch.observe.status import lock_holder

HOST = "127.0.0.1"

_NAMES = (HOST, "localhost")
"""With any port: that of a tunnel may be another."""

EVERY_MS = 2000
"""Milliseconds between the requests of a page for news."""


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


class WatchServer(ThreadingHTTPServer):
    """Serves one run on loopback.

    Attributes:
        address: of the page, with its token.

    Raises:
        OSError: the port is taken.
    """

    daemon_threads = True

    def __init__(self, run: Path, port: int = 0) -> None:
        self.watched = Watched(run)
        self.token = secrets.token_urlsafe(24)
        super().__init__((HOST, port), _Handler)
        self.address = f"http://{HOST}:{self.server_port}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away is no error of the server."""


def open_server(run: Path, port: int) -> WatchServer:
    """A server whose page can be made.

    Raises:
        ConfigError: not a run directory, or a port that is taken.
    """
    try:
        server = WatchServer(run, port)
    except OSError:
        raise ConfigError(
            f"--port: given {port}, which is in use or reserved; set another, or 0 for a free one"
        ) from None
    try:
        server.watched.page()
    except RetouchError:
        server.server_close()
        raise
    return server


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer
    server_version, sys_version = "retouch", ""

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        token, slash, place = unquote(address.path).removeprefix("/").partition("/")
        if self.headers.get("Host", "").partition(":")[0] not in _NAMES:
            self._answer(HTTPStatus.MISDIRECTED_REQUEST, "another host name")
        elif not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self._answer(HTTPStatus.FORBIDDEN, "the address needs the token that `retouch watch` printed")
        elif not slash:  # the page finds its data and images relative to its address
            self._answer(HTTPStatus.TEMPORARY_REDIRECT, "", Location=f"/{self.server.token}/")
        elif place in ("", "data"):
            self._page(place, parse_qs(address.query).get("since", [""])[0])
        elif (image := shown_file(self.server.watched.run, place)) is not None:
            self._answer(HTTPStatus.OK, image, "image/png")
        else:
            self._answer(HTTPStatus.NOT_FOUND, "no such page")

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""

    def _page(self, place: str, since: str) -> None:
        try:
            version, page = self.server.watched.page()
        except (RetouchError, OSError) as error:  # such as a run directory that was deleted
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
            return
        live = {"version": version, "live": EVERY_MS}
        if place == "":
            self._answer(HTTPStatus.OK, document(page, live), "text/html; charset=utf-8")
        elif since == version:
            self._answer(HTTPStatus.NO_CONTENT, "")
        else:
            news = {"page": {**page.data, **live}, "images": page.images, "parts": page.parts()}
            self._answer(HTTPStatus.OK, json.dumps(news, allow_nan=False), "application/json")

    def _answer(
        self, status: HTTPStatus, content: str | bytes, kind: str = "text/plain; charset=utf-8", **headers: str
    ) -> None:
        body = content if isinstance(content, bytes) else content.encode()
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Cross-Origin-Resource-Policy": "same-origin",
            **headers,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if status is not HTTPStatus.NO_CONTENT:
            self.wfile.write(body)
