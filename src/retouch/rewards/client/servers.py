"""The servers of a client: whether one is ready, which one a request goes to, circuit breakers, and the retry
budget.

Everything but `readiness` has neither sockets nor a clock of its own, and is used only from the client's event loop.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import httpx

from retouch.files import plain_json
from retouch.rewards.addresses import is_local, reward_token
from retouch.rewards.client.config import Balance
from retouch.rewards.foreign import BrokenReply, fetch, no_cookies, one_line, reading_environment

BREAKER_FAILURES = 5
"""Consecutive failures after which the breaker of a server opens."""

BREAKER_S = 0.5
BREAKER_MAX_S = 15.0
FORGET_S = 20.0  # a latency is forgotten if its server got no request for this long
HOLD_MAX_S = 60.0  # maximum of Retry-After: with more the server counts as gone
PATIENCE = 4.0  # multiple of its latency for which a full server is worth waiting for
PATIENCE_S = 1.0  # minimum of that wait
SMOOTHING = 0.3  # weight of the newest latency in the running mean


@dataclass(eq=False)
class Server:
    """State of one server.

    Attributes:
        under_way: open requests.
        latency_s: running mean; None before the first answer.
        asked_at: time of the last request.
        heard_at: time of the last answer or, if the server was idle, of the request after it: silent since then.
        failures: consecutive failures, attempts without an answer included.
        open_until: the breaker keeps requests away until then; after that one request may try (half open).
        held_until: from Retry-After.
    """

    url: str
    under_way: int = 0
    latency_s: float | None = None
    asked_at: float = 0.0
    heard_at: float = 0.0
    failures: int = 0
    open_until: float = 0.0
    held_until: float = 0.0

    def free_at(self, now: float, most: int) -> float | None:
        """When a request may be sent: now, a later time, or None if it must answer one first."""
        probing = not self.sound
        if self.under_way >= (1 if probing else most):
            return None
        return max(now, self.held_until, self.open_until if probing else now)

    def sent(self, now: float) -> None:
        """A request is sent."""
        if not self.under_way:
            self.heard_at = now
        self.under_way += 1
        self.asked_at = now

    def silence(self, now: float) -> float:
        """Seconds without an answer to an open request."""
        return now - self.heard_at if self.under_way else 0.0

    def answered(self, seconds: float, now: float) -> None:
        """A request was scored."""
        self.failures = 0
        self.heard_at = now
        self.latency_s = seconds if self.latency_s is None else (1 - SMOOTHING) * self.latency_s + SMOOTHING * seconds

    @property
    def sound(self) -> bool:
        """Whether the breaker is closed."""
        return self.failures < BREAKER_FAILURES

    def failed(self, now: float) -> None:
        """A request failed: connection refused or lost, timeout, an error status, or a reply that is no answer."""
        self.failures += 1
        if self.failures >= BREAKER_FAILURES:
            self.open_until = now + min(BREAKER_MAX_S, BREAKER_S * 2 ** min(self.failures - BREAKER_FAILURES, 10))

    def excused(self) -> None:
        """No other server answered the request either: it may be the reason itself."""
        self.failures = max(0, self.failures - 1)

    def held(self, now: float, seconds: float) -> None:
        """The server sent Retry-After."""
        self.held_until = max(self.held_until, now + min(seconds, HOLD_MAX_S))


class Balancer:
    """Chooses the server of a request.

    Args:
        balance: "least_outstanding" takes the one expected to answer first, by the requests under way times its
            latency; "round_robin" takes them in turn.
        most: requests under way at one server.
    """

    def __init__(self, urls: Sequence[str], balance: Balance, most: int) -> None:
        self.servers = [Server(url) for url in urls]
        self.balance = balance
        self.most = most
        self._turn = 0

    def choose(
        self,
        now: float,
        avoid: Collection[Server] = (),
        ends: float = math.inf,
        never: Collection[Server] = (),
    ) -> tuple[Server | None, float]:
        """The server to ask and 0, or None and the maximum seconds to wait for one (an answer may free one earlier).

        Args:
            avoid: servers that failed this request already; they are chosen only if no other is free now or will be.
            ends: deadline of the request.
            never: servers that would reply to this request as before.
        """
        left = [server for server in self._in_turn() if server not in never]
        free: list[tuple[Server, float]] = []
        # no request depends on a server whose breaker is open while another is sound: `due` has it tried beside one
        for server in [server for server in left if server.sound] or left:
            at = server.free_at(now, self.most)
            if at is not None:
                free.append((server, at))
        ready = [server for server, at in free if at <= now]
        fresh = [server for server in ready if server not in avoid]
        if not ready:
            return None, min((at - now for _, at in free), default=1.0)
        if not fresh and any(self._worth_waiting(s, now, ends) for s in left if s not in avoid):
            return None, 1.0
        if self.balance == "round_robin":
            chosen = (fresh or ready)[0]
        else:
            # the best server, full ones included: work waits for a fast server instead of going to a slower one
            candidates = [s for s in left if s.sound and s.held_until <= now]
            known = [s.latency_s for s in candidates if s.latency_s is not None]
            fastest = min(known, default=1.0)

            def finish(server: Server) -> float:
                stale = server.latency_s is None or now - server.asked_at > FORGET_S
                # a server that hangs is as slow as it has been silent
                latency = max(fastest if stale else server.latency_s or 0.0, server.silence(now))
                return (server.under_way + 1) * latency

            chosen = min(fresh or ready, key=finish)
            best = min((finish(s) for s in candidates if s not in avoid), default=0.0)
            if not avoid and chosen.sound and finish(chosen) > best:
                return None, 1.0
        self._turn = (self.servers.index(chosen) + 1) % len(self.servers)
        return chosen, 0.0

    def has_sound(self, without: Collection[Server]) -> bool:
        """Whether a server other than these is sound."""
        return any(server.sound for server in self.servers if server not in without)

    def due(self, now: float) -> Server | None:
        """A server whose breaker half-opens now: a request may try it."""
        return next((s for s in self._in_turn() if not s.sound and s.free_at(now, 1) == now), None)

    def _worth_waiting(self, server: Server, now: float, ends: float) -> bool:
        """Whether a server is full but answers, and will be free in time for this request."""
        latency = server.latency_s or 0.0
        return (
            server.sound
            and server.held_until <= now
            and now + latency < ends
            and server.silence(now) <= max(PATIENCE_S, PATIENCE * latency)
        )

    def _in_turn(self) -> list[Server]:
        return self.servers[self._turn :] + self.servers[: self._turn]


class RetryBudget:
    """Limit of retries: a fraction of the recent requests, and a small reserve for low request rates.

    Unused retries expire with their request: accumulated over a quiet day, they would allow a retry storm.

    Args:
        window_s: how long a request counts: its deadline, retries included.
        share: retries per request.
        reserve: retries available from the start.
        per_second: retries added per second: a single request can wait for its server.
    """

    def __init__(self, window_s: float, share: float = 0.15, reserve: float = 15.0, per_second: float = 0.5) -> None:
        self.share = share
        self.reserve = reserve
        self.per_second = per_second
        self._left = reserve
        self._at: float | None = None
        self._requests = _Recent(window_s)
        self._shared = _Recent(window_s)  # retries that requests paid for

    def request(self, now: float) -> None:
        """Count a first attempt."""
        self._requests.add(now)

    def take(self, now: float) -> bool:
        """Whether one more attempt is allowed; if so, it is counted."""
        if self._at is not None:
            self._left = min(self.reserve, self._left + (now - self._at) * self.per_second)
        self._at = now
        if self._shared.count(now) + 1 <= self.share * self._requests.count(now):
            self._shared.add(now)
            return True
        if self._left < 1:
            return False
        self._left -= 1
        return True


_PARTS = 100


class _Recent:
    """Number of events of the last `window_s` seconds. Those of a hundredth of it are counted together: the memory does
    not grow with their number."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._counts = deque[tuple[float, float, int]]()  # times of the first and the last, number
        self._all = 0

    def add(self, now: float) -> None:
        self._forget(now)
        self._all += 1
        if self._counts and now - self._counts[-1][0] < self._window_s / _PARTS:
            first, _, number = self._counts.pop()
            self._counts.append((first, now, number + 1))
        else:
            self._counts.append((now, now, 1))

    def count(self, now: float) -> int:
        self._forget(now)
        return self._all

    def _forget(self, now: float) -> None:
        while self._counts and self._counts[0][1] <= now - self._window_s:
            self._all -= self._counts.popleft()[2]


