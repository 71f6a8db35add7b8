"""A picture that kills the worker costs a few of its lives, and no other picture its score."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

from retouch.rewards.protocol import RewardItem, ScorerSpec
from retouch.rewards.server.batcher import (
    STRIKES,
    Batcher,
)
from retouch.rewards.server.frames import BatchCost, Scored
from retouch.rewards.server.worker import WorkerLost
from retouch.types import Failure, Outcome, Score
from tests.rewards.fakes import brightness, item


class Mortal:
    """A worker that ends over a prompt "killer", and otherwise as often as it is told to."""

    def __init__(self, accidents: int = 0) -> None:
        self.ready, self.problem, self.restarts, self.pid = True, None, 0, 1
        self.specs: Mapping[str, ScorerSpec] = {}
        self.accidents = accidents
        self.batches: list[list[str]] = []

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def score(self, names: Sequence[str], items: Sequence[RewardItem], deadlines: Sequence[float]) -> Scored:
        self.batches.append([one.prompt for one in items])
        if any(one.prompt == "killer" for one in items):
            raise WorkerLost("gone", scoring=True)
        if self.accidents:
            self.accidents -= 1
            raise WorkerLost("killed by somebody", scoring=True)
        return {name: [Score(brightness(one)) for one in items] for name in names}, BatchCost({}, {})


def ask_until_final(worker: Mortal, items: Sequence[RewardItem], most: int) -> tuple[list[Outcome], int]:
    """As a run asks: what may come out better is asked again -> final outcomes, and how often it asked."""

    async def asking() -> tuple[list[Outcome], int]:
        batcher = Batcher(worker, max_batch=8, max_wait_s=0.0)
        batcher.start()
        found: dict[int, Outcome] = {}
        left, rounds = list(range(len(items))), 0
        while left and rounds < most:
            rounds += 1
            columns = await batcher.score(["r"], [items[i] for i in left], time.monotonic() + 30)
            found.update(zip(left, columns["r"], strict=True))
            left = [i for i in left if isinstance(found[i], Failure) and found[i].retryable]  # type: ignore[union-attr]
        assert batcher.quarantined == sum(isinstance(o, Failure) for o in found.values())
        await batcher.stop()
        return [found[i] for i in range(len(items))], rounds

    return asyncio.run(asking())


def test_a_killer_is_quarantined_and_the_others_are_scored() -> None:
    worker = Mortal()
    batch = [item(i, prompt="killer" if i == 3 else f"p{i}") for i in range(8)]
    outcomes, rounds = ask_until_final(worker, batch, 20)
    for one, outcome in zip(batch, outcomes, strict=True):
        if one.prompt == "killer":
            assert outcome == Failure("quarantined", "the worker ended 3 times while it scored this item alone")
        else:
            assert outcome == Score(brightness(one))
    deaths = [prompts for prompts in worker.batches if "killer" in prompts]
    assert len(deaths) == 1 + STRIKES and all(prompts == ["killer"] for prompts in deaths[1:])
    assert rounds == 2 + STRIKES


def test_it_stays_in_quarantine_whoever_asks() -> None:
    worker = Mortal()

    async def asking() -> list[str]:
        batcher = Batcher(worker, max_batch=8, max_wait_s=0.0)
        batcher.start()
        codes: list[str] = []
        for number in range(6):
            columns = await batcher.score(["r"], [item(0, id=number, prompt="killer")], time.monotonic() + 30)
            (outcome,) = columns["r"]
            assert isinstance(outcome, Failure)
            codes.append(outcome.code)
        await batcher.stop()
        return codes

    assert asyncio.run(asking()) == ["worker_lost"] * STRIKES + ["quarantined"] * 3


def test_a_worker_that_others_kill_condemns_nobody() -> None:
    """Suspects are cleared as soon as they are scored, and then share batches again."""
    worker = Mortal(accidents=2)
    batch = [item(i) for i in range(4)]
    outcomes, _ = ask_until_final(worker, batch, 10)
    assert outcomes == [Score(brightness(one)) for one in batch]
    again, rounds = ask_until_final(worker, batch, 10)
    assert again == outcomes and rounds == 1 and len(worker.batches[-1]) == 4
