"""Connections of a server, bounded in number, time and work: before a request is read, and while a reply is taken.

A *stranger* is a connection without a complete request that bears the token. It lives `header_s` seconds, and the
oldest gives way to the newest when there are too many: whoever opens connections and sends nothing keeps nobody out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from retouch.rewards.server.admission import Limits, bears

_STRANGERS_BYTES = 16 << 20
"""Largest body of a request without the token that is read: a batch of images of a client with a wrong one."""

_SLICE = 4096  # bytes of a request that are parsed at once where one byte may be a chunk: some 10 ms


class Connections:
    """The open connections of one server.

    Args:
        token: that makes a stranger known; None: a complete request does.
    """

    def __init__(self, limits: Limits, token: str | None) -> None:
        self.limits = limits
        self.token = token
        self._open: set[BoundedConnection] = set()
        self.strangers: dict[BoundedConnection, None] = {}  # oldest first

    def add(self, one: BoundedConnection) -> None:
        """Count a new connection; with too many, close the oldest stranger."""
        self._open.add(one)
        self.strangers[one] = None
        if len(self._open) > self.limits.connections:
            oldest = next(iter(self.strangers))
            self.remove(oldest)
            oldest.transport.abort()

    def remove(self, one: BoundedConnection) -> None:
        self._open.discard(one)
        self.strangers.pop(one, None)

    def admit(self, one: BoundedConnection) -> bool:
        """Whether the request whose headers have arrived bears the token; its connection is then no stranger."""
        known = self.token is None or bears(one.headers, self.token)
        if known:
            self.strangers.pop(one, None)
        return known


class _ClosedByProtocol:
    """A transport whose `close` is `BoundedConnection.close`; the rest is that of the transport."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self._transport = transport
        self.close = close

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class BoundedConnection(H11Protocol):
    """Closes a connection whose request line and headers do not arrive within `header_s` seconds of the connection, or
    of the first byte of a later request, or whose reply is not taken within `reply_s` seconds.

    A request may be answered before its body has arrived (401, 413, 429). Closing a socket with bytes that nobody read
    makes TCP reset it, and the peer may lose the answer: its body is read to the end and dropped, within limits."""

    peers: Connections
    _socket: asyncio.Transport
    _due: asyncio.TimerHandle | None = None
    _untaken: asyncio.TimerHandle | None = None
    _rest = b""
    _to_drop: int | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._socket = transport
        super().connection_made(cast("asyncio.Transport", _ClosedByProtocol(transport, self.close)))
        transport.set_write_buffer_limits(high=0)  # `pause_writing` then means that the peer takes nothing
        self._expect_headers()
        self.peers.add(self)

    def close(self) -> None:
        """End the answer, and close the connection when the peer does, or after `header_s` seconds."""
        sends = self.conn.their_state in (h11.SEND_BODY, h11.ERROR)
        if not sends or self._to_drop is not None or self._socket.is_closing():
            self._socket.close()
            return
        if self.conn.their_state is h11.ERROR and self.cycle is not None:  # nothing of the body will be read
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        # of a stranger few bytes, because whoever sends for ever takes the time of the loop
        self._rest, self._to_drop = b"", _STRANGERS_BYTES if self in self.peers.strangers else self.peers.limits.body
        if self._socket.can_write_eof():
            self._socket.write_eof()
        self._stop_waiting()
        self._due = self.loop.call_later(self.peers.limits.header_s, self._socket.abort)
        self._socket.resume_reading()

    def data_received(self, data: bytes) -> None:
        if self._to_drop is not None:
            self._to_drop -= len(data)
            if self._to_drop < 0:
                self._socket.abort()
            return
        if self._rest:  # some bytes may come although reading is paused
            self._rest += data
            return
        self._receive(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._rest = b""
        self._stop_waiting()
        self._stop_untaken()
        self.peers.remove(self)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._untaken = self.loop.call_later(self.peers.limits.reply_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_untaken()
        super().resume_writing()

    def _receive(self, data: bytes) -> None:
        """Parse bytes, of chunks one slice in each turn of the loop: each chunk costs as much as a message."""
        whole = self.conn.their_state is h11.SEND_BODY and not self._is_chunked()
        now, self._rest = (data, b"") if whole else (data[:_SLICE], data[_SLICE:])
        request: Any = self.cycle
        super().data_received(now)
        if self._to_drop is not None:  # answered already, by 400
            return
        if self.cycle is not request:
            if self.peers.admit(self):
                self._stop_waiting()
            elif self.conn.their_state is h11.SEND_BODY:
                self.flow.pause_reading()  # the answer is 401, which closes the connection
                self._rest = b""
        elif self._due is None and request is not None and request.response_complete:
            self._expect_headers()
        if self._rest and not self.transport.is_closing():
            self.transport.pause_reading()
            self.loop.call_soon(self._receive_rest)

    def _receive_rest(self) -> None:
        data, self._rest = self._rest, b""
        if data and not self.transport.is_closing():
            self._receive(data)
            if not self._rest and not self.flow.read_paused:
                self.transport.resume_reading()

    def _is_chunked(self) -> bool:
        return any(name == b"transfer-encoding" for name, _ in self.headers)

    def _expect_headers(self) -> None:
        self._due = self.loop.call_later(self.peers.limits.header_s, self._socket.close)

    def _stop_waiting(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _stop_untaken(self) -> None:
        if self._untaken is not None:
            self._untaken.cancel()
            self._untaken = None


def protocol_of(limits: Limits, token: str | None = None) -> type[BoundedConnection]:
    """The HTTP protocol of one server, for uvicorn."""
    return type("BoundedConnection", (BoundedConnection,), {"peers": Connections(limits, token)})
