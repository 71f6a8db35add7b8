"""Which server is asked, and whether it may be asked again: no sockets, no clock of its own.

A server has requests under way, a latency, a breaker, and perhaps a time before which it wants to be left alone. All of
it is used from the client's event loop alone.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

Balance = Literal["least_outstanding", "round_robin"]

BREAKER_FAILURES = 5
"""In a row, after which a server is left alone."""

BREAKER_S = 0.5
BREAKER_MAX_S = 15.0
FORGET_S = 20.0  # a latency is forgotten when its server was not asked for so long
HOLD_MAX_S = 60.0  # of Retry-After: more would be a server that is gone
PATIENCE = 4.0  # times its latency, for which a full server is worth waiting for
PATIENCE_S = 1.0  # that long in any case
SMOOTHING = 0.3  # share of the newest latency in the running one


@dataclass(eq=False)
class Server:
    """What is known of one server.

    Attributes:
        under_way: requests sent and not answered.
        latency_s: running mean; None before the first answer.
        asked_at: when it was last sent a request; what it was long ago says nothing.
        heard_at: when it last answered or, if it was idle before that, was asked: since then it is silent.
        failures: in a row.
        open_until: the breaker keeps requests away until then; after that one may try (half open).
        held_until: as Retry-After asked.
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
        """When it may be sent a request: now, a later time, or None where it must answer one first."""
        probing = self.failures >= BREAKER_FAILURES
        if self.under_way >= (1 if probing else most):
            return None
        return max(now, self.held_until, self.open_until if probing else now)

    def sent(self, now: float) -> None:
        """It is asked."""
        if not self.under_way:
            self.heard_at = now
        self.under_way += 1
        self.asked_at = now

    def silence(self, now: float) -> float:
        """Seconds for which it has said nothing although it was asked."""
        return now - self.heard_at if self.under_way else 0.0

    def answered(self, seconds: float, now: float) -> None:
        """It scored a request."""
        self.failures = 0
        self.heard_at = now
        self.latency_s = seconds if self.latency_s is None else (1 - SMOOTHING) * self.latency_s + SMOOTHING * seconds

    def overtaken(self, seconds: float) -> None:
        """Nobody waits for its answer any more: it would have taken longer."""
        self.latency_s = max(self.latency_s or 0.0, seconds)

    def failed(self, now: float) -> None:
        """It did not answer as it should: refused, hung up, timed out, 5xx."""
        self.failures += 1
        if self.failures >= BREAKER_FAILURES:
            self.open_until = now + min(BREAKER_MAX_S, BREAKER_S * 2 ** min(self.failures - BREAKER_FAILURES, 10))

    def held(self, now: float, seconds: float) -> None:
        """It asked to be left alone for so long."""
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

    def choose(self, now: float, avoid: Collection[Server] = (), ends: float = math.inf) -> tuple[Server | None, float]:
        """The server to ask and 0, or None and how long to wait for one (at most; an answer may free one earlier).

        Args:
            avoid: servers that failed this request already; they are asked only where no other can be, now or once
                it has answered what it was sent.
            ends: when the request must have its answer.
        """
        free: list[tuple[Server, float]] = []
        for server in self._in_turn():
            at = server.free_at(now, self.most)
            if at is not None:
                free.append((server, at))
        ready = [server for server, at in free if at <= now]
        fresh = [server for server in ready if server not in avoid]
        if not ready:
            return None, min((at - now for _, at in free), default=1.0)
        if not fresh and any(self._worth_waiting(s, now, ends) for s in self.servers if s not in avoid):
            return None, 1.0
        if self.balance == "round_robin":
            chosen = (fresh or ready)[0]
        else:
            # the best of all, were none full: work waits for a fast server rather than going to one that is slower
            candidates = [s for s in self.servers if s.failures < BREAKER_FAILURES and s.held_until <= now]
            known = [s.latency_s for s in candidates if s.latency_s is not None]
            fastest = min(known, default=1.0)

            def finish(server: Server) -> float:
                stale = server.latency_s is None or now - server.asked_at > FORGET_S
                # one that hangs is as slow as it has been silent, whatever it was before
                latency = max(fastest if stale else server.latency_s or 0.0, server.silence(now))
                return (server.under_way + 1) * latency

            chosen = min(fresh or ready, key=finish)
            best = min((finish(s) for s in candidates if s not in avoid), default=0.0)
            if not avoid and chosen.failures < BREAKER_FAILURES and finish(chosen) > best:
                return None, 1.0
        self._turn = (self.servers.index(chosen) + 1) % len(self.servers)
        return chosen, 0.0

    def _worth_waiting(self, server: Server, now: float, ends: float) -> bool:
        """Whether a server is merely full: it answers, and in time will take a request when it has answered another."""
        sound = server.failures < BREAKER_FAILURES and server.held_until <= now
        latency = server.latency_s or 0.0
        return sound and now + latency < ends and server.silence(now) <= max(PATIENCE_S, PATIENCE * latency)

    def _in_turn(self) -> list[Server]:
        return self.servers[self._turn :] + self.servers[: self._turn]


class RetryBudget:
    """Attempts beyond the first: a share of the requests of late, and a few on top for small numbers of them.

    What a request did not need is gone with it: saved up over a quiet day, it would be a storm.

    Args:
        window_s: how long a request counts: what it has to be done in, retries included.
        share: of retries to requests.
        reserve: retries that are there from the start.
        per_second: retries that time adds, so that a lone request may wait for its server.
    """

    def __init__(self, window_s: float, share: float = 0.15, reserve: float = 15.0, per_second: float = 0.5) -> None:
        self.window_s = window_s
        self.share = share
        self.reserve = reserve
        self.per_second = per_second
        self._left = reserve
        self._at: float | None = None
        self._requests = deque[float]()
        self._shared = deque[float]()  # retries that requests paid for

    def request(self, now: float) -> None:
        """A first attempt."""
        self._forget(now)
        self._requests.append(now)

    def take(self, now: float) -> bool:
        """Whether one more attempt is allowed; if so, it is paid for."""
        self._forget(now)
        if self._at is not None:
            self._left = min(self.reserve, self._left + (now - self._at) * self.per_second)
        self._at = now
        if len(self._shared) + 1 <= self.share * len(self._requests):
            self._shared.append(now)
            return True
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def _forget(self, now: float) -> None:
        for times in (self._requests, self._shared):
            while times and times[0] <= now - self.window_s:
                times.popleft()
