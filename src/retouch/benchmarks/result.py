"""From scored outputs to the result of a benchmark: measures, paired intervals, provenance, a table. No torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

import retouch
from retouch.benchmarks.base import Benchmark, ImageRow, means
from retouch.errors import ConfigError
from retouch.observe.statistics import bootstrap_intervals
from retouch.process.plain_text import count_of
from retouch.rewards.client.revisions import is_cut
from retouch.rewards.foreign import one_line
from retouch.types import Failure


@dataclass(frozen=True)
class ResultColumn:
    """The outputs of one set of weights, or of another program.

    Attributes:
        rows: of the outputs that are there.
        missing: official names of the others.
        about: where the outputs come from, as JSON values.
        resized: number of outputs that have not the official size.
    """

    rows: Sequence[ImageRow]
    missing: Sequence[str]
    about: Mapping[str, Any]
    resized: int = 0

    def failures(self) -> dict[str, dict[str, int]]:
        """Reward -> code -> number of outputs on which it failed."""
        found: dict[str, Counter[str]] = {}
        for row in self.rows:
            for name, outcome in row.outcomes.items():
                if isinstance(outcome, Failure):
                    found.setdefault(name, Counter())[outcome.code] += 1
        return {name: dict(codes) for name, codes in found.items()}


def result_of(
    benchmark: Benchmark,
    columns: Mapping[str, ResultColumn],
    data: Mapping[str, Any],
    rewards: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """The content of result.json.

    Args:
        columns: in the order of the table; every further one is compared with the one before it.
        data: provenance of the items, with their number, `items`.
        rewards: provenance of each reward, with its `revision`, and `revisions` of all scores if there are several.
    """
    measured = _Measures(benchmark, columns)
    intervals, differences = _intervals(measured, columns)
    kind, official = type(benchmark), benchmark.official
    return {
        "benchmark": {
            "name": benchmark.name,
            "title": kind.title,
            "source": kind.source,
            "options": benchmark.model_dump(mode="json", exclude={"rewards", "reward_client", "path"}),
        },
        "data": dict(data),
        "retouch": retouch.__version__,
        "images_per_item": benchmark.count,
        "seed": benchmark.seed,
        "official": {
            "images_per_item": official.images_per_item,
            "resolution": None if official.resolution is None else list(official.resolution),
            "settings": dict(official.settings),
        },
        "rewards": {name: dict(told) for name, told in rewards.items()},
        "weights": {
            name: {
                **column.about,
                "images": len(column.rows),
                "missing": len(column.missing),
                "missing_files": list(column.missing[:20]),
                "of_other_size": column.resized,
                "failures": column.failures(),
            }
            for name, column in columns.items()
        },
        "measures": {name: measured(column.rows) for name, column in columns.items()},
        "intervals": intervals,
        "differences": differences,
        "published": {
            "compares": not (reasons := _departures(benchmark, columns, data, rewards)),
            "reasons": reasons,
            "rows": [
                {"model": row.model, "numbers": dict(row.numbers), "source": row.source}
                for row in benchmark.published_rows()
            ],
        },
    }


class _Measures:
    """The measures of some outputs: those of the benchmark, and the mean of every reward that none of these reads."""

    def __init__(self, benchmark: Benchmark, columns: Mapping[str, ResultColumn]) -> None:
        self._benchmark = benchmark
        rows = [row for column in columns.values() for row in column.rows]
        measures = self._summary(rows)
        self._further = [
            name
            for name in benchmark.rewards
            if name not in measures and self._summary([row.without(name) for row in rows]) == measures
        ]

    def __call__(self, rows: Sequence[ImageRow]) -> dict[str, float]:
        found = {name: [score.value for row in rows if (score := row.score(name))] for name in self._further}
        return {**self._summary(rows), **means(found)}

    def _summary(self, rows: Sequence[ImageRow]) -> dict[str, float]:
        """The measures of the benchmark.

        Raises:
            ConfigError: details of scores are not those of the benchmark's scorers: a server has others of their names.
        """
        benchmark = self._benchmark
        try:
            return benchmark.summary(rows)
        except (KeyError, TypeError, ValueError, IndexError, ArithmeticError) as error:
            if all(entry.url is None and entry.scorer != "fn" for entry in benchmark.rewards.values()):
                raise
            raise ConfigError(
                f"rewards: a detail of a score has not the form that {benchmark.title} needs ({type(error).__name__}: "
                f"{one_line(str(error))}); serve {', '.join(sorted(benchmark.rewards))} with `retouch reward serve`, "
                "or leave url and fn out"
            ) from None


def _departures(
    benchmark: Benchmark,
    columns: Mapping[str, ResultColumn],
    data: Mapping[str, Any],
    rewards: Mapping[str, Mapping[str, Any]],
) -> list[str]:
    """Why the measures do not compare with published ones."""
    found = [*benchmark.caveats, *benchmark.departures()]
    items, expected = data["items"], benchmark.official_items()
    if data.get("unusable_items"):
        found.append(count_of(data["unusable_items"], "unusable item"))
    # A share and a limit are departures that the benchmark names itself; beside them the number of items means nothing.
    if benchmark.held_out_share is None and benchmark.limit is None and expected not in (None, items):
        found.append(
            f"{items} of {expected} items" if items < expected else f"{count_of(items, 'item')} instead of {expected}"
        )
    for reward, model in benchmark.official.scorers.items():
        # Several servers can have scored, each with its own revision: the first that is not the published model is
        # named.
        told = rewards.get(reward, {})
        revisions = map(str, told.get("revisions", [told["revision"]] if told else []))
        if other := next((revision for revision in revisions if not is_of(model, revision)), None):
            found.append(f"{reward} is scored by {other!r}, the published numbers by {model}")
    for name, column in columns.items():
        failed = sum(sum(codes.values()) for codes in column.failures().values())
        if column.resized:
            size = "{1} x {0}".format(*benchmark.official_size)
            found.append(f"{name}: {count_of(column.resized, 'image')} of another size than {size} pixels")
        if seen := column.about.get("trained_on"):
            found.append(f"{name}: its run trained on {seen} of {items} items")
        found += [f"{name}: {count_of(len(column.missing), 'missing image')}"] if column.missing else []
        found += [f"{name}: {count_of(failed, 'failed score')}"] if failed else []
    return found


_VERSION = r"(?:[-_]\d{4}-?\d\d-?\d\d(?:_\d{6}-[0-9a-f]{8})?)?"
"""A date after the name of a model, as OpenAI writes it, or mmdetection, with time and hash."""

_FILE = r"(?:\.(?:pth|pt|py|safetensors)|/snapshots/\w+)?/?"
"""End of the path of a model: of a file, or of a snapshot in the hub's cache."""


