"""One exchange with a reward server: a request out; outcomes, or why there are none, back. No torch.

A reply must hold every item exactly once and only finite floats, else its items are failures: a failure is never a
number. Nothing is tried again here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import httpx

from retouch.rewards.protocol import RewardItem, ScoreReply, is_local, retry_after_s
from retouch.rewards.wire import BrokenMessage, encode_request, parse_reply
from retouch.types import Failure, Outcome, Score

logger = logging.getLogger(__name__)

CONNECT_S = 5.0

_RETRY_STATUS = {408, 425, 429, 500, 502, 503, 504}
_CONNECTIONS = httpx.Limits(max_connections=None, max_keepalive_connections=64)  # the balancer counts requests

Columns = dict[str, list[Outcome]]
"""Reward name -> one outcome an item."""


@dataclass(frozen=True)
class Refusal:
    """An attempt that brought no reply: what went wrong, and how long the server wants to be left alone."""

    failure: Failure
    retry_after_s: float = 0.0
    reached: bool = True
    """Whether the server may have seen the request; a connection that was refused costs it nothing."""


@dataclass(frozen=True)
class NotReady:
    """Why a server cannot score. `final`: waiting does not help."""

    problem: str
    final: bool = False


class Exchange:
    """Connections to servers that hold the same rewards; used from one event loop.

    Args:
        rewards: names to ask for.
        token: bearer token; never logged, and never in a message.
        told: called with (url, reward, revision) of every good reply.
    """

    def __init__(self, rewards: Sequence[str], token: str | None, told: Callable[[str, str, str], None]) -> None:
        self._rewards = list(rewards)
        self._token = token
        self._told = told
        self._clients: dict[str, httpx.AsyncClient] = {}

    async def close(self) -> None:
        for client in self._clients.values():
            await client.aclose()

    async def ask(self, url: str, items: list[RewardItem], request_id: str, until: float) -> Columns | Refusal:
        """Score items whose ids are their positions, until a time on the clock of `time.monotonic`."""
        started = time.monotonic()
        deadline_ms = max(1, int((until - started) * 1000))
        files = await asyncio.to_thread(encode_request, items, self._rewards, request_id, deadline_ms)
        left = max(0.0, until - time.monotonic())
        reached = True
        try:
            async with asyncio.timeout(left):
                response = await self._client(url).post(
                    f"{url}/score", files=files, timeout=httpx.Timeout(left, connect=min(left, CONNECT_S))
                )
        except TimeoutError:
            problem = f"{url}: no answer within {until - started:.1f} s"
        except httpx.RequestError as error:
            reached = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            problem = self._redacted(f"{url}: {type(error).__name__} {error}".strip())
        else:
            if response.status_code == 200:
                return self._outcomes(response.content, len(items), url)
            return self._refusal(url, response)
        return Refusal(Failure("unavailable", problem, retryable=True), reached=reached)

    async def readiness(self, url: str, timeout_s: float) -> NotReady | None:
        """Why the server cannot score the rewards now; None where it can."""
        try:
            async with asyncio.timeout(timeout_s):
                ready = await self._client(url).get(f"{url}/readyz", timeout=timeout_s)
                if ready.status_code != 200:
                    final = ready.status_code in (401, 403) or _json_object(ready).get("status") == "failed"
                    text = self._redacted(ready.text[:200])
                    return NotReady(f"{url}: not ready (HTTP {ready.status_code}): {text}", final)
                info = _json_object(await self._client(url).get(f"{url}/info", timeout=timeout_s))
        except TimeoutError:
            return NotReady(f"{url}: no answer within {timeout_s:.1f} s")
        except httpx.HTTPError as error:
            return NotReady(self._redacted(f"{url}: {type(error).__name__} {error}".strip()))
        known = list(info["scorers"]) if isinstance(info.get("scorers"), dict) else []
        lacking = [name for name in self._rewards if name not in known]
        if lacking:
            return NotReady(f"{url}: has no reward {', '.join(lacking)}; it has: {', '.join(known)}", final=True)
        return None

    async def info(self, url: str) -> dict[str, Any]:
        """Its reply of /info; empty where it does not answer."""
        try:
            async with asyncio.timeout(CONNECT_S):
                return _json_object(await self._client(url).get(f"{url}/info", timeout=CONNECT_S))
        except (httpx.HTTPError, TimeoutError) as error:
            logger.warning("%s", self._redacted(f"{url}: {type(error).__name__} {error}".strip()))
            return {}

    def _client(self, url: str) -> httpx.AsyncClient:
        if url not in self._clients:
            local = is_local(url)
            headers = {"Authorization": f"Bearer {self._token}"} if self._token else None
            self._clients[url] = httpx.AsyncClient(
                trust_env=not local,
                headers=headers,
                limits=_CONNECTIONS,
                verify=not (local and url.startswith("http://")),  # no TLS there: certificates take .1 s to load
            )
        return self._clients[url]

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
            return {name: [Failure("bad_reply", problem)] * count for name in self._rewards}
        for name, scorer in reply.scorers.items():
            if name in self._rewards:
                self._told(url, name, scorer.revision)
        return {name: _column(reply, name, url) for name in self._rewards}

    def _refusal(self, url: str, response: httpx.Response) -> Refusal:
        status, retryable = response.status_code, response.status_code in _RETRY_STATUS
        code = "overloaded" if status == 429 else "unavailable" if retryable else "refused"
        message = self._redacted(f"{url}: HTTP {status}: {response.text[:200]}")
        return Refusal(Failure(code, message, retryable), retry_after_s(response.headers))

    def _redacted(self, text: str) -> str:
        """A server may echo what it was sent."""
        return text.replace(self._token, "***") if self._token else text


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
