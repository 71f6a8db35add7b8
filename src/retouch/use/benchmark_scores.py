"""Score the outputs of a benchmark: what is not on record yet, each reward on its own, in an order that a kill does not
harm."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from retouch.benchmarks.base import Benchmark, ImageRow
from retouch.benchmarks.observations import Observations, OutputIdentity, asked_of, reward_digests
from retouch.benchmarks.outputs import Output, find_file, item_digest
from retouch.data.base import DataSection, ImageSection, ItemFiles
from retouch.data.checking import in_threads, progress
from retouch.data.identity import digest
from retouch.data.item import read_item
from retouch.errors import DataError, ImageProblem, RewardOutage
from retouch.imaging.reading import open_image, to_rgb
from retouch.lru import LruCache
from retouch.process.plain_text import count_of
from retouch.rewards.base import RewardEntry
from retouch.rewards.client.revisions import without_fingerprints
from retouch.rewards.devices import own_device
from retouch.rewards.golden import golden_items
from retouch.rewards.protocol import Pixels, RewardItem
from retouch.rewards.scorers.judge_budget import spending_of
from retouch.rewards.table import RewardTable, Scores
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
        self.digests = reward_digests(self.entries, self.started)
        self.on_record: dict[str, set[str]] = {name: set() for name in self.entries}

    def revisions(self) -> dict[str, str]:
        """Reward -> revision of its scorer, with the model that a judge's endpoint serves."""
        return {name: revision for table in self.tables for name, revision in table.revisions().items()}

    def provenance(self) -> dict[str, dict[str, Any]]:
        """Reward -> its options, its revision, and all revisions whose scores are used, as JSON values: they may differ
        in the fingerprints of a judge, and in names of its model that it reported later."""
        ended = self.revisions()
        for name, revision in ended.items():
            if without_fingerprints(revision) != without_fingerprints(self.started[name]):
                logger.warning(
                    "%s: its revision changed from %r to %r while it scored: the scores may not compare",
                    name,
                    self.started[name],
                    revision,
                )
        return {
            name: {
                "options": entry.model_dump(mode="json"),
                "revision": ended[name],
                "revisions": sorted(self.on_record[name] | {ended[name]}),
            }
            for name, entry in self.entries.items()
        }