def is_of(model: str, revision: str) -> bool:
    """Whether a scorer's revision names a model, in any folder and any dated version; of several servers, whether each
    of their revisions does; of a judge, whether every name that its endpoint reported does. A revision that was cut may
    hide other names."""
    last = re.escape(model.rpartition("/")[2])
    named = re.compile(rf"(?:^|[\s/]|--){last}{_VERSION}{_FILE}(?=[\s,]|$)", re.IGNORECASE)
    servers = revision.split(" | ")
    return not any(map(is_cut, servers)) and all(named.search(one) for server in servers for one in _names(server))


def _names(revision: str) -> list[str]:
    """The names that the endpoint of a judge reported; else the whole revision, without its processor."""
    _, judged, served = revision.partition(" served as ")
    return served.split(", ") if judged else [revision.partition(" as ")[0]]


def _intervals(
    measured: _Measures, columns: Mapping[str, ResultColumn]
) -> tuple[dict[str, dict[str, list[float]]], dict[str, dict[str, list[float]]]]:
    """95 % intervals of the measures of each column, and of their differences between neighbouring columns as [value,
    low, high]: both bootstrapped over items; the differences over the images that both columns have, and each reward
    over those that it scored in both."""
    alone = {name: _flat(_by_key(column.rows), measured) for name, column in columns.items()}
    differences: dict[str, dict[str, list[float]]] = {}
    for a, b in pairwise(columns):
        # A measure is a function of a whole column, such as a share over tasks. Its difference is computed anew from
        # each sample of pairs, and not from the intervals of two columns, which share their items.
        items = _by_key(_pairs(columns[a].rows, columns[b].rows))

        def difference(pairs: Sequence[Pair]) -> dict[str, float]:
            before, after = (measured([pair[side] for pair in pairs]) for side in (0, 1))
            return {name: after[name] - before[name] for name in after if name in before}

        limits, values = _flat(items, difference), difference([pair for of in items.values() for pair in of])
        differences[f"{b} - {a}"] = {
            measure: [value, *limits[measure]] for measure, value in values.items() if measure in limits
        }
    return alone, differences


