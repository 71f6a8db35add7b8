"""Score the outputs of a benchmark: what is not on record yet, each reward on its own, in an order that a kill does not
harm."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from retouch.benchmarks.base import Benchmark, ImageRow
from retouch.benchmarks.observations import Asked, Observations, reward_digest
from retouch.benchmarks.outputs import Output, find_file, item_digest
from retouch.data.base import DataSection, ImageSection, ItemFiles
from retouch.data.dataset import read_item
from retouch.data.identity import digest
from retouch.errors import DataError, RewardOutage
from retouch.imaging import ImageProblem, open_image, to_rgb
from retouch.lru import LruCache
from retouch.rewards.base import RewardEntry
from retouch.rewards.devices import own_device
from retouch.rewards.protocol import RewardItem
from retouch.rewards.table import PendingScores, RewardTable
from retouch.training.scoring import item_of, summary, wait_for_rewards
from retouch.types import Example, Failure, Outcome
from retouch.use.comparison import scored_here

logger = logging.getLogger(__name__)

_UNDER_WAY = 4  # batches: a scorer is never idle while the next images are read

_MOST_PIXELS = 1 << 25
"""Pixels of the images of a batch, beyond which it ends, and of all batches under way; one image may have more."""


class Scorers:
    """The rewards of a benchmark, ready: one table for each reward and those it gates. Each is scored only where it
    is missing."""

    def __init__(self, tables: Sequence[RewardTable]) -> None:
        self.tables = tables
        self.entries: dict[str, RewardEntry] = {name: e for table in tables for name, e in table.entries.items()}
        self.started = self.revisions()
        self.digests = {name: reward_digest(entry, self.started[name]) for name, entry in self.entries.items()}

    def revisions(self) -> dict[str, str]:
        """Reward -> revision of its scorer, with the model that a judge's endpoint serves."""
        return {name: revision for table in self.tables for name, revision in table.revisions().items()}

    def provenance(self) -> dict[str, dict[str, Any]]:
        """Reward -> its options and its revision, as JSON values."""
        ended = self.revisions()
        for name, revision in ended.items():
            if revision != self.started[name]:
                logger.warning(
                    "%s: its revision changed from %r to %r while it scored: the scores may not compare",
                    name,
                    self.started[name],
                    revision,
                )
        return {
            name: {"options": entry.model_dump(mode="json"), "revision": ended[name]}
            for name, entry in self.entries.items()
        }


@contextmanager
def scorers_of(benchmark: Benchmark) -> Iterator[Scorers]:
    """The rewards of a benchmark, once all can be scored.

    Raises:
        ConfigError, RewardOutage: one of them cannot.
    """
    entries = {name: scored_here(entry) for name, entry in benchmark.rewards.items()}
    tables: list[RewardTable] = []
    with ExitStack() as stack:
        for name, entry in entries.items():
            if entry.gated_by is not None:
                continue
            together = {name: entry, **{n: e for n, e in entries.items() if e.gated_by == name}}
            table = RewardTable(together, benchmark.reward_client, device=own_device())
            stack.callback(table.close)
            table.start()
            table.settle()  # two scorers must not load at the same time
            wait_for_rewards(table, benchmark.reward_client)
            tables.append(table)
        yield Scorers(tables)


@dataclass(frozen=True)
class Found:
    """An output that is there."""

    output: Output
    path: Path
    asked: Asked


def found_in(folder: Path, outputs: Sequence[Output]) -> tuple[list[Found], list[str]]:
    """The outputs that a folder has, and the official names of the others."""
    found: list[Found] = []
    missing: list[str] = []
    items: dict[int, str] = {}
    for output in outputs:
        path = find_file(folder, output.file)
        if path is None:
            missing.append(output.file)
            continue
        if output.position not in items:
            items[output.position] = item_digest(output.item)
        found.append(Found(output, path, Asked(output.file, digest(path), items[output.position])))
    return found, missing


def score(
    benchmark: Benchmark, found: Sequence[Found], section: DataSection, scorers: Scorers, record: Observations
) -> None:
    """Score the outputs that have no score on record.

    Raises:
        RewardOutage: no reward of a batch could be had; what was scored before is on record.
    """
    for table in scorers.tables:
        todo = [
            one
            for one in found
            if any(not _is_scored(record.outcome(one.asked, name, scorers.digests[name])) for name in table.entries)
        ]
        if not todo:
            continue
        logger.info("%s: scoring %d images", ", ".join(table.entries), len(todo))
        failed = _score_with(table, benchmark, todo, section, scorers, record)
        retryable = [one for one, failure in failed if failure.retryable]
        if retryable:
            failed = _score_with(table, benchmark, retryable, section, scorers, record)
        if failed:
            logger.warning("%s: %d images have no score: %s", ", ".join(table.entries), len(failed),
                           summary([failure for _, failure in failed]))  # fmt: skip


