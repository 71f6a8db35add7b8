"""Pages on loopback: for the user of this machine alone, whoever else can reach its ports.

An address holds a token, without which nothing is answered: other users of the machine reach its loopback, too.
A server rejects requests under another host name: no website can read a page through a name that leads here.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from retouch.errors import ConfigError
from retouch.files import plain_json

HOST = "127.0.0.1"

_NAMES = (HOST, "localhost")
"""With any port: that of a tunnel may be another."""

_MOST_BYTES = 1 << 16
"""Size of a request of a page, at most."""


class LoopbackServer(ThreadingHTTPServer):
    """A server of one page.

    Attributes:
        address: of the page, with its token.

    Raises:
        OSError: the port is taken.
    """

    daemon_threads = True

    def __init__(self, port: int, handler: type[LoopbackHandler]) -> None:
        self.token = secrets.token_urlsafe(24)
        super().__init__((HOST, port), handler)
        self.address = f"http://{HOST}:{self.server_port}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away is no error of the server."""


Server = TypeVar("Server", bound=LoopbackServer)


def open_on(port: int, make: Callable[[], Server]) -> Server:
    """Raises: ConfigError: the port is taken."""
    try:
        return make()
    except OSError:
        raise ConfigError(
            f"--port: given {port}, which is in use or reserved; set another, or 0 for a free one"
        ) from None


class LoopbackHandler(BaseHTTPRequestHandler):
    """Answers requests that have the token and this host's name."""

    server: LoopbackServer
    server_version, sys_version = "retouch", ""

    def get(self, place: str, query: str) -> None:
        """Answer for a place below the page's address; "" is the page."""
        raise NotImplementedError

    def post(self, place: str, told: Any) -> None:
        """Answer to a JSON value that the page sent."""
        self.answer(HTTPStatus.NOT_FOUND, "nothing takes what was sent")

    def do_GET(self) -> None:
        if (found := self._place()) is not None:
            self.get(found, urlsplit(self.path).query)

    def do_POST(self) -> None:
        if (place := self._place()) is None:
            return
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > _MOST_BYTES:
            self.answer(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"expected at most {_MOST_BYTES} bytes")
            return
        try:
            told = plain_json.loads(self.rfile.read(int(length)), finite=True)
        except ValueError:
            self.answer(HTTPStatus.BAD_REQUEST, "not JSON")
            return
        self.post(place, told)

    def _place(self) -> str | None:
        """The place below the page's address; None after the answer to a request without access, or without the last
        slash."""
        token, slash, place = unquote(urlsplit(self.path).path).removeprefix("/").partition("/")
        if self.headers.get("Host", "").partition(":")[0] not in _NAMES:
            self.answer(HTTPStatus.MISDIRECTED_REQUEST, "another host name")
        elif not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self.answer(HTTPStatus.FORBIDDEN, "the address needs the token that the command printed")
        elif not slash:  # the page finds its data and images relative to its address
            self.answer(HTTPStatus.TEMPORARY_REDIRECT, "", Location=f"/{self.server.token}/")
        else:
            return place
        return None

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""

    def answer(
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
