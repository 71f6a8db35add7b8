"""One exchange with a reward server: one request, and its outcomes or the reason for none; no retries.

A reply must hold every item exactly once and no NaN or Inf, else its items are failures. A reply without any answer is
a `Refusal`, because another server may have one. A server is not trusted: replies are bounded and never decompressed,
and the token, control characters and excess length are removed from its messages.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import httpx

from retouch.files import plain_json
from retouch.rewards.addresses import TOKEN_VARIABLE, is_local, retry_after_s
from retouch.rewards.client.servers import status_of
from retouch.rewards.foreign import CONNECT_S, no_cookies, one_line, reading_environment
from retouch.rewards.messages import MOST_DEADLINE_MS, ScoreReply, WireScore
from retouch.rewards.protocol import RewardItem, plain_detail, within
from retouch.rewards.wire import BrokenMessage, encode_request, parse_reply
from retouch.types import Failure, Outcome, Score

logger = logging.getLogger(__name__)

MAX_REPLY = 32 * 1024 * 1024
"""Maximum bytes of a reply: 4,096 items with 8 KB of detail each."""

_MAX_STATUS = 1024 * 1024  # bytes of /readyz and /info

_RETRY_STATUS = {408, 425, 429, 500, 502, 503, 504}
_CONNECTIONS = httpx.Limits(max_connections=None, max_keepalive_connections=64)  # the balancer counts requests

Columns = dict[str, list[Outcome]]
"""Reward name -> one outcome per item."""


_OF_THE_ITEM = {"bad_item", "quarantined", "low_mass"}
"""Codes of failures that every server would return for the item; those of other codes are the server's."""


@dataclass(frozen=True)
class Refusal:
    """An attempt without an answer: the failure, and Retry-After in seconds."""

    failure: Failure
    retry_after_s: float = 0.0
    reached: bool = True
    """Whether the server may have received the request; a refused connection costs it nothing."""
    columns: Columns | None = None
    """Outcomes of a whole reply: of the protocol, but without a score of some reward, or not of the protocol."""

    @property
    def final(self) -> bool:
        """Whether the same server would reply the same again."""
        return self.columns is not None or not self.failure.retryable

    def outcomes(self, rewards: Sequence[str], count: int) -> Columns:
        """The outcomes of `count` items."""
        return self.columns or {name: [self.failure] * count for name in rewards}

    def answered(self) -> Columns:
        """The outcomes of the rewards with an answer; none of a server that broke the protocol for another one, because
        it is not to be believed."""
        failures = {name: no_answer(column) for name, column in (self.columns or {}).items()}
        if any(failure is not None and failure.code == "bad_reply" for failure in failures.values()):
            return {}
        return {name: column for name, column in (self.columns or {}).items() if failures[name] is None}


@dataclass(frozen=True)
class NotReady:
    """Why a server cannot score. `final`: waiting does not help."""

    problem: str
    final: bool = False


@dataclass(frozen=True)
class Declaration:
    """The range of a scorer that its server declares at /info, for values of this revision."""

    revision: str | None = None
    low: float = -math.inf
    high: float = math.inf

    def allows(self, value: float, revision: str) -> bool:
        """Whether a value may be of this scorer: one of another revision may have another range."""
        return revision != self.revision or within(value, self.low, self.high)


def _declaration(told: object) -> Declaration:
    """The declaration of a scorer at /info; nothing where it is not of the protocol."""
    fields = plain_json.table_of(told)
    try:
        low, high = (float(bound) for bound in fields["range"])
        return Declaration(str(fields["revision"]), low, high)
    except (KeyError, TypeError, ValueError, OverflowError):
        return Declaration()