def rows_of(found: Sequence[Found], scorers: Scorers, record: Observations) -> tuple[list[ImageRow], list[Found]]:
    """The scored outputs, and those that were never tried."""
    rows: list[ImageRow] = []
    untried: list[Found] = []
    for one in found:
        outcomes = {name: record.outcome(one.asked, name, d) for name, d in scorers.digests.items()}
        given = {name: outcome for name, outcome in outcomes.items() if outcome is not None}
        if len(given) < len(outcomes):
            untried.append(one)
            continue
        rows.append(ImageRow(one.output.key, one.output.index, one.output.item.metadata, given))
    return rows, untried


def _is_scored(outcome: Outcome | None) -> bool:
    return outcome is not None and not isinstance(outcome, Failure)


class _Batch(NamedTuple):
    """Outputs under way: those that cannot be read, by their place; the scores of the others; the pixels of these."""

    outputs: Sequence[Found]
    unreadable: Mapping[int, Failure]
    scores: PendingScores | None
    pixels: int


def _score_with(
    table: RewardTable,
    benchmark: Benchmark,
    todo: Sequence[Found],
    section: DataSection,
    scorers: Scorers,
    record: Observations,
) -> list[tuple[Found, Failure]]:
    """Score outputs with one table, batch by batch -> those that failed."""
    size = benchmark.reward_client.batch_size
    pending: deque[_Batch] = deque()
    failed: list[tuple[Found, Failure]] = []
    names = list(table.entries)
    read: LruCache[int, Example] = LruCache(1)  # the images of an item follow each other

    def settle() -> None:
        batch, unreadable, scores, _ = pending.popleft()
        columns = {} if scores is None else scores.result().outcomes
        scored = zip(*(columns[name] for name in names), strict=True) if columns else iter(())
        outcomes: list[tuple[Asked, dict[str, Outcome]]] = []
        for i, one in enumerate(batch):
            found: Sequence[Outcome] = [unreadable[i]] * len(names) if i in unreadable else next(scored)
            given: dict[str, Outcome] = dict(zip(names, found, strict=True))
            outcomes.append((one.asked, given))
            failures = [outcome for outcome in given.values() if isinstance(outcome, Failure)]
            failed.extend((one, failure) for failure in failures[:1])
        record.add(outcomes, {name: scorers.digests[name] for name in names})
        lost = [o for _, given in outcomes for o in given.values() if isinstance(o, Failure)]
        if len(lost) == len(outcomes) * len(names) and all(failure.retryable for failure in lost):
            raise RewardOutage(f"{', '.join(names)}: {summary(lost)}; the scores so far are kept: start again")

    left = deque(todo)
    while left:
        batch: list[Found] = []
        items: list[RewardItem] = []
        unreadable: dict[int, Failure] = {}
        pixels = 0
        while left and len(batch) < size and pixels < _MOST_PIXELS:
            batch.append(one := left.popleft())
            try:
                items.append(_item(benchmark, one, section, read, len(batch) - 1))
                pixels += items[-1].image.size // 3
            except (ImageProblem, DataError) as problem:
                unreadable[len(batch) - 1] = Failure("bad_item", str(problem))
        while pending and sum(other.pixels for other in pending) + pixels > _MOST_PIXELS:
            settle()
        pending.append(_Batch(batch, unreadable, table.submit(items, training=False) if items else None, pixels))
        if len(pending) == _UNDER_WAY:
            settle()
    while pending:
        settle()
    return failed


def _item(
    benchmark: Benchmark, one: Found, section: DataSection, read: LruCache[int, Example], number: int
) -> RewardItem:
    example = read.get(one.output.position, lambda: native_example(one.output.item, section))
    image = benchmark.prepared(to_rgb(open_image(one.path)), example.source, example.mask)
    return item_of(example, np.asarray(image), number, example.id)


def native_example(item: ItemFiles, section: DataSection) -> Example:
    """The example of an item at the size of its own files, without the strip of a reference."""
    update: dict[str, Any] = {"reference_strip": None} if isinstance(section, ImageSection) else {}
    if item.source_path is not None:
        width, height = open_image(item.source_path).size
        update["resolution"] = (height, width)
    return read_item(item, section.model_copy(update=update))[0]
