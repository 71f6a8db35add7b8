"""Which requests a server admits: limits, bearer token, bounded bodies."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from retouch.rewards.addresses import is_local


@dataclass(frozen=True)
class Limits:
    """Limits of a server.

    Attributes:
        body: bytes of one request; a larger one gets 413.
        bodies: bytes of all open requests; a request beyond gets 429.
        text: bytes of one request that are no images (prompts, metadata); more get 413.
        items: items of one request; more get 413.
        pixels: pixels of all images of one request; images beyond fail before they are decoded.
        all_pixels: decoded pixels of all open requests; a request beyond gets 429.
        connections: open connections; with more, the oldest without a request that bears the token is closed.
        header_s: seconds for a request line with its headers to arrive, and for the token; a slower connection is
            closed.
        reply_s: seconds for a reply to be taken; a slower connection is closed.
        body_s: seconds for a body to arrive; a slower one gets 408.
        idle_s: seconds between two chunks of a body.
        waiting: open requests; one more gets 429.
        max_batch: items that are scored together.
        max_wait_ms: maximum batching delay in milliseconds.
    """

    body: int = 256 * 1024 * 1024
    bodies: int = 1024 * 1024 * 1024
    text: int = 16 * 1024 * 1024
    items: int = 1024
    pixels: int = 256 * 1024 * 1024
    all_pixels: int = 512 * 1024 * 1024
    connections: int = 1024
    header_s: float = 5.0
    reply_s: float = 60.0
    body_s: float = 120.0
    idle_s: float = 15.0
    waiting: int = 64
    max_batch: int = 32
    max_wait_ms: float = 4.0


class Busy(Exception):
    """The maximum of open requests, or of their bytes, is reached."""


class TooLarge(Exception):
    """A request over the limits."""


class TooSlow(Exception):
    """A request whose body does not arrive in time."""


class Admission:
    """Counts requests and their bytes, from the first byte to the reply."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.requests = 0
        self.bytes = 0

    @asynccontextmanager
    async def admit(self, request: Request) -> AsyncIterator[bytes]:
        """Read the body within the limits, and count it until the request is answered.

        Raises:
            Busy, TooLarge, TooSlow: over the limits, with or without a declared length.
        """
        if self.requests >= self.limits.waiting:
            raise Busy(f"{self.requests} requests are waiting")
        if int(request.headers.get("content-length", "0")) > self.limits.body:
            raise TooLarge(f"the body is over {self.limits.body} bytes")
        self.requests += 1
        held = 0
        try:
            chunks: list[bytes] = []
            async for chunk in self._in_time(request.stream()):
                held += len(chunk)
                self.bytes += len(chunk)
                chunks.append(chunk)
                if held > self.limits.body:
                    raise TooLarge(f"the body is over {self.limits.body} bytes")
                if self.bytes > self.limits.bodies:
                    raise Busy(f"{self.bytes} bytes of requests are open")
            body = b"".join(chunks)
            del chunks
            yield body
        finally:
            self.requests -= 1
            self.bytes -= held

    async def _in_time(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Chunks of a body; a timeout keeps unfinished requests from using up the limit of open ones.

        Raises:
            TooSlow: the next chunk, or the whole body, is late.
        """
        ends = time.monotonic() + self.limits.body_s
        while True:
            try:
                async with asyncio.timeout(min(self.limits.idle_s, ends - time.monotonic())):
                    chunk = await anext(chunks)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise TooSlow("the body did not arrive in time") from None
            yield chunk


class WrongType(Exception):
    """A body of a content type that is not of the protocol."""


class LocalOnly:
    """Rejects what a web page sends: requests with an `Origin`, and those for another name than this machine's, to
    which a page's own server can point its name (DNS rebinding)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            host = headers.get(b"host", b"127.0.0.1").decode("latin-1")  # a browser always sends it
            try:
                named = is_local(f"http://{host}")
            except ValueError:  # half an IPv6 address
                named = False
            if b"origin" in headers or not named:
                await error_reply(403, "this server has no token: it answers programs on its own machine alone")(
                    scope, receive, send
                )
                return
        await self._app(scope, receive, send)


@dataclass(eq=False, repr=False)
class Authorize:
    """Rejects requests without the bearer token, except /livez."""

    app: ASGIApp
    token: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/livez" and not bears(scope["headers"], self.token):
            await error_reply(401, "a bearer token is required", close=True)(scope, receive, send)
            return
        await self.app(scope, receive, send)


def bears(headers: Iterable[tuple[bytes, bytes]], token: str) -> bool:
    """Whether headers with names in lower case bear the token."""
    given = next((value for name, value in headers if name == b"authorization"), b"")
    # the scheme is case-insensitive, and spaces may follow (RFC 9110, 11.4)
    if given[:7].lower() == b"bearer ":
        given = b"Bearer " + given[7:].lstrip(b" ")
    return hmac.compare_digest(given, f"Bearer {token}".encode())


def error_reply(status: int, message: str, retry_after: int | None = None, *, close: bool = False) -> JSONResponse:
    headers = {"Retry-After": str(retry_after)} if retry_after is not None else {}
    headers |= {"Connection": "close"} if close else {}
    return JSONResponse({"error": message}, status, headers=headers)