@contextmanager
def scorers_of(benchmark: Benchmark, out: Path) -> Iterator[Scorers]:
    """The rewards of a benchmark, once all can be scored.

    Args:
        out: folder of the result, in which the judges of all shards and starts count what they spend.

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
            table = RewardTable(together, benchmark.reward_client, device=own_device(), spending=spending_of(out))
            stack.callback(table.close)
            table.start()
            table.wait_loaded()  # two scorers must not load at the same time
            wait_for_rewards(table, benchmark.reward_client)
            tables.append(table)
        yield Scorers(tables)


@dataclass(frozen=True)
class FoundOutput:
    """An output that is there."""

    output: Output
    path: Path
    asked: OutputIdentity


class OutputReader:
    """Reads what scorers receive of the outputs of a benchmark: the image as `Benchmark.prepared` returns it, and
    everything else of its example at the size of the published files.

    Args:
        section: reads the items of the outputs.
    """

    def __init__(self, benchmark: Benchmark, section: DataSection) -> None:
        self._benchmark = benchmark
        self._section = section
        self._known: dict[tuple[int, str], OutputIdentity] = {}  # by the item's position and the file's bytes

    def item(self, output: Output, path: Path, examples: LruCache[int, Example], number: int = 0) -> RewardItem:
        """The item of an output as scorers receive it.

        Args:
            examples: of one thread: the images of an item follow each other.
            number: of the output in its batch.

        Raises:
            ImageProblem, DataError: the file, or one of the item, cannot be read.
        """
        example = examples.get(output.position, lambda _: native_example(output.item, self._section))
        image = self._benchmark.prepared(saved_image(path), example.source, example.mask)
        return item_of(example, np.asarray(image), number)

    def images(self, outputs: Sequence[tuple[Output, Path]]) -> Iterator[Pixels | None]:
        """The images of outputs as they are scored; None for one that cannot be read, which scorers report."""
        examples: LruCache[int, Example] = LruCache(1)
        for output, path in outputs:
            try:
                yield self.item(output, path, examples).image
            except (ImageProblem, DataError) as problem:
                logger.warning("%s; left out of the distances", problem)
                yield None

    def found(self, folder: Path, outputs: Sequence[Output]) -> tuple[list[FoundOutput], list[str]]:
        """The outputs that a folder has, and the official names of the others."""
        places = [(output, find_file(folder, output.file)) for output in outputs]
        there = [(output, path) for output, path in places if path is not None]
        of_items = [list(of) for _, of in itertools.groupby(there, lambda one: one[0].position)]
        found = progress(in_threads(self._asked, of_items), len(of_items), f"images of {folder.name}")
        return [one for of in found for one in of], [output.file for output, path in places if path is None]

    def _asked(self, of_item: Sequence[tuple[Output, Path]]) -> list[FoundOutput]:
        """The outputs of an item with their identities; in several threads."""
        examples: LruCache[int, Example] = LruCache(1)
        return [FoundOutput(output, path, self._identity(output, path, examples)) for output, path in of_item]

    def _identity(self, output: Output, path: Path, examples: LruCache[int, Example]) -> OutputIdentity:
        key = output.position, digest(path)
        if key not in self._known:
            try:
                self._known[key] = asked_of(output.file, self.item(output, path, examples))
            except (ImageProblem, DataError):
                self._known[key] = OutputIdentity(output.file, key[1], item_digest(output.item))
        return replace(self._known[key], file=output.file)


def saved_image(path: Path) -> Image.Image:
    """The image of a file in RGB, with the format of the file, which Pillow drops with every change of an image.

    Raises:
        ImageProblem: it cannot be read.
    """
    image = to_rgb(open_image(path))
    with Image.open(path) as file:
        image.format = file.format
    return image


def score(
    benchmark: Benchmark, found: Sequence[FoundOutput], reader: OutputReader, scorers: Scorers, record: Observations
) -> None:
    """Score the outputs that have no score on record. One that fails although its scorer answers is on record as a
    failure, after a second try if that may help.

    Raises:
        RewardOutage: a scorer does not answer; what was scored before is on record.
    """
    if outdated := record.outdated([one.asked for one in found], scorers.digests):
        logger.info(
            "%s: %d earlier outcomes are of another version, of other options or of other images; they are scored "
            "again",
            record.path.stem,
            outdated,
        )
    for table in scorers.tables:
        todo = [
            one
            for one in found
            if any(not _is_scored(record.outcome(one.asked, name, scorers.digests[name])) for name in table.entries)
        ]
        if not todo:
            continue
        logger.info("%s: scoring %s", ", ".join(table.entries), count_of(len(todo), "image"))
        failed = _score_with(table, benchmark, todo, reader, scorers, record)
        again = [one for one, failure in failed if failure.retryable]
        failed = [(one, failure) for one, failure in failed if not failure.retryable]
        failed += _score_with(table, benchmark, again, reader, scorers, record)
        if failed:
            logger.warning("%s: no score of %s: %s", ", ".join(table.entries), count_of(len(failed), "image"),
                           summary([failure for _, failure in failed]))  # fmt: skip


def rows_of(
    found: Sequence[FoundOutput], scorers: Scorers, record: Observations
) -> tuple[list[ImageRow], list[FoundOutput]]:
    """The scored outputs, and those that were never tried."""
    rows: list[ImageRow] = []
    untried: list[FoundOutput] = []
    for one in found:
        outcomes = {name: record.outcome(one.asked, name, d) for name, d in scorers.digests.items()}
        given = {name: outcome for name, outcome in outcomes.items() if outcome is not None}
        if len(given) < len(outcomes):
            untried.append(one)
            continue
        for name, by in scorers.digests.items():
            scorers.on_record[name] |= {record.revision(one.asked, name, by)} - {""}
        output = one.output
        rows.append(ImageRow(output.key, output.index, output.item.metadata, given, output.file))
    return rows, untried


def _is_scored(outcome: Outcome | None) -> bool:
    return outcome is not None and not isinstance(outcome, Failure)


class _Batch(NamedTuple):
    """Outputs under way: those that cannot be read, by their place; the scores of the others; the pixels of these."""

    outputs: Sequence[FoundOutput]
    unreadable: Mapping[int, Failure]
    scores: Scores | None
    pixels: int


def _score_with(
    table: RewardTable,
    benchmark: Benchmark,
    todo: Sequence[FoundOutput],
    reader: OutputReader,
    scorers: Scorers,
    record: Observations,
) -> list[tuple[FoundOutput, Failure]]:
    """Score outputs with one table, batch by batch -> those that failed.

    Raises:
        RewardOutage: a scorer does not answer.
    """
    size = benchmark.reward_client.batch_size
    pending: deque[_Batch] = deque()
    failed: list[tuple[FoundOutput, Failure]] = []
    names = list(table.entries)
    examples: LruCache[int, Example] = LruCache(1)

    def settle() -> None:
        batch, unreadable, scores, _ = pending.popleft()
        columns = {} if scores is None else scores.result().outcomes
        scored = zip(*(columns[name] for name in names), strict=True) if columns else iter(())
        outcomes: list[tuple[OutputIdentity, dict[str, Outcome]]] = []
        for i, one in enumerate(batch):
            found: Sequence[Outcome] = [unreadable[i]] * len(names) if i in unreadable else next(scored)
            given: dict[str, Outcome] = dict(zip(names, found, strict=True))
            outcomes.append((one.asked, given))
            failures = [outcome for outcome in given.values() if isinstance(outcome, Failure)]
            failed.extend((one, failure) for failure in sorted(failures, key=lambda f: not f.retryable)[:1])
        record.add(outcomes, {name: scorers.digests[name] for name in names}, table.revisions())
        if silent := [name for name, column in columns.items() if _is_away(column)]:
            _require_answers(table, silent, columns)

    # Further batches are read and submitted while earlier ones are scored, which keeps the scorers busy. Images are
    # held until then: their pixels are bounded within a batch, and in all batches under way.
    left = deque(todo)
    while left:
        batch: list[FoundOutput] = []
        items: list[RewardItem] = []
        unreadable: dict[int, Failure] = {}
        pixels = 0
        while left and len(batch) < size and pixels < _MOST_PIXELS:
            batch.append(one := left.popleft())
            try:
                items.append(reader.item(one.output, one.path, examples, len(batch) - 1))
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


def _is_away(column: Sequence[Outcome]) -> bool:
    """Whether a scorer gave no answer to any image of a batch, not even that an image is none."""
    return all(isinstance(outcome, Failure) and outcome.retryable for outcome in column)


def _require_answers(table: RewardTable, names: Sequence[str], columns: Mapping[str, Sequence[Outcome]]) -> None:
    """Ask scorers that gave no answer about an image that is known to be sound: the images of the batch may be at
    fault, of which there may be a single one, and to start again would not help.

    Raises:
        RewardOutage: one of them does not answer that either.
    """
    known = table.submit(golden_items()[:1], training=False).result().outcomes
    if away := [name for name in names if _is_away(known[name])]:
        lost = [outcome for name in away for outcome in columns[name] if isinstance(outcome, Failure)]
        raise RewardOutage(f"{', '.join(away)}: {summary(lost)}; the scores so far are kept: start again")


def native_example(item: ItemFiles, section: DataSection) -> Example:
    """The example of an item at the size of its own files, without the strip of a reference."""
    update: dict[str, Any] = {"reference_strip": None} if isinstance(section, ImageSection) else {}
    if item.source_path is not None:
        width, height = open_image(item.source_path).size
        update["resolution"] = (height, width)
    return read_item(item, section.model_copy(update=update))[0]
