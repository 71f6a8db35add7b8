"""The reward server: `POST /score` over scorers that live in this process. No torch, no pickle.

Requests are decoded off the event loop and scored one batch at a time in a worker thread, because scorers are not
thread-safe. /livez always answers; /readyz says 200 only once every scorer is loaded.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import python_multipart  # noqa: F401  # pyright: ignore[reportUnusedImport]  # starlette misses it only at the first request
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive

from retouch.rewards.protocol import (
    PICTURES,
    PROTOCOL_VERSION,
    RewardItem,
    Scorer,
    ScoreReply,
    ScoreRequest,
    WireError,
    WireOutcome,
    WireScore,
    WireScorer,
    score_checked,
)
from retouch.rewards.wire import decode_items
from retouch.types import Failure, Outcome, Score

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """What a server takes on.

    Attributes:
        body: bytes of one request; a larger one gets 413.
        items: of one request; more get 413.
        waiting: requests read, waiting or being scored; one more gets 429.
    """

    body: int = 256 * 1024 * 1024
    items: int = 1024
    waiting: int = 64


class Busy(Exception):
    """As many requests are waiting as may."""


class TooLarge(Exception):
    """A request over the limits."""


class ScoringWorker:
    """Runs the scorers, one request at a time, and knows whether they are loaded and how many requests wait."""

    def __init__(self, scorers: Mapping[str, Scorer], device: str) -> None:
        self.scorers = dict(scorers)
        self.device = device
        self.ready = False
        self.problem: str | None = None
        self.waiting = 0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="scorer")

    def start(self) -> None:
        self._thread.submit(self._load)

    def stop(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    @contextmanager
    def admit(self, limit: int) -> Iterator[None]:
        """Count a request from its first byte to its reply, so that bodies being read count too.

        Raises:
            Busy: `limit` requests are here already.
        """
        if self.waiting >= limit:
            raise Busy(f"{self.waiting} requests are waiting")
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1

    async def score(self, names: list[str], items: list[RewardItem], deadline: float) -> dict[str, list[Outcome]]:
        """Outcomes by reward, in the order of the items. Work whose deadline passed in the queue is not done."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._score, names, items, deadline)

    def _score(self, names: list[str], items: list[RewardItem], deadline: float) -> dict[str, list[Outcome]]:
        outcomes: dict[str, list[Outcome]] = {}
        for name in names:
            if time.monotonic() > deadline:
                late = Failure("deadline", "the deadline passed before the item was scored", retryable=True)
                outcomes[name] = [late] * len(items)
            elif name not in self.scorers:
                known = ", ".join(self.scorers)
                outcomes[name] = [Failure("unknown_reward", f"no reward {name!r} here; there are: {known}")] * len(
                    items
                )
            else:
                outcomes[name] = score_checked(self.scorers[name], items)
        return outcomes

    def _load(self) -> None:
        try:
            for name, scorer in self.scorers.items():
                started = time.monotonic()
                scorer.load(self.device)
                logger.info("%s loaded on %s in %.1f s", name, self.device, time.monotonic() - started)
        except Exception as error:  # shown by /readyz and in the log: a server that cannot load must say why
            logger.exception("loading the scorers failed")
            self.problem = f"{type(error).__name__}: {error}"
        else:
            self.ready = True


