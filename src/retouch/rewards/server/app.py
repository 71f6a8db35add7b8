"""The reward server: `POST /score` over scorers in a worker. No torch, no pickle.

Requests are read, decoded and answered here; what is decoded goes to the batcher, off the event loop, and from there to
the worker (`worker.py`): a process of its own under `retouch reward serve`, a thread where an app is made of scorers.
/livez always answers; /readyz says 200 only while every scorer is loaded; /metrics is for Prometheus.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import os
import socket
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from retouch.rewards.protocol import (
    PICTURES,
    PROTOCOL_VERSION,
    RewardItem,
    Scorer,
    ScoreReply,
    ScoreRequest,
    ScorerSpec,
    WireError,
    WireOutcome,
    WireScore,
    WireScorer,
)
from retouch.rewards.server.batcher import Batcher
from retouch.rewards.server.telemetry import Telemetry
from retouch.rewards.server.worker import (
    ProcessWorker,
    ThreadWorker,
    Worker,
)
from retouch.rewards.wire import NoRoom, Room, Share, decode_items, parse_multipart, problem_of
from retouch.types import Failure, Outcome, Score

logger = logging.getLogger(__name__)

_SMALL = 64 * 1024  # bytes of a body whose pictures are decoded in well under a millisecond
_KEPT_REPLIES = 256
_MARKS = 1000  # JSON values, and commas of text, for each item that a request may have
_KEPT_REPLY = 1024 * 1024  # bytes; larger replies are not kept


@dataclass(frozen=True)
class Limits:
    """What a server takes on.

    Attributes:
        body: bytes of one request; a larger one gets 413.
        bodies: bytes of all requests that are here; what would go beyond gets 429.
        items: of one request; more get 413.
        pixels: of all pictures of one request; pictures beyond fail, before they are decoded.
        all_pixels: of all pictures that are here decoded; what would go beyond gets 429.
        body_s: seconds that a body may take to arrive; a slower one gets 408.
        idle_s: seconds between two pieces of a body.
        waiting: requests read, waiting or being scored; one more gets 429.
        max_batch: items that are scored together.
        max_wait_ms: how long an item waits for company while the worker is free.
    """

    body: int = 256 * 1024 * 1024
    bodies: int = 1024 * 1024 * 1024
    items: int = 1024
    pixels: int = 256 * 1024 * 1024
    all_pixels: int = 512 * 1024 * 1024
    body_s: float = 120.0
    idle_s: float = 15.0
    waiting: int = 64
    max_batch: int = 32
    max_wait_ms: float = 4.0


class Busy(Exception):
    """As many requests, or bytes of them, are here as may be."""


class TooLarge(Exception):
    """A request over the limits."""


class TooSlow(Exception):
    """A request whose body does not come."""


class Admission:
    """Counts requests from their first byte to their reply, and the bytes they hold."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.requests = 0
        self.bytes = 0

    @asynccontextmanager
    async def admit(self, request: Request) -> AsyncIterator[bytes]:
        """Read the body, bounded, and hold its place until the request is answered.

        Raises:
            Busy, TooLarge: over the limits, whether or not the request says how long it is.
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
                    raise Busy(f"{self.bytes} bytes of requests are here")
            body = b"".join(chunks)
            del chunks
            yield body
        finally:
            self.requests -= 1
            self.bytes -= held

    async def _in_time(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Pieces of a body, while they come: unfinished ones would hold every place.

        Raises:
            TooSlow: they do not.
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


class Authorize:
    """Lets only those in who know the token; /livez is for everybody."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/livez":
            given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            # the scheme is case-insensitive, and spaces may follow (RFC 9110, 11.4)
            if given[:7].lower() == b"bearer ":
                given = b"Bearer " + given[7:].lstrip(b" ")
            if not hmac.compare_digest(given, self._token):
                await _error(401, "a bearer token is required")(scope, receive, send)
                return
        await self._app(scope, receive, send)


class Replies:
    """Every request is computed once: who asks again by the same id for the same gets the reply of the first.

    Replies that may come out better next time (a retryable failure in them) are not kept.
    """

    def __init__(self) -> None:
        self.repeats = 0
        self._done: OrderedDict[bytes, str] = OrderedDict()
        self._under_way: dict[bytes, asyncio.Task[tuple[str, bool]]] = {}

    async def once(self, key: bytes, compute: Callable[[], Awaitable[tuple[str, bool]]]) -> str:
        """The reply to `key`; `compute` gives it, and whether it is final."""
        if key in self._done:
            self.repeats += 1
            return self._done[key]
        task = self._under_way.get(key)
        if task is None:
            # a task of its own: the first asker may hang up, and ask again
            task = self._under_way[key] = asyncio.create_task(self._compute(key, compute))
            return (await asyncio.shield(task))[0]
        reply, final = await asyncio.shield(task)
        if not final:
            return await self.once(key, compute)
        self.repeats += 1
        return reply

    async def _compute(self, key: bytes, compute: Callable[[], Awaitable[tuple[str, bool]]]) -> tuple[str, bool]:
        try:
            reply, final = await compute()
            if final and len(reply) <= _KEPT_REPLY:
                self._done[key] = reply
                while len(self._done) > _KEPT_REPLIES:
                    self._done.popitem(last=False)
            return reply, final
        finally:
            del self._under_way[key]


