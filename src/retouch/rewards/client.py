"""The client of reward servers: n items in, n outcomes out, in order, whatever the network does. No torch.

One event loop in one background thread serves callers from any thread. A request goes to the servers in turn; transport
errors, 408, 425, 429 and 5xx are tried again on the next server until the deadline; nothing else is. A reply must hold
every item exactly once and only finite floats, else its items are failures: a failure is never a number.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import random
import threading
import time
import uuid
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, cast
from urllib.parse import urlsplit

import httpx

from retouch.rewards.protocol import LOOPBACK, RewardItem, ScoreReply, base_url, malformed, usable_token
from retouch.rewards.wire import BrokenMessage, encode_request, parse_reply
from retouch.types import Failure, Outcome, Score

logger = logging.getLogger(__name__)

_RETRY_STATUS = {408, 425, 429, 500, 502, 503, 504}
_BACKOFF_S = 0.1
_BACKOFF_MAX_S = 5.0
_CONNECT_S = 5.0
_LEAST_S = 0.2  # less time than this is not worth dividing between servers

Columns = dict[str, list[Outcome]]
"""Reward name -> one outcome an item."""


@dataclass(frozen=True)
class _Refusal:
    """An attempt that brought no reply: what went wrong, and how long the server wants to be left alone."""

    failure: Failure
    retry_after_s: float = 0.0


@dataclass(frozen=True)
class _NotReady:
    """Why a server cannot score. `final`: waiting does not help."""

    problem: str
    final: bool = False


class RewardClient:
    """Scores on one or more servers that all hold the same rewards.

    Args:
        urls: base addresses; requests go to them in turn.
        rewards: names to ask for, as the servers know them.
        timeout_s: deadline of one request, retries included. With several servers an attempt gets half of what is left,
            so that one that accepts and never answers does not keep a request from the others.
        batch_size: items of one request.
        token: bearer token; never logged, and never in a message.

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
    ) -> None:
        if not urls:
            raise ValueError("a reward client needs at least one server address")
        self.urls = [base_url(url) for url in urls]
        self.rewards = list(rewards)
        self.timeout_s = timeout_s
        self.batch_size = batch_size
        self._token = None if token is None else usable_token(token)
        self._turn = itertools.count()
        self._closing = threading.Lock()
        self._closed = False
        self._start()

    def submit(self, items: Sequence[RewardItem]) -> Future[Columns]:
        """Start scoring -> future of name -> one outcome an item, in the order of `items`.

        The future is cancelled when the client is closed before it is done.
        """
        return self._call(self._score(list(items)))

    def score(self, items: Sequence[RewardItem]) -> Columns:
        """`submit` and wait."""
        return self.submit(items).result()

    def wait_ready(self, timeout_s: float, every_server: bool = True) -> list[str]:
        """Block until the servers are ready and have every reward -> what is still wrong when time is up, or what no
        waiting will mend.

        Args:
            every_server: wait for all of them; False is content with one.
        """
        return self._call(self._wait_ready(timeout_s, every_server)).result()

    def info(self) -> dict[str, dict[str, Any]]:
        """url -> reply of /info, of the servers that answer."""
        return self._call(self._info()).result()

    def close(self) -> None:
        """End the thread; requests under way are cancelled. Closing twice is no error."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            forked = os.getpid() != self._pid
        if not forked:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def __enter__(self) -> RewardClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the thread ---

    def _start(self) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._clients: dict[str, httpx.AsyncClient] = {}
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
            if os.getpid() != self._pid:  # the thread stayed behind in the parent
                self._start()
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _finish(self) -> None:
        under_way = asyncio.all_tasks() - {asyncio.current_task()}
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        for client in self._clients.values():
            await client.aclose()
        await self._loop.shutdown_default_executor()

    # --- inside the loop ---

    def _client(self, url: str) -> httpx.AsyncClient:
        if url not in self._clients:
            local = urlsplit(url).hostname in LOOPBACK
            headers = {"Authorization": f"Bearer {self._token}"} if self._token else None
            # a proxy from the environment must never see loopback traffic
            self._clients[url] = httpx.AsyncClient(trust_env=not local, headers=headers)
        return self._clients[url]

    async def _score(self, items: list[RewardItem]) -> Columns:
        problems = [malformed(item) for item in items]
        sound = [item for item, problem in zip(items, problems, strict=True) if problem is None]
        chunks = [sound[i : i + self.batch_size] for i in range(0, len(sound), self.batch_size)]
        replies = await asyncio.gather(*(self._score_chunk(chunk) for chunk in chunks))
        columns: Columns = {}
        for name in self.rewards:
            scored = (outcome for reply in replies for outcome in reply[name])
            columns[name] = [next(scored) if problem is None else problem for problem in problems]
        return columns

    async def _score_chunk(self, items: list[RewardItem]) -> Columns:
        """One request with its retries; ids on the wire are positions, so that callers may repeat theirs."""
        deadline = time.monotonic() + self.timeout_s
        numbered = [replace(item, id=i) for i, item in enumerate(items)]
        request_id, first = uuid.uuid4().hex, next(self._turn)
        problem = Failure("unavailable", "no server answered", retryable=True)
        for attempt in itertools.count():
            left = deadline - time.monotonic()
            if left <= 0:
                break
            url = self.urls[(first + attempt) % len(self.urls)]
            share = left if len(self.urls) == 1 else max(left / 2, min(left, _LEAST_S))
            reply = await self._attempt(url, numbered, request_id, time.monotonic() + share)
            if not isinstance(reply, _Refusal):
                return reply
            problem = reply.failure
            if not problem.retryable:
                break
            backoff = random.uniform(0, min(_BACKOFF_MAX_S, _BACKOFF_S * 2**attempt))  # full jitter
            pause = max(backoff, reply.retry_after_s)
            await asyncio.sleep(min(pause, max(0.0, deadline - time.monotonic())))
        return {name: [problem] * len(items) for name in self.rewards}

    async def _attempt(self, url: str, items: list[RewardItem], request_id: str, until: float) -> Columns | _Refusal:
        """Ask one server once -> outcomes, or why there are none."""
        started = time.monotonic()
        deadline_ms = max(1, int((until - started) * 1000))
        files = await asyncio.to_thread(encode_request, items, self.rewards, request_id, deadline_ms)
        left = max(0.0, until - time.monotonic())
        try:
            async with asyncio.timeout(left):
                response = await self._client(url).post(
                    f"{url}/score", files=files, timeout=httpx.Timeout(left, connect=min(left, _CONNECT_S))
                )
        except TimeoutError:
            problem = f"{url}: no answer within {until - started:.1f} s"
        except httpx.RequestError as error:
            problem = self._redacted(f"{url}: {type(error).__name__} {error}".strip())
        else:
            if response.status_code == 200:
                return self._outcomes(response.content, len(items), url)
            return self._refusal(url, response)
        return _Refusal(Failure("unavailable", problem, retryable=True))

    def _outcomes(self, body: bytes, count: int, url: str) -> Columns:
        """Check a reply against what was asked, and put it in order."""
        try:
            reply = parse_reply(body)
            ids = [outcome.id for outcome in reply.items]
            if len(ids) != count or set(ids) != set(range(count)):
                raise BrokenMessage(f"{count} items were asked for, {len(ids)} came back, or under other ids")
        except BrokenMessage as error:
            problem = self._redacted(f"{url}: {error}")
            logger.warning("%s", problem)
            return {name: [Failure("bad_reply", problem)] * count for name in self.rewards}
        return {name: _column(reply, name, url) for name in self.rewards}

    def _refusal(self, url: str, response: httpx.Response) -> _Refusal:
        status, retryable = response.status_code, response.status_code in _RETRY_STATUS
        code = "overloaded" if status == 429 else "unavailable" if retryable else "refused"
        message = self._redacted(f"{url}: HTTP {status}: {response.text[:200]}")
        return _Refusal(Failure(code, message, retryable), _seconds(response.headers.get("retry-after")))

    def _redacted(self, text: str) -> str:
        """A server may echo what it was sent."""
        return text.replace(self._token, "***") if self._token else text

    async def _wait_ready(self, timeout_s: float, every_server: bool) -> list[str]:
        deadline = time.monotonic() + timeout_s
        while True:
            probe_s = min(_CONNECT_S, max(_LEAST_S, deadline - time.monotonic()))
            found = await asyncio.gather(*(self._readiness(url, probe_s) for url in self.urls))
            missing = [server for server in found if server is not None]
            if not missing or (not every_server and len(missing) < len(self.urls)):
                return []
            finals = [server.final for server in missing]
            hopeless = any(finals) if every_server else all(finals)
            if hopeless or time.monotonic() >= deadline:
                return [server.problem for server in missing]
            await asyncio.sleep(min(0.2, max(0.0, deadline - time.monotonic())))

    async def _readiness(self, url: str, timeout_s: float) -> _NotReady | None:
        try:
            async with asyncio.timeout(timeout_s):
                ready = await self._client(url).get(f"{url}/readyz", timeout=timeout_s)
                if ready.status_code != 200:
                    final = ready.status_code in (401, 403) or _json_object(ready).get("status") == "failed"
                    text = self._redacted(ready.text[:200])
                    return _NotReady(f"{url}: not ready (HTTP {ready.status_code}): {text}", final)
                info = _json_object(await self._client(url).get(f"{url}/info", timeout=timeout_s))
        except TimeoutError:
            return _NotReady(f"{url}: no answer within {timeout_s:.1f} s")
        except httpx.HTTPError as error:
            return _NotReady(self._redacted(f"{url}: {type(error).__name__} {error}".strip()))
        known = list(info["scorers"]) if isinstance(info.get("scorers"), dict) else []
        lacking = [name for name in self.rewards if name not in known]
        if lacking:
            return _NotReady(f"{url}: has no reward {', '.join(lacking)}; it has: {', '.join(known)}", final=True)
        return None

    async def _info(self) -> dict[str, dict[str, Any]]:
        async def ask(url: str) -> dict[str, Any]:
            try:
                async with asyncio.timeout(_CONNECT_S):
                    return _json_object(await self._client(url).get(f"{url}/info", timeout=_CONNECT_S))
            except (httpx.HTTPError, TimeoutError) as error:
                logger.warning("%s", self._redacted(f"{url}: {type(error).__name__} {error}".strip()))
                return {}

        answers = await asyncio.gather(*(ask(url) for url in self.urls))
        return {url: answer for url, answer in zip(self.urls, answers, strict=True) if answer}


def _column(reply: ScoreReply, name: str, url: str) -> list[Outcome]:
    """Outcomes of one reward in the order of the ids, which are positions."""
    column: list[Outcome] = []
    for item in sorted(reply.items, key=lambda outcome: cast("int", outcome.id)):
        score, error = item.scores.get(name), item.errors.get(name)
        if score is not None and error is None:
            column.append(Score(score.value, score.detail))
        elif error is not None and score is None:
            column.append(Failure(error.code, error.message, error.retryable))
        else:
            column.append(Failure("bad_reply", f"{url}: neither or both of a score and an error for {name}"))
    return column


def _json_object(response: httpx.Response) -> dict[str, Any]:
    """The JSON object of a reply; empty for anything else."""
    try:
        value: object = response.json()
    except ValueError:
        return {}
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _seconds(header: str | None) -> float:
    """Retry-After in seconds; dates and nonsense count as 0."""
    try:
        return max(0.0, float(header)) if header else 0.0
    except ValueError:
        return 0.0
