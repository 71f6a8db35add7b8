"""The client of reward servers: n items in, n outcomes out, in order, also when requests fail.

One event loop in one background thread serves callers from any thread. `servers.py` chooses the server of a request;
transport errors, 408, 425, 429 and 5xx are retried, on another server if there is one, until the deadline and within
the retry budget. For a reply without an answer each of the other servers is asked once. `exchange.py` is one request to
one server, `revisions.py` the revisions that servers report.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import random
import sqlite3
import threading
import time
import uuid
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from retouch.rewards.addresses import base_url, usable_token
from retouch.rewards.client.cache import ScoreCache, cache_key
from retouch.rewards.client.config import RewardClientConfig
from retouch.rewards.client.exchange import Columns, Exchange, Refusal
from retouch.rewards.client.revisions import Revisions
from retouch.rewards.client.servers import Balancer, RetryBudget, Server
from retouch.rewards.foreign import CONNECT_S
from retouch.rewards.protocol import RewardItem, malformed
from retouch.types import Failure, Outcome, Score

logger = logging.getLogger(__name__)

_jitter = random.Random()
"""Not the global generator: its state is part of checkpoints, and must not depend on when a server answers."""

_BACKOFF_S = 0.1
_BACKOFF_MAX_S = 5.0
_LEAST_S = 0.2  # less remaining time than this is not divided between servers

_LATENCIES = 2048  # newest requests that the percentiles cover


@dataclass
class ClientStatistics:
    """Counts since the client was made, and the latencies of the newest requests in seconds."""

    requests: int = 0
    attempts: int = 0
    retries: int = 0
    cache_hits: int = 0
    scores: Counter[str] = field(default_factory=Counter[str])
    failures: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter[str]))
    latencies: deque[float] = field(default_factory=lambda: deque[float](maxlen=_LATENCIES))

    def latency(self, share: float) -> float:
        """The latency that this fraction of the newest requests did not exceed; NaN before the first."""
        return percentile(self.latencies, share) if self.latencies else math.nan


def percentile(values: Collection[float], share: float) -> float:
    """The value that this fraction of them does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


@dataclass(frozen=True)
class _Request:
    """Items to score by some rewards until `deadline`, on the clock of `time.monotonic`."""

    items: list[RewardItem]
    rewards: Sequence[str]
    id: str
    deadline: float


