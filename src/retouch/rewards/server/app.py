"""The reward server: `POST /score` over the scorers of a worker. No torch, no pickle.

Requests are read, decoded and answered here; decoded items go to the batcher, off the event loop, and from there to the
worker, a process of its own. /livez always answers; /readyz is 200 only while every scorer is loaded; /metrics is for
Prometheus.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from retouch.rewards.messages import (
    PROTOCOL_VERSION,
    ScoreReply,
    ScoreRequest,
    WireError,
    WireOutcome,
    WireScore,
    WireScorer,
)
from retouch.rewards.protocol import PICTURES, RewardItem, ScorerSpec
from retouch.rewards.server.admission import (
    Admission,
    Authorize,
    Busy,
    Limits,
    LocalOnly,
    TooLarge,
    TooSlow,
    WrongType,
    error_reply,
)
from retouch.rewards.server.batcher import Batcher
from retouch.rewards.server.plain import PlainRequest, read_body
from retouch.rewards.server.telemetry import Telemetry
from retouch.rewards.server.worker import ProcessWorker
from retouch.rewards.wire import NoRoom, Room, Share, decode_items, parse_multipart, problem_of
from retouch.types import Failure, Outcome, Score

_SMALL = 64 * 1024  # bytes of a body whose images are decoded in well under a millisecond
_DECODERS = 4  # threads; large images take turns within them
_MARKS = 1000  # JSON values, and commas of text, per item of a request
_KEPT_REPLIES = 256
_KEPT_REPLY = 1024 * 1024  # bytes; larger replies are not kept


class Replies:
    """Computes every request once: a repeated request gets the reply of the first.

    Replies with a retryable failure are not kept.
    """

    def __init__(self) -> None:
        self.repeats = 0
        self._done: OrderedDict[bytes, str] = OrderedDict()
        self._under_way: dict[bytes, asyncio.Task[tuple[str, bool]]] = {}

    async def once(self, key: bytes, compute: Callable[[], Awaitable[tuple[str, bool]]]) -> str:
        """The reply to `key`; `compute` returns it and whether it is final."""
        if key in self._done:
            self.repeats += 1
            return self._done[key]
        task = self._under_way.get(key)
        if task is None:
            # a task of its own: the first client may disconnect and ask again
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


def app_of(
    worker: ProcessWorker, device: str, token: str | None = None, limits: Limits | None = None, *, local: bool = False
) -> FastAPI:
    """The ASGI app over a worker that is not started yet.

    Args:
        token: when given, every request but /livez needs `Authorization: Bearer <token>`.
        local: serve this machine alone, and no web page that a browser shows on it.
    """
    front = _Front(worker, device, limits or Limits())
    app = FastAPI(title="retouch rewards", lifespan=front.lifespan, docs_url=None, redoc_url=None)
    if token is not None:
        app.add_middleware(Authorize, token=token)  # pyright: ignore[reportArgumentType]
    if local:
        app.add_middleware(LocalOnly)
    for route in (front.livez, front.readyz, front.info, front.metrics):
        app.get(f"/{route.__name__}", response_model=None)(route)
    app.post("/score")(front.score)
    return app


class _Front:
    """The routes of one app and their state."""

    def __init__(self, worker: ProcessWorker, device: str, limits: Limits) -> None:
        self._worker = worker
        self._device = device
        self._limits = limits
        self._telemetry = Telemetry()
        self._admission = Admission(limits)
        self._replies = Replies()
        self._room = Room(limits.all_pixels)
        self._decoders = ThreadPoolExecutor(_DECODERS, "decode")  # their own: they may wait, batches may not
        self._batcher = Batcher(worker, limits.max_batch, limits.max_wait_ms / 1000, self._telemetry.batch)

    @asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        await self._worker.start()
        self._batcher.start()
        yield
        await self._batcher.stop()
        await self._worker.stop()
        self._decoders.shutdown(wait=False, cancel_futures=True)

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
            return error_reply(503, self._worker.problem or "the scorers are loading", retry_after=1)
        try:
            async with self._admission.admit(request) as body:
                content_type = request.headers.get("content-type", "")
                served = tuple(self._worker.specs)
                message, parts, key, plain = await _aside(len(body), _parse, body, content_type, self._limits, served)
                size = len(body)
                del body
                deadline = received + message.deadline_ms / 1000
                parsed = _ParsedRequest(message, parts, deadline, size, plain)
                reply = await self._replies.once(key, lambda: self._scored(parsed))
        except (Busy, NoRoom) as busy:
            return error_reply(429, str(busy), retry_after=1)
        except MemoryError:
            return error_reply(429, "no memory for this request", retry_after=1)
        except TooSlow as slow:
            return error_reply(408, str(slow), close=True)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        except WrongType as wrong:
            return error_reply(415, str(wrong))
        except TooLarge as large:
            return error_reply(413, f"{large}; send fewer items in a request (reward_client.batch_size)")
        except ValueError as broken:  # pydantic's ValidationError is one
            return error_reply(422, problem_of(broken)[:2000])
        return Response(reply, media_type="application/json")

    async def _scored(self, request: _ParsedRequest) -> tuple[str, bool]:
        """The JSON of the reply, and whether a repeated request would get the same."""
        share = Share(self._room, self._limits.pixels)
        try:
            return await self._scored_within(request, share)
        finally:
            share.give_back()

    async def _scored_within(self, request: _ParsedRequest, share: Share) -> tuple[str, bool]:
        message, parts = request.message, request.parts
        raw = parts is not None and all(kind.startswith("image/x-raw") for _, kind in parts.values())
        size = request.size if raw else _SMALL + 1  # a small file may hold many pixels
        executor = None if raw else self._decoders
        decoded = await _aside(size, decode_items, message, parts, share, executor=executor)
        items = [item for item in decoded if isinstance(item, RewardItem)]
        outcomes = await self._batcher.score(message.rewards, items, request.deadline)
        broken = [Failure("bad_item", one) for one in decoded if isinstance(one, str)]
        for name, column in outcomes.items():
            # unknown names share a label: a client could send any number of them
            self._telemetry.outcomes(name if name in self._worker.specs else "unknown", [*column, *broken])
        final = not any(isinstance(o, Failure) and o.retryable for column in outcomes.values() for o in column)
        reply = _reply(message, decoded, outcomes, self._worker.specs)
        plain = None if request.plain is None else request.plain.reply(reply, self._worker.specs)
        return (plain or reply).model_dump_json(), final


@dataclass(frozen=True)
class _ParsedRequest:
    """A parsed request; `parts` is None if its images are base64, `size` is the bytes of its body, `plain` is a body of
    one image, which gets a reply of its own layout."""

    message: ScoreRequest
    parts: Mapping[str, tuple[bytes, str]] | None
    deadline: float
    size: int
    plain: PlainRequest | None = None


async def _aside(size: int, work: Callable[..., Any], *arguments: Any, executor: Executor | None = None) -> Any:
    """The result of `work` in a thread of `executor` (None: of the loop), or here where a thread would cost more."""
    if size <= _SMALL:
        return work(*arguments)
    return await asyncio.get_running_loop().run_in_executor(executor, work, *arguments)


def _parse(
    body: bytes, content_type: str, limits: Limits, served: Collection[str]
) -> tuple[ScoreRequest, dict[str, tuple[bytes, str]] | None, bytes, PlainRequest | None]:
    """A body -> its message, its binary parts if it is multipart, a digest that identifies the request, and the plain
    body if it is one.

    Args:
        served: rewards of the server.

    Raises:
        TooLarge, WrongType, ValueError: over the limits, or not of the protocol.
    """
    if content_type.startswith("multipart/form-data"):
        parts = parse_multipart(body, content_type, len(PICTURES) * limits.items + 1)
        if "manifest" not in parts:
            raise ValueError('a multipart request needs a part "manifest"')
        manifest, _ = parts.pop("manifest")
        _require_little_text(len(manifest), limits)
    elif content_type.partition(";")[0].strip().lower() in ("", "application/json"):
        manifest, parts = body, None
    else:  # a web page may post other types to any address without being asked
        raise WrongType(f"content type {content_type[:80]!r}; send application/json or multipart/form-data")
    marks = sum(manifest.count(mark) for mark in (b",", b"[", b"{"))
    if marks > _MARKS * limits.items:  # before they become objects
        raise TooLarge(f"{marks} values, over the limit of {_MARKS * limits.items}")
    message, plain = (
        read_body(manifest, served) if parts is None else (ScoreRequest.model_validate_json(manifest), None)
    )
    if parts is None:
        _require_little_text(len(manifest) - _image_bytes(message), limits)
    if len(message.items) > limits.items:
        raise TooLarge(f"{len(message.items)} items, over the limit of {limits.items}")
    digest = hashlib.blake2b(message.model_dump_json(exclude={"deadline_ms"}).encode(), digest_size=16)
    for name, (content, kind) in (parts or {}).items():
        for field in (name.encode(), kind.encode(), content):
            digest.update(len(field).to_bytes(8, "big") + field)
    if plain is not None:  # the same request of the protocol has another reply
        digest.update(plain.model_dump_json(include={"weights"}).encode())
    return message, parts, digest.digest(), plain


def _require_little_text(size: int, limits: Limits) -> None:
    """Characters of any script take up to four times their bytes, in each of several copies."""
    if size > limits.text:
        raise TooLarge(f"{size} bytes of prompts and metadata, over the limit of {limits.text}")


def _image_bytes(message: ScoreRequest) -> int:
    return sum(len(getattr(item, field) or "") for item in message.items for field in PICTURES)


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
