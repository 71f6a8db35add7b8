"""Dynamic batching: items of several requests with the same rewards and shapes are scored together.

A batch is sent as soon as it is full or its oldest item has waited `max_wait_s`; while the worker is busy, items
accumulate. Items whose deadline passed are answered without a score. Items in the batch of a worker that ended are
suspects: each is scored alone, and one that ends the worker repeatedly is quarantined.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from retouch.process.plain_text import count_of
from retouch.rewards.client.cache import cache_key
from retouch.rewards.protocol import PICTURES, RewardItem
from retouch.rewards.server.frames import LATE, BatchCost
from retouch.rewards.server.worker import ProcessWorker, WorkerLost
from retouch.types import Failure, Outcome

logger = logging.getLogger(__name__)

STRIKES = 3
"""Deaths of the worker over one item alone, after which it is quarantined."""

_SUSPECTS = 4096

Key = tuple[object, ...]
"""Common properties of the items of one batch: rewards, and the shape of every image."""

Watch = Callable[[int, BatchCost], None]
"""Called with the number of items and the cost of every batch."""


@dataclass
class _Unit:
    """One item that waits for its outcomes."""

    item: RewardItem
    deadline: float
    arrived: float
    done: asyncio.Future[dict[str, Outcome]]


@dataclass
class _Line:
    """Units of one key, oldest first."""

    rewards: Sequence[str]
    units: deque[_Unit] = field(default_factory=deque[_Unit])


@dataclass(eq=False)
class Batcher:
    """Sends batches to the worker, one at a time.

    Attributes:
        max_batch: items per batch.
        max_wait_s: maximum batching delay while the worker is free.
        watch: called after every batch.
    """

    worker: ProcessWorker
    max_batch: int
    max_wait_s: float
    watch: Watch = lambda items, work: None

    def __post_init__(self) -> None:
        self._lines: dict[Key, _Line] = {}
        self._strikes: OrderedDict[bytes, int] = OrderedDict()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """Items not yet sent to the worker."""
        return sum(len(line.units) for line in self._lines.values())

    @property
    def quarantined(self) -> int:
        """Items that are no longer scored."""
        return sum(strikes >= STRIKES for strikes in self._strikes.values())

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Stop; waiting calls of `score` are cancelled."""
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for line in self._lines.values():
            for unit in line.units:
                unit.done.cancel()
        self._lines.clear()

    async def score(
        self, rewards: Sequence[str], items: Sequence[RewardItem], deadline: float
    ) -> dict[str, list[Outcome]]:
        """Outcomes by reward, in the order of the items.

        Args:
            deadline: on the clock of `time.monotonic`.
        """
        loop, now = asyncio.get_running_loop(), time.monotonic()
        units = [_Unit(item, deadline, now, loop.create_future()) for item in items]
        for unit in units:
            key = key_of(rewards, unit.item)
            self._lines.setdefault(key, _Line(rewards)).units.append(unit)
        self._changed.set()
        done = await asyncio.gather(*(unit.done for unit in units))
        return {name: [outcomes[name] for outcomes in done] for name in rewards}

    async def _run(self) -> None:
        while True:
            key = min(self._lines, key=lambda key: self._lines[key].units[0].arrived, default=None)
            if key is None:
                self._changed.clear()
                await self._changed.wait()
                continue
            line = self._lines[key]
            now = time.monotonic()
            wait = line.units[0].arrived + self.max_wait_s - now
            if self.worker.ready and (len(line.units) >= self.max_batch or wait <= 0):
                await self._score_one_batch(key, line)
            elif self.worker.problem is not None:
                self._answer_all(Failure("worker_lost", self.worker.problem, retryable=True))
            elif self.worker.ready:
                await self._sleep(wait)
            else:  # the worker is being restarted
                self._answer_late(now)
                await self._sleep(0.05)

    async def _sleep(self, seconds: float) -> None:
        """Wait until `seconds` have passed or an item arrived."""
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    async def _score_one_batch(self, key: Key, line: _Line) -> None:
        now = time.monotonic()
        units: list[_Unit] = []
        while line.units and len(units) < self.max_batch:
            unit = line.units.popleft()
            if unit.done.done():  # its request was cancelled
                continue
            if unit.deadline < now:
                _answer(unit, dict.fromkeys(line.rewards, LATE))
                continue
            strikes = self._strikes.get(_print_of(line.rewards, unit)) if self._strikes else None
            if strikes is not None and strikes >= STRIKES:
                message = f"the worker ended {strikes} times while it scored this item alone"
                _answer(unit, dict.fromkeys(line.rewards, Failure("quarantined", message)))
                continue
            if strikes is not None and units:  # a suspect is scored alone, in a later batch
                line.units.appendleft(unit)
                break
            units.append(unit)
            if strikes is not None:
                break
        if not line.units:
            del self._lines[key]
        if not units:
            return
        items, deadlines = [unit.item for unit in units], [unit.deadline for unit in units]
        try:
            outcomes, work = await self.worker.score(line.rewards, items, deadlines)
            if any(len(outcomes[name]) != len(units) for name in line.rewards):
                raise ValueError("another number of outcomes than of items")
        except WorkerLost as lost:
            logger.warning("%s not scored: %s", count_of(len(units), "item"), lost)
            if lost.scoring:
                self._suspect(line.rewards, units)
            outcomes, work = _failed(line, units, Failure("worker_lost", str(lost), retryable=True))
        except MemoryError:
            logger.warning("%s not scored: no memory for the batch of the worker", count_of(len(units), "item"))
            failure = Failure("overloaded", "the server has no memory for the batch of the item", retryable=True)
            outcomes, work = _failed(line, units, failure)
        except Exception as error:  # the other batches must not stop
            logger.exception("%s not scored", count_of(len(units), "item"))
            failure = Failure("scorer_error", f"the batch raised {type(error).__name__}: {error}")
            outcomes, work = _failed(line, units, failure)
        else:
            if self._strikes:
                for unit in units:
                    self._strikes.pop(_print_of(line.rewards, unit), None)
        self.watch(len(units), work)
        for i, unit in enumerate(units):
            _answer(unit, {name: outcomes[name][i] for name in line.rewards})

    def _suspect(self, rewards: Sequence[str], units: Sequence[_Unit]) -> None:
        """Mark the items of a batch whose worker ended; an item that was alone gets a strike."""
        for unit in units:
            mark = _print_of(rewards, unit)
            self._strikes[mark] = self._strikes.get(mark, 0) + (len(units) == 1)
        while len(self._strikes) > _SUSPECTS:
            self._strikes.popitem(last=False)

    def _answer_all(self, failure: Failure) -> None:
        for line in self._lines.values():
            for unit in line.units:
                _answer(unit, dict.fromkeys(line.rewards, failure))
        self._lines.clear()

    def _answer_late(self, now: float) -> None:
        for key, line in list(self._lines.items()):
            for unit in line.units:
                if unit.deadline < now:
                    _answer(unit, dict.fromkeys(line.rewards, LATE))
            line.units = deque(unit for unit in line.units if not unit.done.done())
            if not line.units:
                del self._lines[key]


def _failed(line: _Line, units: Sequence[_Unit], failure: Failure) -> tuple[dict[str, list[Outcome]], BatchCost]:
    return {name: [failure] * len(units) for name in line.rewards}, BatchCost({}, {})


def _answer(unit: _Unit, outcomes: dict[str, Outcome]) -> None:
    if not unit.done.done():
        unit.done.set_result(outcomes)


def _print_of(rewards: Sequence[str], unit: _Unit) -> bytes:
    return cache_key(unit.item, ",".join(rewards), "")


def key_of(rewards: Sequence[str], item: RewardItem) -> Key:
    """Items with the same key can be stacked: each of their images has the same shape."""
    shapes = (None if (pixels := getattr(item, name)) is None else pixels.shape for name in PICTURES)
    return (tuple(rewards), *shapes)