def create_app(
    scorers: Mapping[str, Scorer], device: str = "cpu", token: str | None = None, limits: Limits | None = None
) -> FastAPI:
    """The ASGI app over scorers in a thread of this process.

    Args:
        scorers: name -> scorer, not loaded yet.
        token: when given, every request but /livez needs `Authorization: Bearer <token>`.
    """
    return app_of(ThreadWorker(scorers, device), device, token, limits)


def app_of(worker: Worker, device: str, token: str | None = None, limits: Limits | None = None) -> FastAPI:
    """The ASGI app over a worker that is not started yet."""
    front = _Front(worker, device, limits or Limits())
    app = FastAPI(title="retouch rewards", lifespan=front.lifespan, docs_url=None, redoc_url=None)
    if token is not None:
        app.add_middleware(Authorize, token=token)  # pyright: ignore[reportArgumentType]
    for ask in (front.livez, front.readyz, front.info, front.metrics):
        app.get(f"/{ask.__name__}", response_model=None)(ask)
    app.post("/score")(front.score)
    return app


class _Front:
    """What the routes of one app share, and the routes."""

    def __init__(self, worker: Worker, device: str, limits: Limits) -> None:
        self._worker = worker
        self._device = device
        self._limits = limits
        self._telemetry = Telemetry()
        self._admission = Admission(limits)
        self._replies = Replies()
        self._room = Room(limits.all_pixels)
        self._batcher = Batcher(worker, limits.max_batch, limits.max_wait_ms / 1000, self._telemetry.batch)

    @asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        await self._worker.start()
        self._batcher.start()
        yield
        await self._batcher.stop()
        await self._worker.stop()

    async def livez(self) -> dict[str, str]:
        return {"status": "alive"}

    async def readyz(self) -> Response:
        worker = self._worker
        if worker.ready:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "failed" if worker.problem else "loading", "problem": worker.problem}, 503)

    async def info(self) -> dict[str, Any]:
        return {
            "protocol": PROTOCOL_VERSION,
            "device": self._device,
            "pid": os.getpid(),
            "worker_pid": self._worker.pid,
            "scorers": {
                name: {
                    "range": spec.range,
                    "needs": sorted(spec.needs),
                    "revision": spec.revision,
                    "licence": spec.licence,
                }
                for name, spec in self._worker.specs.items()
            },
        }

    async def metrics(self) -> Response:
        gauges = {
            "requests_waiting": self._admission.requests,
            "request_bytes": self._admission.bytes,
            "pixels": self._room.taken,
            "items_quarantined": self._batcher.quarantined,
            "items_waiting": self._batcher.waiting,
            "ready": int(self._worker.ready),
            "worker_restarts": self._worker.restarts,
            "repeated_requests": self._replies.repeats,
        }
        return Response(self._telemetry.text(gauges), media_type="text/plain; version=0.0.4")

    async def score(self, request: Request) -> Response:
        received = time.monotonic()
        response = await self._answer(request, received)
        self._telemetry.request(response.status_code, time.monotonic() - received)
        return response

    async def _answer(self, request: Request, received: float) -> Response:
        if not self._worker.ready:
            return _error(503, self._worker.problem or "the scorers are loading", retry_after=1)
        try:
            async with self._admission.admit(request) as body:
                content_type = request.headers.get("content-type", "")
                message, parts, key = await _aside(len(body), _parse, body, content_type, self._limits)
                size = len(body)
                del body
                deadline = received + message.deadline_ms / 1000
                asked = _Asked(message, parts, deadline, size)
                reply = await self._replies.once(key, lambda: self._scored(asked))
        except (Busy, NoRoom) as busy:
            return _error(429, str(busy), retry_after=1)
        except MemoryError:
            return _error(429, "no memory for this request", retry_after=1)
        except TooSlow as slow:
            return _error(408, str(slow), close=True)
        except TooLarge as large:
            return _error(413, f"{large}; send fewer items in a request (reward_client.batch_size)")
        except ValueError as broken:  # pydantic's ValidationError is one
            return _error(422, problem_of(broken)[:2000])
        return Response(reply, media_type="application/json")

    async def _scored(self, asked: _Asked) -> tuple[str, bool]:
        """The JSON of the reply, and whether asking again would give the same."""
        share = Share(self._room, self._limits.pixels)
        try:
            return await self._scored_within(asked, share)
        finally:
            share.give_back()

    async def _scored_within(self, asked: _Asked, share: Share) -> tuple[str, bool]:
        message = asked.message
        raw = asked.parts is not None and all(kind.startswith("image/x-raw") for _, kind in asked.parts.values())
        size = asked.size if raw else _SMALL + 1  # a small file may hold many pixels
        decoded = await _aside(size, decode_items, message, asked.parts, share)
        items = [item for item in decoded if isinstance(item, RewardItem)]
        outcomes = await self._batcher.score(message.rewards, items, asked.deadline)
        broken = [Failure("bad_item", one) for one in decoded if isinstance(one, str)]
        for name, column in outcomes.items():
            # names that nobody serves share a label: a client could make any number of them
            self._telemetry.outcomes(name if name in self._worker.specs else "unknown", [*column, *broken])
        final = not any(isinstance(o, Failure) and o.retryable for column in outcomes.values() for o in column)
        return _reply(message, decoded, outcomes, self._worker.specs).model_dump_json(), final