def create_app(
    scorers: Mapping[str, Scorer], device: str = "cpu", token: str | None = None, limits: Limits | None = None
) -> FastAPI:
    """The ASGI app.

    Args:
        scorers: name -> scorer, not loaded yet.
        token: when given, every request but /livez needs `Authorization: Bearer <token>`.
    """
    worker = ScoringWorker(scorers, device)
    limits = limits or Limits()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        worker.stop()

    app = FastAPI(title="retouch rewards", lifespan=lifespan, docs_url=None, redoc_url=None)

    @app.middleware("http")
    async def authorize(request: Request, call_next: Any) -> Response:
        if token is not None and request.url.path != "/livez":
            given = request.headers.get("authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
                return _error(401, "a bearer token is required")
        return await call_next(request)

    @app.get("/livez")
    async def livez() -> dict[str, str]:  # pyright: ignore[reportUnusedFunction]
        return {"status": "alive"}

    @app.get("/readyz")
    async def readyz() -> Response:  # pyright: ignore[reportUnusedFunction]
        if worker.ready:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "failed" if worker.problem else "loading", "problem": worker.problem}, 503)

    @app.get("/info")
    async def info() -> dict[str, Any]:  # pyright: ignore[reportUnusedFunction]
        return {
            "protocol": PROTOCOL_VERSION,
            "device": device,
            "pid": os.getpid(),
            "scorers": {
                name: {
                    "range": scorer.spec.range,
                    "needs": sorted(scorer.spec.needs),
                    "revision": scorer.spec.revision,
                    "licence": scorer.spec.licence,
                }
                for name, scorer in worker.scorers.items()
            },
        }

    @app.post("/score")
    async def score(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        received = time.monotonic()
        if not worker.ready:
            return _error(503, worker.problem or "the scorers are loading", retry_after=1)
        try:
            with worker.admit(limits.waiting):
                message, parts = await _parse(request, limits)
                reply = await _answer(worker, message, parts, received + message.deadline_ms / 1000)
        except Busy as busy:
            return _error(429, str(busy), retry_after=1)
        except TooLarge as large:
            return _error(413, f"{large}; send fewer items in a request (reward_client.batch_size)")
        except HTTPException as broken:  # how starlette reports a broken form
            return _error(422, str(broken.detail))
        except ValueError as broken:  # pydantic's ValidationError is one
            return _error(422, str(broken))
        return Response(reply, media_type="application/json")

    return app


async def _answer(
    worker: ScoringWorker, message: ScoreRequest, parts: Mapping[str, tuple[bytes, str]] | None, deadline: float
) -> str:
    """The JSON of the reply to a request."""
    decoded = await asyncio.to_thread(decode_items, message, parts)
    items = [item for item in decoded if isinstance(item, RewardItem)]
    outcomes = await worker.score(message.rewards, items, deadline) if items else {}
    return _reply(message, decoded, outcomes, worker).model_dump_json()


async def _parse(request: Request, limits: Limits) -> tuple[ScoreRequest, dict[str, tuple[bytes, str]] | None]:
    """Read a request -> its message, and its binary parts where it is multipart.

    Raises:
        TooLarge, ValueError, HTTPException: over the limits, not of the protocol, a broken form.
    """
    if int(request.headers.get("content-length", "0")) > limits.body:
        raise TooLarge(f"the body is over {limits.body} bytes")
    request = Request(request.scope, _counted(request.receive, limits.body))
    if request.headers.get("content-type", "").startswith("multipart/form-data"):
        manifest, parts = await _parse_form(request, limits)
    else:
        manifest, parts = await request.body(), None
    message = ScoreRequest.model_validate_json(manifest)
    if len(message.items) > limits.items:
        raise TooLarge(f"{len(message.items)} items, over the limit of {limits.items}")
    return message, parts


async def _parse_form(request: Request, limits: Limits) -> tuple[bytes, dict[str, tuple[bytes, str]]]:
    parts: dict[str, tuple[bytes, str]] = {}
    most = len(PICTURES) * limits.items + 1
    async with request.form(max_files=most, max_fields=most, max_part_size=limits.body) as form:
        for name, part in form.multi_items():
            if name in parts:
                raise ValueError(f"two parts are named {name!r}")
            if isinstance(part, UploadFile):
                parts[name] = (await part.read(), part.content_type or "")
            else:
                parts[name] = (part.encode(), "")
    if "manifest" not in parts:
        raise ValueError('a multipart request needs a part "manifest"')
    return parts.pop("manifest")[0], parts


def _counted(receive: Receive, limit: int) -> Receive:
    """`receive` that stops at `limit` bytes: a chunked body does not say how long it is."""
    seen = 0

    async def counted() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > limit:
            raise TooLarge(f"the body is over {limit} bytes")
        return message

    return counted


def _reply(
    message: ScoreRequest,
    decoded: list[RewardItem | str],
    outcomes: Mapping[str, list[Outcome]],
    worker: ScoringWorker,
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
    revisions = {
        name: WireScorer(revision=s.spec.revision) for name, s in worker.scorers.items() if name in message.rewards
    }
    return ScoreReply(items=items, scorers=revisions)


def _error(status: int, message: str, retry_after: int | None = None) -> JSONResponse:
    headers = {"Retry-After": str(retry_after)} if retry_after is not None else None
    return JSONResponse({"error": message}, status, headers=headers)


def run_app(app: FastAPI, listener: socket.socket) -> None:
    """Serve on a bound socket until SIGTERM or SIGINT; requests under way are finished first."""
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=30)
    uvicorn.Server(config).run(sockets=[listener])


def exit_with_parent(parent: int) -> None:
    """End this process when the one that started it is gone: a killed run leaves no server behind.

    Args:
        parent: its process id, from itself: it may be gone before this process looks.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(0)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()
