"""The table of rewards of a run: local and remote entries, in one `Scores` per batch.

Entries with the same addresses and the same view of the images share a client, and images are sent once; entries
with `url: auto` and the same devices share one server on loopback with the other processes of the machine; entries
without a url share one thread of this process per device. Rewards that do not count (weight 0, gold) are scored
separately and delay nothing. Gates and win rates are computed here, since a server may split a group.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retouch.errors import ConfigError, InputError, RewardOutage, shown
from retouch.process.process_wide import loading
from retouch.rewards.addresses import reward_token
from retouch.rewards.base import RewardEntry, problem_of, trained_on
from retouch.rewards.client.client import RewardClient
from retouch.rewards.client.endpoints import resolve_urls
from retouch.rewards.devices import Devices, devices_of
from retouch.rewards.golden import disagreements, golden_items
from retouch.rewards.protocol import CheckedScorer, RewardBackend, RewardItem, Scorer, ScorerSpec
from retouch.rewards.scorers.judge_budget import Budget, share_budgets, spending_of
from retouch.rewards.sharing import Gather, MachineShare
from retouch.rewards.views import View, viewed
from retouch.types import Failure, Gate, Outcome, Score

if TYPE_CHECKING:
    from retouch.rewards.client.config import RewardClientConfig

logger = logging.getLogger(__name__)

OWN_PROCESS = ("process",)
AUTO_SERVER = ("auto",)

_ASK_S = 1.0

_PATIENCE_S = 60.0
"""Seconds between two lines of the log about scorers that are still loading."""

NOT_FINITE = Failure("bad_item", "the sample contains NaN or Inf")


@dataclass(frozen=True)
class Place:
    """Where entries are scored together, on one view of the images.

    Attributes:
        where: addresses, or OWN_PROCESS or AUTO_SERVER.
        kind: "counts", "logged" (weight 0) or "gold".
        devices: of this process or of the server of `url: auto`; () for other servers.
    """

    where: tuple[str, ...]
    view: View
    kind: str
    devices: Devices = ()


@dataclass(frozen=True)
class Scores:
    """The rewards of a batch of N images by name, and their weights in `combined`. Those that `RewardTable.submit`
    returns are pending: `result` waits for their outcomes.

    Attributes:
        outcomes: name -> N outcomes; empty while they are pending.
        weights: name -> weight; order is that of the run file.
        items: what was scored; stays, to be submitted again after an outage.
        broken: indices of images with NaN or Inf, all of whose rewards have failed. No scorer receives them: one that
            compares a group would count them as opponents.
        parts: place -> the outcomes that are computed there, by name; empty if nothing is pending.
        places: name -> the place where a pending reward is computed.
        gates: name -> the gate that `result` applies; empty afterwards.
    """

    outcomes: Mapping[str, Sequence[Outcome]]
    weights: Mapping[str, float]
    items: Sequence[RewardItem] = field(default=(), repr=False)
    broken: Collection[int] = ()
    parts: Mapping[Place, Future[dict[str, list[Outcome]]]] = field(default_factory=dict[Any, Any])
    places: Mapping[str, Place] = field(default_factory=dict[str, Any])
    gates: Mapping[str, Gate] = field(default_factory=dict[str, Any])

    def __len__(self) -> int:
        return len(next(iter(self.outcomes.values()), self.items))

    @property
    def weighted_futures(self) -> list[Future[dict[str, list[Outcome]]]]:
        """Pending outcomes of rewards that train; the others delay nothing."""
        return [future for place, future in self.parts.items() if place.kind == "counts"]

    def wait(self) -> None:
        """Wait for the rewards that train."""
        for future in self.weighted_futures:
            future.result()

    def result(self, until: float | None = None, *, gated: bool = True) -> Scores:
        """Wait for all rewards and apply the gates.

        Args:
            until: a moment of `time.monotonic`: rewards that are only logged and are not in by then are failures. None
                waits for them too.
            gated: False leaves the gates to a later call, before which outcomes may be replaced.
        """
        columns = dict(self.outcomes)
        if self.parts:
            self.wait()
            done = {
                place: future.result() if place.kind == "counts" else self._logged(place, future, until)
                for place, future in self.parts.items()
            }
            columns = {name: list(done[place][name]) for name, place in self.places.items()}
            for column in columns.values():
                for row in sorted(self.broken):
                    column.insert(row, NOT_FINITE)
        if not gated:
            return replace(self, outcomes=columns, parts={})
        applied = {
            name: [gate.apply(*pair) for pair in zip(columns[name], columns[gate.reward], strict=True)]
            for name, gate in self.gates.items()
        }  # the value of a gate itself is not gated
        return replace(self, outcomes={**columns, **applied}, parts={}, gates={})

    def _logged(
        self, place: Place, future: Future[dict[str, list[Outcome]]], until: float | None
    ) -> dict[str, list[Outcome]]:
        try:
            return future.result(None if until is None else max(0.0, until - time.monotonic()))
        except TimeoutError:
            if future.done():  # just in time, or the scorer itself raised TimeoutError
                return future.result()
            future.cancel()
            late = Failure("deadline", "not in reward_client.logged_wait_s after the rewards that count", True)
            asked = len(self.items) - len(self.broken)
            return {name: [late] * asked for name, other in self.places.items() if other == place}

    def values(self, name: str) -> list[float | None]:
        """One reward; None where it failed."""
        return [o.value if isinstance(o, Score) else None for o in self.outcomes[name]]

    def combined(self) -> list[float | None]:
        """sum of weight * value over the rewards; None where any of them failed. One of weight 0 is only logged."""
        columns = [(self.weights[name], self.values(name)) for name in self.outcomes if self.weights[name]]
        totals: list[float | None] = []
        for i in range(len(self)):
            parts = [weight * value for weight, column in columns if (value := column[i]) is not None]
            totals.append(sum(parts) if len(parts) == len(columns) else None)
        return totals

    def failures(self) -> list[tuple[str, Failure]]:
        """Every failure with the name of its reward."""
        return [(name, o) for name, column in self.outcomes.items() for o in column if isinstance(o, Failure)]


class RewardTable:
    """Every reward of a run behind one `submit`."""

    def __init__(
        self,
        entries: Mapping[str, RewardEntry],
        client: RewardClientConfig,
        log_dir: Path | None = None,
        device: str = "cpu",
        spending: Path | None = None,
    ) -> None:
        """Args:
            log_dir: folder of the cache of scores and of the logs of servers; None: no cache, whatever `client` has,
                and logs in a temporary folder.
            device: the device that this process trains on, as torch names it.
            spending: folder of what judges spend; None: that of `log_dir`.

        Raises:
            ConfigError: an unreadable endpoints file, or a device that this machine does not have.
        """
        self.entries = dict(entries)
        self.device = device
        self.client = client
        self._spending = spending or spending_of(log_dir)
        self._judge_budget: Budget | None = None
        self.weights = {n: 0.0 if entry.role == "gold" else entry.weight for n, entry in entries.items()}
        self.trained = [name for name, entry in entries.items() if entry.role == "train"]
        self.evaluated = [name for name, entry in entries.items() if not entry.compares_group()]
        self.compares_groups = any(entry.compares_group() for entry in entries.values() if entry.role == "train")
        self.gates = {
            name: Gate(entry.gated_by, entry.gate_threshold, entry.gate_floor)
            for name, entry in entries.items()
            if entry.gated_by is not None
        }
        self._counts = trained_on(entries)
        self._places = {name: self._place(name, entry) for name, entry in entries.items()}
        served: dict[Devices, dict[str, Mapping[str, Any]]] = {}
        for name, place in self._places.items():
            if place.where == AUTO_SERVER:
                options = {"scorer": entries[name].scorer, **entries[name].scorer_options()}
                served.setdefault(place.devices, {})[name] = options
        self._shared = MachineShare(served, device, log_dir, client.cache, self._spending)
        self.asked = self.failed = 0
        self.golden: dict[str, list[float]] = {}
        self._backends: dict[Place, RewardBackend] = {}
        self._pending: list[tuple[int, list[Future[dict[str, list[Outcome]]]]]] = []  # images, and what they wait for

    def start(self, gather: Gather = list) -> None:
        """Start or connect everything, without waiting for it to be ready.

        Args:
            gather: gathers from all processes of a run, which all start. Those of one machine share the server of
                `url: auto` and the cache.

        Raises:
            ConfigError: a requirement of a scorer or a server is missing; for `url: auto`, on all processes.
        """
        self._shared.start(gather)
        for place in dict.fromkeys(self._places.values()):
            members = [name for name, p in self._places.items() if p == place]
            self._backends[place] = self._connect(place, members)

    def wait_loaded(self) -> None:
        """Wait until the scorers of this process have loaded or failed: loading changes what the whole process shares
        (`process_wide`), and no other model may be built, nor a tensor of a run be made, meanwhile."""
        for backend in self._backends.values():
            if isinstance(backend, LocalRewards):
                backend.settle()

    def wait_ready(self, timeout_s: float, every_server: bool = True) -> list[str]:
        """Wait until every reward can be scored, on all of its servers or on one -> problems that remain.

        A problem of rewards of weight 0 is a warning; with `every_server` false (during a run) they are not waited for.
        Those of this process are waited for without a limit, or they would go on loading beside the run.
        """
        deadline = time.monotonic() + timeout_s
        problems: list[str] = []
        for place, backend in self._backends.items():
            if place.kind != "counts" and not every_server:
                continue
            if place.kind == "logged" and isinstance(backend, LocalRewards):
                backend.settle()
            found = backend.wait_ready(max(0.0, deadline - time.monotonic()), every_server)
            if place.kind != "logged":
                problems += found
            elif found:
                logger.warning("rewards of weight 0, which are only logged, are not ready: %s", "; ".join(found))
        if every_server and not problems:
            self.compare_servers()
        return problems

    def has_a_server_each(self) -> bool:
        """Whether every reward that is not only logged can be scored now, on one of its servers at least."""
        return not any(
            backend.wait_ready(_ASK_S, every_server=False)
            for place, backend in self._backends.items()
            if place.kind != "logged"
        )

    def count(self, asked: int, failed: int) -> None:
        """Count samples of this process that were scored, and those of them without a reward."""
        self.asked, self.failed = self.asked + asked, self.failed + failed

    def state(self) -> dict[str, Any]:
        """Counts and golden scores of this process as JSON values."""
        return {"asked": self.asked, "failed": self.failed, "golden": self.golden}

    def restore(self, state: Mapping[str, Any], process: int = 0, processes: int = 1) -> None:
        """Continue from the state of the whole run; each process takes an even share of its counts."""
        self.asked, self.failed = ((int(state[n]) + process) // processes for n in ("asked", "failed"))
        self.golden = {name: list(values) for name, values in state["golden"].items()}

    def probe(self) -> dict[str, dict[str, list[float | None]]]:
        """Score the golden images now, bypassing the cache -> reward -> where -> values, None for a failure. The first
        values of a run stay in `golden`. Rewards of weight 0 that are not in after `logged_wait_s` are left out."""
        # A server answers for each of its addresses, which may hold different models, and this process for itself. The
        # first complete values of a run are what later probes, also after a resume, are compared with.
        items = golden_items()
        found: dict[str, dict[str, list[float | None]]] = {name: {} for name in self.entries}
        for place, backend in self._backends.items():
            remote = isinstance(backend, RewardClient)
            pending: Future[Any] = backend.submit_probe(items) if remote else backend.submit(items)
            try:
                scored = pending.result(self.client.logged_wait_s if place.kind == "logged" else None)
            except TimeoutError:
                pending.cancel()
                continue
            for where, columns in scored.items() if remote else [("", scored)]:
                for name, column in columns.items():
                    values = [o.value if isinstance(o, Score) else None for o in column]
                    found[name][where or "this process"] = values
                    if None not in values:
                        self.golden.setdefault(name, [v for v in values if v is not None])
        return found

    def statistics(self) -> dict[str, float]:
        """Counts of the clients since they were made, where a row asked again after an outage counts again; latencies
        of the newest requests in seconds."""
        counts: dict[str, float] = {}
        for place, backend in self._backends.items():
            if isinstance(backend, RewardClient):
                s, names = backend.statistics, "+".join(n for n, p in self._places.items() if p == place)
                found = {"retries": s.retries, "cache_hits": s.cache_hits}
                found |= {"revision_changes": backend.revisions.changes}
                if s.latencies:
                    found |= {"latency_p50": s.latency(0.5), "latency_p95": s.latency(0.95)}
                counts |= {f"reward_client/{names}/{name}": float(value) for name, value in found.items()}
                for name, codes in s.failures.items():
                    counts |= {f"reward_failures/{name}/{code}": float(n) for code, n in codes.items()}
        return counts

    def local(self, name: str) -> tuple[Scorer, View, str]:
        """The loaded scorer of a reward that is scored in this process, its view of the images, and its device. It must
        not be used while scores are pending.

        Raises:
            KeyError: the reward is scored elsewhere.
        """
        place = self._places[name]
        backend = self._backends[place]
        if not isinstance(backend, LocalRewards):
            raise KeyError(name)
        return backend.scorers[name], place.view, backend.device

    def submit(
        self,
        items: Sequence[RewardItem],
        *,
        broken: Collection[int] = (),
        training: bool = True,
        rewards: Collection[str] | None = None,
    ) -> Scores:
        """Start scoring a batch -> its scores, pending.

        Args:
            broken: indices of items with NaN or Inf, which no scorer receives.
            training: False adds the gold rewards and leaves out those that compare samples of a group.
            rewards: names of those that score; None: all.
        """
        places = {
            name: place
            for name, place in self._places.items()
            if (place.kind != "gold" if training else name in self.evaluated) and (rewards is None or name in rewards)
        }
        # One view of the images for all rewards that share it, and one request for all rewards of a place. Broken
        # images are left out here, and get their failures in `Scores.result`.
        views = {View(): [item for i, item in enumerate(items) if i not in broken]}
        for view in {place.view for place in places.values()} - {View()}:
            views[view] = [viewed(item, view) for item in views[View()]]
        parts = {
            place: self._backends[place].submit(views[place.view], [n for n, p in places.items() if p == place])
            for place in dict.fromkeys(places.values())
        }
        weights = {name: self.weights[name] for name in places}
        gates = {name: gate for name, gate in self.gates.items() if name in places}
        scores = Scores({}, weights, items, broken, parts, places, gates)
        waiting = [one for one in self._pending if not all(future.done() for future in one[1])]
        self._pending = [*waiting, (len(items), scores.weighted_futures)]
        return scores

    def awaiting(self) -> int:
        """Number of submitted images whose rewards that train are not all in; for another thread."""
        return sum(images for images, futures in self._pending if not all(future.done() for future in futures))

    def revisions(self) -> dict[str, str]:
        """Reward -> revision of its scorer, once all are ready; of several servers that differ, all revisions."""
        found: dict[str, str] = {}
        for place, backend in self._backends.items():
            for name in (name for name, p in self._places.items() if p == place):
                if isinstance(backend, LocalRewards):
                    found[name] = backend.scorers[name].spec.revision
                elif isinstance(backend, RewardClient):
                    backend.revisions.learn(backend.info())
                    found[name] = backend.revisions.told(name)
        return found

    def close(self) -> None:
        for backend in self._backends.values():
            backend.close()
        self._backends.clear()
        self._shared.close()

    def compare_servers(self) -> None:
        """Warn about ready servers that score the golden images differently: they hold different models."""
        golden = golden_items()
        for backend in self._backends.values():
            if isinstance(backend, RewardClient) and len(backend.ready) > 1:
                for problem in disagreements(backend.probe(golden, backend.ready)):
                    logger.warning("%s", problem)

    def _place(self, name: str, entry: RewardEntry) -> Place:
        boxed = entry.crop == "mask_box"
        box = (entry.box_margin, entry.box_min_side) if boxed else (0.0, 0)
        view = View(entry.paste_back, boxed, *box)
        kind = "counts" if name in self._counts else "gold" if entry.role == "gold" else "logged"
        if entry.url is None or entry.url == "auto":
            where = OWN_PROCESS if entry.url is None else AUTO_SERVER
            return Place(where, view, kind, devices_of(name, entry, self.device))
        return Place(tuple(resolve_urls(entry.url, name)), view, kind)

    def _connect(self, place: Place, members: list[str]) -> RewardBackend:
        if place.where == OWN_PROCESS:
            scorers = {name: self.entries[name].make() for name in members}
            self._judge_budget = share_budgets(scorers, self._spending, self._judge_budget)
            return LocalRewards(scorers, *place.devices)
        urls = self._shared.urls[place.devices] if place.where == AUTO_SERVER else list(place.where)
        return RewardClient(urls, members, token=reward_token(), options=self.client, cache=self._shared.cache)


class LocalRewards:
    """Scorers in one worker thread: the rollout continues while they score."""

    def __init__(self, scorers: Mapping[str, Scorer], device: str = "cpu") -> None:
        self.scorers = dict(scorers)
        self.device = device
        self._checked = {name: CheckedScorer(scorer) for name, scorer in scorers.items()}
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rewards")
        self._loading = self._worker.submit(self._load)

    def submit(
        self, items: Sequence[RewardItem], rewards: Sequence[str] | None = None
    ) -> Future[dict[str, list[Outcome]]]:
        """Queue the items -> future of name -> one outcome per item."""
        return self._worker.submit(self._score, list(items), self.scorers if rewards is None else rewards)

    def wait_ready(self, timeout_s: float, every_server: bool = True) -> list[str]:
        """Wait for loading -> problems.

        Raises:
            Exception: the error of a scorer that failed to load.
        """
        try:
            self._loading.result(timeout_s)
        except TimeoutError:
            if self._loading.done():  # just in time, or the scorer itself raised TimeoutError
                self._loading.result()
                return []
            return [f"{', '.join(self.scorers)}: still loading after {timeout_s:.0f} s"]
        return []

    def settle(self) -> None:
        """Wait until loading has succeeded or failed."""
        while wait([self._loading], _PATIENCE_S).not_done:
            logger.info("%s: still loading", ", ".join(self.scorers))

    def close(self) -> None:
        self._worker.shutdown(wait=True, cancel_futures=True)

    def _load(self) -> None:
        for name, scorer in self.scorers.items():
            if not isinstance(getattr(scorer, "spec", None), ScorerSpec):
                raise ConfigError(
                    f"rewards.{name}: make of its entry returned {shown(scorer)}, which has no spec; return the "
                    "scorer, a subclass of PackageScorer"
                )
            try:
                with loading():
                    scorer.load(self.device)
            except (InputError, RewardOutage) as error:
                raise type(error)(problem_of(name, scorer, error)) from None

    def _score(self, items: list[RewardItem], rewards: Iterable[str]) -> dict[str, list[Outcome]]:
        return {name: self._checked[name].score(items) for name in rewards}


def statistics_of_all(statistics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Statistics of a run from those of its processes: sums of counts; the longest latencies, and the changes of a
    revision, which all see, from the process with the most."""
    names = dict.fromkeys(name for one in statistics for name in one)
    found = {name: [one[name] for one in statistics if name in one] for name in names}
    most = ("latency_p50", "latency_p95", "revision_changes")
    return {name: max(values) if name.endswith(most) else sum(values) for name, values in found.items()}


def of_all(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The state of a run from those of its processes, of which only the first probes."""
    counts = {name: sum(state[name] for state in states) for name in ("asked", "failed")}
    return {**counts, "golden": states[0]["golden"]}