@dataclass(frozen=True)
class _Asked:
    """A request as it was read; `parts` is None where its pictures are base64, `size` the bytes of its body."""

    message: ScoreRequest
    parts: Mapping[str, tuple[bytes, str]] | None
    deadline: float
    size: int


async def _aside(size: int, work: Callable[..., Any], *arguments: Any) -> Any:
    """Do it off the event loop, unless it is so small that the way to a thread would cost more."""
    return work(*arguments) if size <= _SMALL else await asyncio.to_thread(work, *arguments)


def _parse(
    body: bytes, content_type: str, limits: Limits
) -> tuple[ScoreRequest, dict[str, tuple[bytes, str]] | None, bytes]:
    """A body -> its message, its binary parts where it is multipart, and what makes it this request and no other.

    Raises:
        TooLarge, ValueError: over the limits, or not of the protocol.
    """
    if content_type.startswith("multipart/form-data"):
        parts = parse_multipart(body, content_type, len(PICTURES) * limits.items + 1)
        if "manifest" not in parts:
            raise ValueError('a multipart request needs a part "manifest"')
        manifest, _ = parts.pop("manifest")
    else:
        manifest, parts = body, None
    marks = sum(manifest.count(mark) for mark in (b",", b"[", b"{"))
    if marks > _MARKS * limits.items:  # before they become objects
        raise TooLarge(f"{marks} values, over the limit of {_MARKS * limits.items}")
    message = ScoreRequest.model_validate_json(manifest)
    if len(message.items) > limits.items:
        raise TooLarge(f"{len(message.items)} items, over the limit of {limits.items}")
    digest = hashlib.blake2b(message.model_dump_json(exclude={"deadline_ms"}).encode(), digest_size=16)
    for name, (content, kind) in (parts or {}).items():
        for field in (name.encode(), kind.encode(), content):
            digest.update(len(field).to_bytes(8, "big") + field)
    return message, parts, digest.digest()


def _reply(
    message: ScoreRequest,
    decoded: list[RewardItem | str],
    outcomes: Mapping[str, list[Outcome]],
    specs: Mapping[str, ScorerSpec],
) -> ScoreReply:
    cursors = {name: iter(column) for name, column in outcomes.items()}
    items: list[WireOutcome] = []
    for wire, item in zip(message.items, decoded, strict=True):
        result = WireOutcome(id=wire.id)
        for name in message.rewards:
            outcome = Failure("bad_item", item) if isinstance(item, str) else next(cursors[name])
            if isinstance(outcome, Score):
                result.scores[name] = WireScore(value=outcome.value, detail=dict(outcome.detail))
            else:
                result.errors[name] = WireError(code=outcome.code, message=outcome.message, retryable=outcome.retryable)
        items.append(result)
    revisions = {name: WireScorer(revision=s.revision) for name, s in specs.items() if name in message.rewards}
    return ScoreReply(items=items, scorers=revisions)


def _error(status: int, message: str, retry_after: int | None = None, *, close: bool = False) -> JSONResponse:
    headers = {"Retry-After": str(retry_after)} if retry_after is not None else {}
    headers |= {"Connection": "close"} if close else {}
    return JSONResponse({"error": message}, status, headers=headers)


def run_app(app: FastAPI, listener: socket.socket) -> None:
    """Serve on a bound socket until SIGTERM or SIGINT; requests under way are finished first."""
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=30, backlog=2048)
    uvicorn.Server(config).run(sockets=[listener])


def front() -> None:
    """The front of one instance, as `launch` starts it: `python -m retouch.rewards.server.app`.

    One line of JSON on standard input says what to serve; the end of standard input is the end of this process, so that
    a killed supervisor leaves nothing behind.
    """
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("retouch").setLevel(logging.INFO)
    told = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_exit_at_end_of, args=(sys.stdin.buffer,), daemon=True, name="supervisor").start()
    listener = socket.socket(fileno=told["listener"])
    logger.info("serving %s on %s (pid %d)", ", ".join(told["scorers"]), told["url"], os.getpid())
    worker = ProcessWorker(told["scorers"], told["device"])
    run_app(app_of(worker, told["device"], told["token"], Limits(**told["limits"])), listener)


def _exit_at_end_of(stream: Any) -> None:
    stream.read()
    os._exit(0)


if __name__ == "__main__":
    from retouch.rewards.server.app import front as main

    main()
