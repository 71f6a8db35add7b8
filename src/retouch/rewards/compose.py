"""The table of rewards of a run: every entry wherever it is scored, one `Scores` for a batch.

Entries with one set of addresses share a client, so that their pictures travel once; entries with `url: auto` share one
server on loopback; entries without a url share a thread of this process.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from retouch.imaging import paste_back
from retouch.rewards.cache import ScoreCache
from retouch.rewards.client import ClientOptions, RewardClient
from retouch.rewards.launch import LocalServer, resolve_urls, reward_token
from retouch.rewards.local import LocalRewards
from retouch.rewards.protocol import RewardBackend, RewardItem, malformed
from retouch.rewards.scorers import make_scorer
from retouch.types import Outcome, Score, Scores

if TYPE_CHECKING:
    from retouch.config.reward_sections import RewardClientConfig, RewardEntry

logger = logging.getLogger(__name__)

OWN_PROCESS = ("process",)
AUTO_SERVER = ("auto",)

_ENTRY_FIELDS = {"url", "weight", "paste_back", "scorer"}


@dataclass(frozen=True)
class PendingScores:
    """Scores being computed; `result` waits for all of them."""

    parts: Mapping[tuple[str, ...], Future[dict[str, list[Outcome]]]]
    names: Mapping[str, tuple[str, ...]]
    weights: Mapping[str, float]

    def done(self) -> bool:
        return all(future.done() for future in self.parts.values())

    def result(self) -> Scores:
        finished = {key: future.result() for key, future in self.parts.items()}
        return Scores({name: finished[key][name] for name, key in self.names.items()}, dict(self.weights))


class RewardTable:
    """Every reward of a run behind one `submit`."""

    def __init__(
        self, entries: Mapping[str, RewardEntry], client: RewardClientConfig, log_dir: Path | None = None
    ) -> None:
        self.entries = dict(entries)
        self.client = client
        self.log_dir = log_dir or Path()
        self.weights = {name: entry.weight for name, entry in entries.items()}
        self._places = {name: self._place(name, entry) for name, entry in entries.items()}
        self._server: LocalServer | None = None
        self._cache = ScoreCache(self.log_dir / "rewards.sqlite") if client.cache else None
        self.asked = self.failed = 0
        self._backends: dict[tuple[str, ...], RewardBackend] = {}

    def start(self) -> None:
        """Start or connect everything, without waiting for it to be ready."""
        for place in dict.fromkeys(self._places.values()):
            members = [name for name, p in self._places.items() if p == place]
            self._backends[place] = self._connect(place, members)

    def wait_ready(self, timeout_s: float, every_server: bool = True) -> list[str]:
        """Wait until every reward can be scored, on all of its servers or on one -> problems that remain.

        Where only rewards of weight 0 are scored, a problem is a warning; once the run is under way (one server is
        enough) it is not waited for.
        """
        deadline = time.monotonic() + timeout_s
        problems: list[str] = []
        for place, backend in self._backends.items():
            counts = any(self.weights[name] for name, p in self._places.items() if p == place)
            if not counts and not every_server:
                continue
            found = backend.wait_ready(max(0.0, deadline - time.monotonic()), every_server)
            if counts:
                problems += found
            elif found:
                logger.warning("rewards of weight 0, which are only logged, are not ready: %s", "; ".join(found))
        if every_server and not problems:
            self._compare_servers()
        return problems

    def count(self, asked: int, failed: int) -> float:
        """Note rewards that were asked for and those that failed -> share of all so far that failed."""
        self.asked += asked
        self.failed += failed
        return self.failed / max(1, self.asked)

    def statistics(self) -> dict[str, float]:
        """What the clients counted so far; latencies of the newest requests in seconds."""
        told: dict[str, float] = {}
        for place, backend in self._backends.items():
            if isinstance(backend, RewardClient):
                s, names = backend.statistics, "+".join(n for n, p in self._places.items() if p == place)
                found = {"retries": s.retries, "hedges": s.hedges, "cache_hits": s.cache_hits}
                found |= {"revision_changes": s.revision_changes}
                if s.latencies:
                    found |= {"latency_p50": s.latency(0.5), "latency_p95": s.latency(0.95)}
                told |= {f"reward_client/{names}/{name}": float(value) for name, value in found.items()}
                for name, codes in s.failures.items():
                    told |= {f"reward_failures/{name}/{code}": float(n) for code, n in codes.items()}
        return told

    def submit(self, items: Sequence[RewardItem]) -> PendingScores:
        """Start scoring a batch."""
        pasted = [paste(item) for item in items] if any(e.paste_back for e in self.entries.values()) else None
        futures: dict[tuple[str, ...], Future[dict[str, list[Outcome]]]] = {}
        for place, backend in self._backends.items():
            wants = {self.entries[name].paste_back for name, p in self._places.items() if p == place}
            assert len(wants) == 1  # `_place` keeps entries that want another picture apart
            futures[place] = backend.submit(pasted if wants == {True} and pasted else list(items))
        return PendingScores(futures, self._places, self.weights)

    def close(self) -> None:
        for backend in self._backends.values():
            backend.close()
        self._backends.clear()
        if self._server:
            self._server.close()
            self._server = None
        if self._cache:
            self._cache.close()

    def _compare_servers(self) -> None:
        """Golden pictures to every server by itself: servers that disagree hold different models. Said, not refused."""
        golden = golden_items()
        for backend in self._backends.values():
            if isinstance(backend, RewardClient) and len(backend.urls) > 1:
                for problem in disagreements(backend.probe(golden)):
                    logger.warning("%s", problem)

    def _place(self, name: str, entry: RewardEntry) -> tuple[str, ...]:
        picture = "pasted" if entry.paste_back else "raw"
        if entry.url is None:
            return (*OWN_PROCESS, picture)
        if entry.url == "auto":
            return (*AUTO_SERVER, picture)
        return (*resolve_urls(entry.url, name), picture)

    def _connect(self, place: tuple[str, ...], members: list[str]) -> RewardBackend:
        if place[:1] == OWN_PROCESS:
            return LocalRewards(
                {name: make_scorer(self.entries[name].scorer, scorer_options(self.entries[name])) for name in members}
            )
        urls = [self._auto_url()] if place[:1] == AUTO_SERVER else list(place[:-1])
        options = ClientOptions(
            self.client.timeout_s,
            self.client.batch_size,
            self.client.balance,
            self.client.requests_per_server,
            self.client.hedge_after_s,
        )
        return RewardClient(urls, members, token=reward_token(), options=options, cache=self._cache)

    def _auto_url(self) -> str:
        if self._server is None:
            members = {name: entry for name, entry in self.entries.items() if entry.url == "auto"}
            options = {name: {"scorer": e.scorer, **scorer_options(e)} for name, e in members.items()}
            self._server = LocalServer(options, self.log_dir / "reward-server.log")
        return self._server.url()


def golden_items() -> list[RewardItem]:
    """Two fixed pictures with everything that a scorer may need."""
    items: list[RewardItem] = []
    for number in range(2):
        noise = np.random.default_rng(number)
        image, source, reference = (noise.integers(0, 256, (64, 128, 3), np.uint8) for _ in range(3))
        mask = np.zeros((64, 128), np.uint8)
        mask[16:48, 16:112] = 255
        prompt = "The text is 'GOLD'."
        items.append(RewardItem(number, prompt, image, mask, source, reference, number, {"text": "GOLD"}))
    return items


def disagreements(found: Mapping[str, Mapping[str, Sequence[Outcome]]], tolerance: float = 1e-3) -> list[str]:
    """Servers whose scores of the same pictures differ by more than rounding and batching explain."""
    problems: list[str] = []
    (first, reference), *others = found.items()
    for url, columns in others:
        for name, column in columns.items():
            pairs = [
                (a.value, b.value)
                for a, b in zip(reference[name], column, strict=True)
                if isinstance(a, Score) and isinstance(b, Score)
            ]
            apart = max((abs(a - b) / max(1.0, abs(a), abs(b)) for a, b in pairs), default=0.0)
            if apart > tolerance:
                problems.append(
                    f"{name}: {first} and {url} differ by {apart:.3g} on the same pictures; do they hold the same "
                    "model?"
                )
    return problems


def scorer_options(entry: RewardEntry) -> dict[str, Any]:
    """The options of an entry that are its scorer's own."""
    return {name: value for name, value in entry.model_dump().items() if name not in _ENTRY_FIELDS}


def paste(item: RewardItem) -> RewardItem:
    """The item with only its mask repainted; as it is where it has no source or mask of its size."""
    if item.source is None or item.mask is None or malformed(item):
        return item
    if item.source.shape != item.image.shape or item.mask.shape != item.image.shape[:2]:
        return item  # for the scorers to say what is wrong with it
    return replace(item, image=paste_back(item.source, item.image, item.mask))