class RewardClient(AbstractContextManager["RewardClient", None]):
    """Scores on one or more servers that all serve the same rewards.

    Args:
        urls: base addresses.
        rewards: names at the servers.
        options: replace timeout_s and batch_size.
        token: bearer token; never logged, and never in a message.
        cache: keeps scores; None keeps none.

    Raises:
        ValueError: no address, or an address or token that cannot be used.
    """

    def __init__(
        self,
        urls: Sequence[str],
        rewards: Sequence[str],
        timeout_s: float = 60.0,
        batch_size: int = 16,
        token: str | None = None,
        *,
        options: RewardClientConfig | None = None,
        cache: ScoreCache | None = None,
    ) -> None:
        if not urls:
            raise ValueError("a reward client needs at least one server address")
        self.urls = [base_url(url) for url in urls]
        self.ready: list[str] = []
        """The servers that the last `wait_ready` found ready."""
        self.rewards = list(rewards)
        self.options = options or RewardClientConfig(timeout_s=timeout_s, batch_size=batch_size)
        self.statistics = ClientStatistics()
        self._token = None if token is None else usable_token(token)
        self._cache = cache
        self.revisions = Revisions(self.rewards, self._token)
        self._closing = threading.Lock()
        self._closed = False
        self._start()

    def submit(self, items: Sequence[RewardItem], rewards: Sequence[str] | None = None) -> Future[Columns]:
        """Start scoring by all rewards, or by those named -> future of name -> one outcome per item, in the order of
        `items`; closing the client cancels it."""
        return self._call(self._score(list(items), self.rewards if rewards is None else rewards))

    def score(self, items: Sequence[RewardItem]) -> Columns:
        """`submit` and wait."""
        return self.submit(items).result()

    def wait_ready(self, timeout_s: float, every_server: bool = True) -> list[str]:
        """Block until the servers are ready and have every reward -> problems that remain when time is up, or that
        waiting cannot solve.

        Args:
            every_server: wait for all of them; False waits for one.
        """
        return self._call(self._wait_ready(timeout_s, every_server)).result()

    def info(self) -> dict[str, dict[str, Any]]:
        """url -> reply of /info, for the servers that answer."""
        return self._call(self._info()).result()

    def probe(self, items: Sequence[RewardItem], urls: Sequence[str] | None = None) -> dict[str, Columns]:
        """Score the same items on every server, or on some -> url -> outcomes."""
        return self._call(self._probe(list(items), self.urls if urls is None else urls)).result()

    def submit_probe(self, items: Sequence[RewardItem]) -> Future[dict[str, Columns]]:
        """`probe` of every server without waiting for it."""
        return self._call(self._probe(list(items), self.urls))

    def close(self) -> None:
        """End the thread; open requests are cancelled. May be called twice."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            forked = os.getpid() != self._pid
        if not forked:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the thread ---

    def _start(self) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._exchange = Exchange(self.rewards, self._token, self.revisions.note)
        self._balancer = Balancer(self.urls, self.options.balance, self.options.requests_per_server)
        self._budget = RetryBudget(self.options.timeout_s)
        self._freed = asyncio.Event()
        self._beside = set[asyncio.Task[Columns | Refusal]]()
        # every answer wakes all requests that wait for a server: bound their number
        self._turns = asyncio.Semaphore(2 * self.options.requests_per_server * len(self.urls))
        self._progress = time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True, name="reward-client")
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.run_until_complete(self._finish())
        self._loop.close()

    def _call(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        with self._closing:
            if self._closed:
                coroutine.close()
                raise RuntimeError("the reward client is closed")
            if os.getpid() != self._pid:  # forked: the thread stayed in the parent
                self._start()
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _finish(self) -> None:
        under_way = asyncio.all_tasks() - {asyncio.current_task()}
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        await self._exchange.close()
        await self._loop.shutdown_default_executor()

    # --- inside the loop ---

    async def _score(self, items: list[RewardItem], rewards: Sequence[str]) -> Columns:
        problems = [malformed(item) for item in items]
        sound = [item for item, problem in zip(items, problems, strict=True) if problem is None]
        scored = await self._score_sound(sound, rewards)
        columns: Columns = {}
        for name in rewards:
            column = iter(scored[name])
            columns[name] = [next(column) if problem is None else problem for problem in problems]
            for outcome in columns[name]:
                if isinstance(outcome, Failure):
                    self.statistics.failures[name][outcome.code] += 1
                else:
                    self.statistics.scores[name] += 1
        return columns

    async def _score_sound(self, items: list[RewardItem], rewards: Sequence[str]) -> Columns:
        """Outcomes from the cache where they are there, the others from the servers."""
        revisions = await self._one_revision_each() if self._cache is not None and items else None
        if revisions is None or self._cache is None:
            return await self._score_chunks(items, rewards)
        keys = await asyncio.to_thread(
            lambda: [{name: cache_key(item, name, revisions[name]) for name in rewards} for item in items]
        )
        try:
            known = await asyncio.to_thread(self._cache.get, [key for row in keys for key in row.values()])
        except sqlite3.Error as error:
            logger.warning("the cache of scores cannot be read: %s", error)
            known = {}
        missing: dict[tuple[str, ...], list[int]] = {}  # a known score may have had a price: only the others are asked
        for i, row in enumerate(keys):
            if names := tuple(name for name, key in row.items() if key not in known):
                missing.setdefault(names, []).append(i)
        asked = time.monotonic()
        self.statistics.cache_hits += len(items) - sum(map(len, missing.values()))
        found: dict[bytes, Outcome] = dict(known)
        requests = (self._score_chunks([items[i] for i in rows], names) for names, rows in missing.items())
        for rows, fresh in zip(missing.values(), await asyncio.gather(*requests), strict=True):
            for name, column in fresh.items():
                found.update(zip((keys[i][name] for i in rows), column, strict=True))
        if not self.revisions.others_since(asked, revisions):
            try:
                await asyncio.to_thread(self._cache.put, {k: o for k, o in found.items() if k not in known})
            except sqlite3.Error as error:  # a full disk: the scores themselves are not lost
                logger.warning("scores are not kept: %s", error)
        return {name: [found[row[name]] for row in keys] for name in rewards}

    async def _one_revision_each(self) -> dict[str, str] | None:
        """Revision by reward, of the servers that are not gone; None if they differ."""
        if not self.revisions.known:
            self.revisions.learn(await self._info())
        return self.revisions.one_each({s.url for s in self._balancer.servers if not s.sound})

    async def _score_chunks(self, items: list[RewardItem], rewards: Sequence[str]) -> Columns:
        size = self.options.batch_size
        chunks = [items[i : i + size] for i in range(0, len(items), size)]
        asked = time.monotonic()

        async def in_turn(chunk: list[RewardItem]) -> Columns:
            async with self._turns:
                return await self._score_chunk(chunk, rewards, asked)

        replies = await asyncio.gather(*(in_turn(chunk) for chunk in chunks))
        return {name: [outcome for reply in replies for outcome in reply[name]] for name in rewards}

    async def _score_chunk(self, items: list[RewardItem], rewards: Sequence[str], asked: float) -> Columns:
        """One request with its retries; ids on the wire are positions: callers may repeat ids. Another server is asked
        for the rewards that have no answer yet alone: the others may have a price.

        Args:
            asked: when the caller started to wait.
        """
        deadline: float | None = None
        numbered = [replace(item, id=i) for i, item in enumerate(items)]
        request_id, failed = uuid.uuid4().hex, list[Server]()
        unanswered: dict[Server, Columns] = {}
        answered: Columns = {}
        wanted = rewards
        refusal = Refusal(Failure("unavailable", "no server answered", retryable=True))
        self.statistics.requests += 1
        for attempt in itertools.count():
            server = await self._server(failed, deadline, asked, unanswered)
            if server is None:
                break
            now = time.monotonic()
            if deadline is None:
                deadline = now + self.options.timeout_s
                self._budget.request(now)
            request = _Request(numbered, wanted, request_id, deadline)
            self._try_beside(server, request)
            reply = await self._begin(server, request)
            if not isinstance(reply, Refusal):
                self.statistics.latencies.append(time.monotonic() - asked)
                return answered | reply
            refusal = reply
            if reply.final:
                unanswered[server] = reply.outcomes(wanted, len(items))
                answered |= reply.answered()
            wanted = [name for name in rewards if name not in answered]
            if not wanted:  # two servers answered some each
                return answered
            if refusal.final:
                if not self._balancer.has_sound(unanswered) or not self._budget.take(time.monotonic()):
                    break
                self.statistics.retries += 1
                continue
            failed = [*failed, server] if len(failed) + 1 < len(self.urls) else [server]
            backoff = _jitter.uniform(0, min(_BACKOFF_MAX_S, _BACKOFF_S * 2**attempt))  # full jitter
            await asyncio.sleep(max(0.0, min(backoff, deadline - time.monotonic())))
            if refusal.reached and not await self._may_retry(deadline):
                break
            self.statistics.retries += 1
        if len(self.urls) > 1:
            for server in unanswered:
                server.excused()
        best = max(unanswered.values(), key=_scores_in, default=Columns())
        # scores of some rewards, which may have a price, are not requested again
        told = best if refusal.final or answered or _scores_in(best) else {}
        return refusal.outcomes(wanted, len(items)) | told | answered

    async def _server(
        self, failed: list[Server], deadline: float | None, asked: float, unanswered: Collection[Server]
    ) -> Server | None:
        """A server that can take a request now, already counted as open; None when time is up, or once no sound server
        is left.

        Args:
            deadline: of the request; None before its first attempt.
            unanswered: servers that had no answer to this request.
        """
        while True:
            now = time.monotonic()
            ends = deadline if deadline is not None else max(asked, self._progress) + self.options.timeout_s
            if now >= ends or (unanswered and not self._balancer.has_sound(unanswered)):
                return None
            server, wait = self._balancer.choose(now, failed, ends, unanswered)
            if server is not None:
                server.sent(now)
                return server
            self._freed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.001, min(wait, ends - now, 1.0))):
                    await self._freed.wait()

    async def _may_retry(self, deadline: float) -> bool:
        """Wait until the budget allows another attempt; False if time is up first."""
        while not self._budget.take(time.monotonic()):
            if time.monotonic() + 0.1 >= deadline:
                return False
            await asyncio.sleep(0.1)
        return True

    def _try_beside(self, server: Server, request: _Request) -> None:
        """Send the request of a sound server to one whose breaker half-opens, too. Only the state of the breaker
        depends on its reply: a server that hangs would hold the request up."""
        now = time.monotonic()
        other = self._balancer.due(now) if server.sound else None
        if other is not None and self._budget.take(now):
            other.sent(now)
            attempt = self._begin(other, request)
            self._beside.add(attempt)  # the loop itself keeps only weak references
            attempt.add_done_callback(self._beside.discard)

    def _begin(self, server: Server, request: _Request) -> asyncio.Task[Columns | Refusal]:
        """Start an attempt. It stops counting as open at the server even if it is cancelled before it begins."""

        def leave(_: object) -> None:
            server.under_way -= 1
            self._freed.set()

        attempt = asyncio.create_task(self._attempt(server, request))
        attempt.add_done_callback(leave)
        return attempt

    async def _attempt(self, server: Server, request: _Request) -> Columns | Refusal:
        """Ask one server once -> outcomes, or why there are none; updates its breaker and latency."""
        started = time.monotonic()
        left = max(0.0, request.deadline - started)
        # of several servers, one that never answers cannot use all of the time
        share = left if len(self.urls) == 1 else max(left / 2, min(left, _LEAST_S))
        self.statistics.attempts += 1
        reply = await self._exchange.ask(server.url, request.items, request.rewards, request.id, started + share)
        now = time.monotonic()
        alone = len(self.urls) == 1
        if isinstance(reply, Refusal) and reply.columns is not None and alone:
            reply = reply.columns  # nobody else would have an answer
        if not isinstance(reply, Refusal):
            server.answered(now - started, now)
            self._progress = now
        elif reply.columns is None and (reply.failure.code == "overloaded" or reply.retry_after_s):
            server.held(now, reply.retry_after_s)
        elif not (reply.final and alone):
            server.failed(now)
        return reply

    async def _wait_ready(self, timeout_s: float, every_server: bool) -> list[str]:
        deadline = time.monotonic() + timeout_s
        while True:
            probe_s = min(CONNECT_S, max(_LEAST_S, deadline - time.monotonic()))
            found = await asyncio.gather(*(self._exchange.readiness(url, probe_s) for url in self.urls))
            missing = [server for server in found if server is not None]
            self.ready = [url for url, problem in zip(self.urls, found, strict=True) if problem is None]
            for server, problem in zip(self._balancer.servers, found, strict=True):
                if problem is None:
                    server.failures = 0  # the server is back: close its breaker
            if not missing or (not every_server and len(missing) < len(self.urls)):
                return []
            finals = [server.final for server in missing]
            hopeless = any(finals) if every_server else all(finals)
            if hopeless or time.monotonic() >= deadline:
                return [server.problem for server in missing]
            await asyncio.sleep(min(0.2, max(0.0, deadline - time.monotonic())))

    async def _probe(self, items: list[RewardItem], urls: Sequence[str]) -> dict[str, Columns]:
        numbered = [replace(item, id=i) for i, item in enumerate(items)]

        async def ask(url: str) -> Columns:
            until = time.monotonic() + self.options.timeout_s
            reply = await self._exchange.ask(url, numbered, self.rewards, uuid.uuid4().hex, until)
            return reply.outcomes(self.rewards, len(items)) if isinstance(reply, Refusal) else reply

        return dict(zip(urls, await asyncio.gather(*(ask(url) for url in urls)), strict=True))

    async def _info(self) -> dict[str, dict[str, Any]]:
        answers = await asyncio.gather(*(self._exchange.info(url) for url in self.urls))
        return {url: answer for url, answer in zip(self.urls, answers, strict=True) if answer}


def _scores_in(columns: Columns) -> int:
    return sum(isinstance(outcome, Score) for column in columns.values() for outcome in column)
