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

from retouch.imaging import paste_back
from retouch.rewards.client import RewardClient
from retouch.rewards.launch import LocalServer, resolve_urls, reward_token
from retouch.rewards.local import LocalRewards
from retouch.rewards.protocol import RewardBackend, RewardItem, malformed
from retouch.rewards.scorers import make_scorer
from retouch.types import Outcome, Scores

if TYPE_CHECKING:
    from retouch.config.schema import RewardClientConfig, RewardEntry

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
        return problems

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
        return RewardClient(urls, members, self.client.timeout_s, self.client.batch_size, reward_token())

    def _auto_url(self) -> str:
        if self._server is None:
            members = {name: entry for name, entry in self.entries.items() if entry.url == "auto"}
            options = {name: {"scorer": e.scorer, **scorer_options(e)} for name, e in members.items()}
            self._server = LocalServer(options, self.log_dir / "reward-server.log")
        return self._server.url()


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