Pair = tuple[ImageRow, ImageRow]

Row = TypeVar("Row", ImageRow, Pair)


def _pairs(before: Sequence[ImageRow], after: Sequence[ImageRow]) -> list[Pair]:
    """The images that both columns have, each without the rewards that failed on either: a mean of other images would
    be no pair."""
    others = {(row.key, row.index, row.file): row for row in after}  # items may share a key
    both = [(row, others[at]) for row in before if (at := (row.key, row.index, row.file)) in others]
    return [(one.without(*(lost := _failed(one, other))), other.without(*lost)) for one, other in both]


def _failed(*rows: ImageRow) -> list[str]:
    """The rewards that failed on some of the rows."""
    return [
        name for name in {name: None for row in rows for name in row.outcomes} if not all(r.score(name) for r in rows)
    ]


def _by_key(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Images, or pairs of them, by the key of their item."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault((row[0] if isinstance(row, tuple) else row).key, []).append(row)
    return found


def _flat(
    items: Mapping[str, list[Row]], measure: Callable[[Sequence[Row]], dict[str, float]]
) -> dict[str, list[float]]:
    """Intervals of measures over resampled items."""
    of = list(items.values())

    def measured(drawn: NDArray[np.intp]) -> dict[str, float]:
        return measure([row for i in drawn for row in of[int(i)]])

    return {name: list(limits) for name, limits in bootstrap_intervals(len(of), measured).items()}


def benchmark_table(result: Mapping[str, Any]) -> str:
    """Measures by weights with their intervals, the differences, and published rows if they compare."""
    measures = result["measures"]
    names = list(dict.fromkeys(measure for values in measures.values() for measure in values))
    wide = max([24, *(len(name) + 2 for name in names)])
    head = f"{result['benchmark']['title']}".ljust(wide)
    columns = {name: _column(result, name, names) for name in measures}
    columns |= {f"{label} [95 %]": _gains(of, names) for label, of in result["differences"].items()}
    for title, cells in columns.items():
        width = max(len(title), *(len(cell) for cell in cells), 10) + 3
        head += title.rjust(width)
        columns[title] = [cell.rjust(width) for cell in cells]
    lines = [head, *(name.ljust(wide) + "".join(c[i] for c in columns.values()) for i, name in enumerate(names))]
    lines += [_distance(name, of) for name, of in result.get("distances", {}).items()]
    lines += [_count(name, told) for name, told in result["weights"].items()]
    return "\n".join(line.rstrip() for line in [*lines, *_published(result, names)])


def _column(result: Mapping[str, Any], weights: str, names: Sequence[str]) -> list[str]:
    values, limits = result["measures"][weights], result["intervals"][weights]
    return [
        "–"
        if name not in values
        else f"{values[name]:.4g}" + ("" if name not in limits else " [{:.4g}, {:.4g}]".format(*limits[name]))
        for name in names
    ]


def _gains(of: Mapping[str, Sequence[float]], names: Sequence[str]) -> list[str]:
    return ["{:+.4g} [{:+.4g}, {:+.4g}]".format(*of[name]) if name in of else "–" for name in names]


def _distance(column: str, distances: Mapping[str, Mapping[str, Any]]) -> str:
    parts: list[str] = []
    for name, told in distances.items():
        limits = "" if told["interval"] is None else " [{:.4g}, {:.4g}]".format(*told["interval"])
        few = " (too few images)" if "warning" in told else ""
        parts.append(
            f"{name} {told['value']:.4g}{limits}{few} by {told['extractor']}, {count_of(told['images'], 'image')}"
        )
    return f"{column}: {'; '.join(parts)}"


def _count(name: str, told: Mapping[str, Any]) -> str:
    failed = [f"{sum(codes.values())} x {reward}" for reward, codes in told["failures"].items()]
    missing = f", {told['missing']} missing" if told["missing"] else ""
    return f"{name}: {count_of(told['images'], 'image')}{missing}" + (
        f", failed scores: {', '.join(failed)}" if failed else ""
    )


def _published(result: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    published = result["published"]
    if not published["compares"]:
        return [f"not comparable with published numbers: {'; '.join(published['reasons'])}"]
    lines: list[str] = []
    for row in published["rows"]:
        numbers = [f"{name} {row['numbers'][name]:g}" for name in names if name in row["numbers"]]
        lines += [f"published, {row['model']}: {', '.join(numbers)} ({row['source']})"] if numbers else []
    return lines