class Exchange:
    """Connections to servers that hold the same rewards; used from one event loop.

    Args:
        rewards: names to request.
        token: bearer token; never logged, and never in a message.
        note: called with (url, reward, revision) of every valid reply.
    """

    def __init__(self, rewards: Sequence[str], token: str | None, note: Callable[[str, str, str], None]) -> None:
        self._rewards = list(rewards)
        self._token = token
        self._note = note
        self._clients: dict[str, httpx.AsyncClient] = {}
        self._declared: dict[str, dict[str, Declaration]] = {}
        self._asked_for: dict[str, dict[str, str]] = {}  # url -> the revisions for which /info was last read
        self._asking: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def close(self) -> None:
        for client in self._clients.values():
            await client.aclose()

    async def ask(
        self, url: str, items: list[RewardItem], rewards: Sequence[str], request_id: str, until: float
    ) -> Columns | Refusal:
        """Score items whose ids are their positions by some of the rewards; `until` is on the clock of
        `time.monotonic`."""
        started = time.monotonic()
        deadline_ms = min(MOST_DEADLINE_MS, max(1, int((until - started) * 1000)))
        files = await asyncio.to_thread(encode_request, items, rewards, request_id, deadline_ms)
        left = max(0.0, until - time.monotonic())
        reached = True
        try:
            async with asyncio.timeout(left):
                limits = httpx.Timeout(left, connect=min(left, CONNECT_S))
                status, headers, body = await self._fetch("POST", url, "/score", MAX_REPLY, limits, files=files)
        except TimeoutError:
            problem = f"{url}: no answer within {until - started:.1f} s"
        except httpx.RequestError as error:
            reached = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            problem = self._clean(f"{url}: {type(error).__name__} {error}".strip())
        except BrokenMessage as error:
            return self._bad_reply(url, error, rewards, len(items))
        else:
            if status == 200:
                return await self._outcomes(body, rewards, len(items), url, until)
            return self._refusal(url, status, headers, body)
        return Refusal(Failure("unavailable", problem, retryable=True), reached=reached)

    async def readiness(self, url: str, timeout_s: float) -> NotReady | None:
        """Why the server cannot score the rewards now; None if it can."""
        try:
            async with asyncio.timeout(timeout_s):
                limits = httpx.Timeout(timeout_s)
                status, _, body = await self._fetch("GET", url, "/readyz", _MAX_STATUS, limits)
                if status in (401, 403):
                    what = f"HTTP {status}: the server needs a token, and this process sent "
                    what += "another one" if self._token else "none"
                    return NotReady(f"{url}: {what}; set {TOKEN_VARIABLE} to that of the server", final=True)
                if status != 200:
                    final = status_of(body, self._token).status == "failed"
                    return NotReady(f"{url}: not ready (HTTP {status}): {self._clean(_text(body))}", final)
                info = plain_json.table_of((await self._fetch("GET", url, "/info", _MAX_STATUS, limits))[2])
        except TimeoutError:
            return NotReady(f"{url}: no answer within {timeout_s:.1f} s")
        except (httpx.HTTPError, BrokenMessage) as error:
            return NotReady(self._clean(f"{url}: {type(error).__name__} {error}".strip()))
        known = list(info["scorers"]) if isinstance(info.get("scorers"), dict) else []
        lacking = [name for name in self._rewards if name not in known]
        if lacking:
            has = self._clean(", ".join(known))
            return NotReady(f"{url}: has no reward {', '.join(lacking)}; it has: {has}", final=True)
        self._declare(url, info)
        return None

    def _declare(self, url: str, info: Mapping[str, Any]) -> None:
        scorers = plain_json.table_of(info.get("scorers"))
        self._declared[url] = {name: _declaration(scorers.get(name)) for name in self._rewards}

    async def _keep_declared(self, url: str, revisions: dict[str, str], until: float) -> None:
        """Read /info again, once for each change of revisions: another revision may have another range."""
        async with self._asking[url]:
            declared = self._declared.get(url, {})
            changed = any(declared.get(name, Declaration()).revision != one for name, one in revisions.items())
            if changed and self._asked_for.get(url) != revisions:
                info = await self.info(url, min(CONNECT_S, max(0.0, until - time.monotonic())))
                if info:
                    self._asked_for[url] = revisions
                    self._declare(url, info)

    async def info(self, url: str, timeout_s: float = CONNECT_S) -> dict[str, Any]:
        """The server's reply of /info; empty if it does not answer."""
        try:
            async with asyncio.timeout(timeout_s):
                return plain_json.table_of(
                    (await self._fetch("GET", url, "/info", _MAX_STATUS, httpx.Timeout(CONNECT_S)))[2]
                )
        except (httpx.HTTPError, TimeoutError, BrokenMessage) as error:
            logger.warning("%s", self._clean(f"{url}: {type(error).__name__} {error}".strip()))
            return {}

    async def _fetch(
        self, method: str, url: str, path: str, most: int, timeout: httpx.Timeout, **request: Any
    ) -> tuple[int, httpx.Headers, bytes]:
        """Status, headers and body of a reply of at most `most` bytes.

        Raises:
            BrokenMessage: it is longer, or compressed (a few bytes could become gigabytes).
            httpx.HTTPError: no whole reply.
        """
        async with self._client(url).stream(method, f"{url}{path}", timeout=timeout, **request) as response:
            coding = response.headers.get("content-encoding", "identity")
            if coding.strip().lower() != "identity":
                raise BrokenMessage(f"the reply is compressed ({coding[:20]}), which was not requested")
            body = bytearray()
            async for chunk in response.aiter_raw():
                body += chunk
                if len(body) > most:
                    raise BrokenMessage(f"the reply is over {most} bytes")
            return response.status_code, response.headers, bytes(body)

    def _client(self, url: str) -> httpx.AsyncClient:
        if url not in self._clients:
            local = is_local(url)
            headers = {"Accept-Encoding": "identity"}
            headers |= {"Authorization": f"Bearer {self._token}"} if self._token else {}
            with reading_environment():
                self._clients[url] = httpx.AsyncClient(
                    trust_env=not local,
                    headers=headers,
                    cookies=no_cookies(),
                    limits=_CONNECTIONS,
                    verify=not (local and url.startswith("http://")),  # no TLS there: certificates take .1 s to load
                )
        return self._clients[url]

    async def _outcomes(
        self, body: bytes, rewards: Sequence[str], count: int, url: str, until: float
    ) -> Columns | Refusal:
        """Check a reply against the request, and sort it."""
        try:
            reply = parse_reply(body)
            ids = [outcome.id for outcome in reply.items]
            if len(ids) != count or set(ids) != set(range(count)):
                raise BrokenMessage(f"{count} items were requested; the reply has {len(ids)}, or other ids")
            unnamed = {name for one in reply.items for name in one.scores} & set(rewards) - reply.scorers.keys()
            if unnamed:  # it would have no range, and the cache would keep it under the last revision
                raise BrokenMessage(f"the reply scores {min(unnamed)} and does not name its revision")
        except BrokenMessage as error:
            return self._bad_reply(url, error, rewards, count)
        revisions = {name: scorer.revision for name, scorer in reply.scorers.items() if name in self._rewards}
        for name, revision in revisions.items():
            self._note(url, name, revision)
        await self._keep_declared(url, revisions, until)
        columns = {name: self._column(reply, name, url) for name in rewards}
        failure = next((found for column in columns.values() if (found := no_answer(column)) is not None), None)
        return columns if failure is None else Refusal(failure, columns=columns)

    def _bad_reply(self, url: str, error: BrokenMessage, rewards: Sequence[str], count: int) -> Refusal:
        problem = self._clean(f"{url}: {error}")
        logger.warning("%s", problem)
        failure = Failure("bad_reply", problem)
        return Refusal(failure, columns={name: [failure] * count for name in rewards})

    def _refusal(self, url: str, status: int, headers: httpx.Headers, body: bytes) -> Refusal:
        retryable = status in _RETRY_STATUS
        code = "overloaded" if status == 429 else "unavailable" if retryable else "refused"
        message = self._clean(f"{url}: HTTP {status}: {_text(body)}")
        return Refusal(Failure(code, message, retryable), retry_after_s(headers))

    def _clean(self, text: str) -> str:
        """A server's text for a terminal and a log: one line, bounded, without the token, which it may echo."""
        return one_line(text, self._token)

    def _column(self, reply: ScoreReply, name: str, url: str) -> list[Outcome]:
        """Outcomes of one reward in the order of the ids, which are positions."""
        column: list[Outcome] = []
        declared = self._declared.get(url, {}).get(name, Declaration())
        revision = reply.scorers[name].revision if name in reply.scorers else ""
        for item in sorted(reply.items, key=lambda outcome: cast("int", outcome.id)):
            score, error = item.scores.get(name), item.errors.get(name)
            if score is not None and error is None:
                column.append(self._sound(score, declared, revision, f"{url}: {name}"))
            elif error is not None and score is None:
                column.append(Failure(self._clean(error.code), self._clean(error.message), error.retryable))
            else:
                column.append(Failure("bad_reply", f"{url}: neither or both of a score and an error for {name}"))
        return column

    def _sound(self, score: WireScore, declared: Declaration, revision: str, who: str) -> Outcome:
        """A score within what its server declares, with a detail for files and a terminal."""
        if not declared.allows(score.value, revision):
            bounds = f"{declared.low:g} to {declared.high:g}"
            return Failure("bad_reply", f"{who} is {score.value:g}, outside its range of {bounds}")
        try:
            return Score(score.value, plain_detail(score.detail, self._token))
        except ValueError as error:
            return Failure("bad_reply", f"{who} has {error}")


def no_answer(column: Sequence[Outcome]) -> Failure | None:
    """A failure of the server's, if no item has a score of a reward; items that are bad themselves do not count."""
    failures = [outcome for outcome in column if isinstance(outcome, Failure)]
    of_the_server = [failure for failure in failures if failure.code not in _OF_THE_ITEM]
    return of_the_server[0] if of_the_server and len(failures) == len(column) else None


def _text(body: bytes) -> str:
    """The start of a reply, for a message."""
    return body[:4096].decode("utf-8", "replace")
