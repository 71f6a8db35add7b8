"""The client of reward servers: n items in, n outcomes out, in order, whatever the network does. No torch.

One event loop in one background thread serves callers from any thread. A request goes to the servers in turn; transport
errors, 408, 425, 429 and 5xx are tried again on the next server until the deadline; nothing else is. A reply must hold
every item exactly once and only finite floats, else its items are failures: a failure is never a number.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import threading
import time
import uuid
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import httpx

from retouch.rewards.protocol import LOOPBACK, RewardItem
from retouch.rewards.wire import WireError, encode_request, parse_reply
from retouch.types import Failure, Outcome, Score

logger = logging.getLogger(__name__)

_RETRY_STATUS = {408, 425, 429, 500, 502, 503, 504}
_BACKOFF_S = 0.1
_BACKOFF_MAX_S = 5.0
_CONNECT_S = 5.0


class RewardClient:
    """Scores on one or more servers that all hold the same rewards.

    Args:
        urls: base addresses; requests go to them in turn.
        rewards: names to ask for, as the servers know them.
        timeout_s: deadline of one request, retries included.
        batch_size: items of one request.
        token: bearer token; never logged.
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
        self.urls = [url.rstrip("/") for url in urls]
        self.rewards = list(rewards)
        self.timeout_s = timeout_s
        self.batch_size = batch_size
        self._token = token
        self._turn = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._clients: dict[str, httpx.AsyncClient] = {}
        self._thread = threading.Thread(target=self._run, daemon=True, name="reward-client")
        self._thread.start()

    def submit(self, items: Sequence[RewardItem]) -> Future[dict[str, list[Outcome]]]:
        """Start scoring -> future of name -> one outcome an item, in the order of `items`."""
        return self._call(self._score(list(items)))

    def score(self, items: Sequence[RewardItem]) -> dict[str, list[Outcome]]:
        """`submit` and wait."""
        return self.submit(items).result()

    def wait_ready(self, timeout_s: float) -> list[str]:
        """Block until every server is ready and has every reward -> what is still wrong when time is up."""
        return self._call(self._wait_ready(timeout_s)).result()

    def info(self) -> dict[str, dict[str, Any]]:
        """url -> reply of /info, of the servers that answer."""
        return self._call(self._info()).result()

    def close(self) -> None:
        if self._loop.is_running():
            self._call(self._close_clients()).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def __enter__(self) -> RewardClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- inside the loop ---

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def _call(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _client(self, url: str) -> httpx.AsyncClient:
        if url not in self._clients:
            local = urlsplit(url).hostname in LOOPBACK
            headers = {"Authorization": f"Bearer {self._token}"} if self._token else None
            # a proxy from the environment must never see loopback traffic
            self._clients[url] = httpx.AsyncClient(trust_env=not local, headers=headers)
        return self._clients[url]

    async def _score(self, items: list[RewardItem]) -> dict[str, list[Outcome]]:
        chunks = [items[i : i + self.batch_size] for i in range(0, len(items), self.batch_size)]
        replies = await asyncio.gather(*(self._score_chunk(chunk) for chunk in chunks))
        return {name: [outcome for reply in replies for outcome in reply[name]] for name in self.rewards}

    async def _score_chunk(self, items: list[RewardItem]) -> dict[str, list[Outcome]]:
        """One request with its retries; ids on the wire are positions, so that callers may repeat theirs."""
        deadline = time.monotonic() + self.timeout_s
        numbered = [_renumbered(item, i) for i, item in enumerate(items)]
        request_id = uuid.uuid4().hex
        problem = Failure("unavailable", "no server answered", retryable=True)
        for attempt in itertools.count():
            left = deadline - time.monotonic()
            if left <= 0:
                break
            url = self.urls[next(self._turn) % len(self.urls)]
            files = await asyncio.to_thread(
                encode_request, numbered, self.rewards, request_id, max(1, int(left * 1000))
            )
            try:
                async with asyncio.timeout(left):
                    response = await self._client(url).post(
                        f"{url}/score", files=files, timeout=httpx.Timeout(left, connect=min(left, _CONNECT_S))
                    )
            except (httpx.TransportError, TimeoutError) as error:
                problem = Failure("unavailable", f"{url}: {type(error).__name__} {error}".strip(), retryable=True)
                retry_after = 0.0
            else:
                if response.status_code == 200:
                    return self._outcomes(response.content, len(items), url)
                problem = _refusal(url, response)
                if response.status_code not in _RETRY_STATUS:
                    break
                retry_after = _seconds(response.headers.get("retry-after"))
            backoff = random.uniform(0, min(_BACKOFF_MAX_S, _BACKOFF_S * 2**attempt))  # full jitter
            await asyncio.sleep(min(max(backoff, retry_after), max(0.0, deadline - time.monotonic())))
        return {name: [problem] * len(items) for name in self.rewards}

    def _outcomes(self, body: bytes, count: int, url: str) -> dict[str, list[Outcome]]:
        """Check a reply against what was asked, and put it in order."""
        try:
            reply = parse_reply(body)
            by_id = {outcome.id: outcome for outcome in reply.items}
            if len(reply.items) != count or set(by_id) != set(range(count)):
                raise WireError(f"{count} items were asked for, {len(reply.items)} came back, or under other ids")
        except WireError as error:
            logger.warning("%s: %s", url, error)
            broken = Failure("bad_reply", f"{url}: {error}")
            return {name: [broken] * count for name in self.rewards}
        columns: dict[str, list[Outcome]] = {name: [] for name in self.rewards}
        for i in range(count):
            item = by_id[i]
            for name in self.rewards:
                score, error = item.scores.get(name), item.errors.get(name)
                if score is not None and error is None:
                    columns[name].append(Score(score.value, score.detail))
                elif error is not None and score is None:
                    columns[name].append(Failure(error.code, error.message, error.retryable))
                else:
                    columns[name].append(
                        Failure("bad_reply", f"{url}: neither or both of a score and an error for {name}")
                    )
        return columns

    async def _wait_ready(self, timeout_s: float) -> list[str]:
        deadline = time.monotonic() + timeout_s
        while True:
            problems = [p for p in await asyncio.gather(*(self._readiness(url) for url in self.urls)) if p]
            if not problems or time.monotonic() >= deadline:
                return problems
            await asyncio.sleep(min(0.2, max(0.0, deadline - time.monotonic())))

    async def _readiness(self, url: str) -> str | None:
        try:
            ready = await self._client(url).get(f"{url}/readyz", timeout=_CONNECT_S)
            if ready.status_code != 200:
                return f"{url}: not ready (HTTP {ready.status_code}): {ready.text[:200]}"
            info = (await self._client(url).get(f"{url}/info", timeout=_CONNECT_S)).json()
        except (httpx.HTTPError, ValueError) as error:
            return f"{url}: {type(error).__name__} {error}".strip()
        missing = [name for name in self.rewards if name not in info.get("scorers", {})]
        return f"{url}: has no reward {', '.join(missing)}" if missing else None

    async def _info(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for url in self.urls:
            try:
                found[url] = (await self._client(url).get(f"{url}/info", timeout=_CONNECT_S)).json()
            except (httpx.HTTPError, ValueError) as error:
                logger.warning("%s: %s", url, error)
        return found

    async def _close_clients(self) -> None:
        for client in self._clients.values():
            await client.aclose()


def _renumbered(item: RewardItem, position: int) -> RewardItem:
    return replace(item, id=position)


def _refusal(url: str, response: httpx.Response) -> Failure:
    text = response.text[:200]
    retryable = response.status_code in _RETRY_STATUS
    code = "overloaded" if response.status_code == 429 else "unavailable" if retryable else "bad_reply"
    return Failure(code, f"{url}: HTTP {response.status_code}: {text}", retryable)


def _seconds(header: str | None) -> float:
    """Retry-After in seconds; dates and nonsense count as 0."""
    try:
        return max(0.0, float(header)) if header else 0.0
    except ValueError:
        return 0.0