# --- whether a server is ready, asked once and without retries ---


class ServerStatus(NamedTuple):
    """A server's own word about its scorers. `problem`: why they failed to load, as one line."""

    status: Literal["ready", "loading", "failed", "unknown"]
    problem: str = ""


def status_of(body: bytes, token: str | None) -> ServerStatus:
    """The status in a reply of /readyz; "unknown" for one that is not of the protocol."""
    told = plain_json.table_of(body)
    if told.get("status") not in ("ready", "loading", "failed"):
        return ServerStatus("unknown")
    return ServerStatus(told["status"], one_line(str(told.get("problem") or ""), token))


def readiness(url: str, timeout_s: float, *, direct: bool = False) -> ServerStatus:
    """The status of /readyz.

    Args:
        timeout_s: for the whole reply.
        direct: never through a proxy of the environment, which gets the token; so for addresses on loopback.

    Raises:
        httpx.RequestError, TimeoutError: no reply in time.
        ConfigError: proxies or certificates of the environment that cannot be used.
    """
    token = reward_token()
    direct = direct or is_local(url)
    with reading_environment():
        made = httpx.Client(
            headers={"Authorization": f"Bearer {token}"} if token else {},
            cookies=no_cookies(),
            trust_env=not direct,
            verify=not (direct and url.startswith("http://")),  # no TLS there: certificates take .1 s to load
        )
    with made as client:
        try:
            return status_of(fetch(client, "GET", f"{url}/readyz", time.monotonic() + timeout_s).body, token)
        except BrokenReply:
            return ServerStatus("unknown")
