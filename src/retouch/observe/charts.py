"""The curves of a page: which there are, in which order, and their points.

A line may stand for several runs that differ only in their seed: then it is their mean, with a band from the lowest to
the highest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from retouch.observe.measures import SECTIONS, WHOLE, Meaning, meaning_of

Record = Mapping[str, Any]
ByKind = Mapping[str, Sequence[Record]]

MOST_POINTS = 4000
"""Points of a line: a longer line has the lowest and the highest of each bin, which looks the same on a screen."""

_WIDE = 20
"""Ratio of the highest to the lowest value from which a curve can have a logarithmic axis."""

_COUNTERS = ("step", "images", "epoch")


def charts_of(lines: Sequence[Sequence[ByKind]], rewards: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The curves of some lines in the order of the page.

    Args:
        lines: the runs of each line, by kind of their records.
        rewards: sections of all run files by name.
    """
    found: list[dict[str, Any]] = []
    for kind in ("eval", "rollout", "train"):
        for name in measures_of([record for runs in lines for run in runs for record in run.get(kind, ())]):
            section, meaning = meaning_of(kind, name, rewards)
            points = [_line([_points(run.get(kind, ()), name) for run in runs]) for runs in lines]
            if any(points):
                found.append({"key": f"{kind}/{name}", "section": section, **_chart(meaning, points)})
    gold = [f"eval/{name}" for name, entry in rewards.items() if entry.get("role") == "gold"]
    order = list(SECTIONS)

    def place(chart: Mapping[str, Any]) -> tuple[int, bool, bool]:
        key = chart["key"]
        return order.index(chart["section"]), key.partition(".")[0] not in gold, key.partition("/")[2] not in WHOLE

    return sorted(found, key=place)


def measures_of(records: Iterable[Record]) -> list[str]:
    """Names of the numbers in records, without counters."""
    return list(dict.fromkeys(n for r in records for n, v in r.items() if is_number(v) and n not in _COUNTERS))


def is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _chart(meaning: Meaning, lines: Sequence[dict[str, Any] | None]) -> dict[str, Any]:
    values = [value for line in lines if line for value in line["y"]]
    positive = [value for value in values if value > 0]
    wide = bool(positive) and min(values) >= 0 and max(positive) > _WIDE * min(positive)
    notes = {line.pop("note") for line in lines if line and "note" in line}
    return {
        "sentence": f"{meaning.sentence} {meaning.better.capitalize()} is better."
        if meaning.better
        else meaning.sentence,
        "log": meaning.log and wide,
        "wide": wide,
        "least": meaning.least,
        "note": " ".join(sorted(notes)),
        "lines": lines,
    }


def _points(records: Sequence[Record], name: str) -> dict[int, float]:
    """Step -> value, the last one of a step."""
    values = {record["step"]: float(record[name]) for record in records if is_number(record.get(name))}
    return {step: value for step, value in sorted(values.items()) if math.isfinite(value)}


def _line(runs: Sequence[Mapping[int, float]]) -> dict[str, Any] | None:
    """The points of a line; with several runs, of the steps that all of them have reached, and a note on the others."""
    count, runs = len(runs), [run for run in runs if run]
    if not runs:
        return None
    steps = [step for step in runs[0] if all(step in run for run in runs)]
    if count == 1:
        return _thinned({"x": steps, "y": [_short(runs[0][step]) for step in steps]})
    values = [[run[step] for run in runs] for step in steps]
    return _thinned(
        {
            "x": steps,
            "y": [_short(sum(of) / len(of)) for of in values],
            "low": [_short(min(of)) for of in values],
            "high": [_short(max(of)) for of in values],
        }
        | _of_fewer(runs, steps, count)
    )


def _of_fewer(runs: Sequence[Mapping[int, float]], steps: Sequence[int], count: int) -> dict[str, str]:
    """A note where a mean over seeds leaves some of them or some of their steps out."""
    if len(runs) == count and all(len(run) == len(steps) for run in runs):
        return {}
    reached = f"steps {steps[0]} to {steps[-1]}" if steps else "no common step"
    return {"note": f"A mean over seeds is of {len(runs)} of {count}, and of {reached}, which all of them have."}


def _thinned(line: dict[str, Any]) -> dict[str, Any]:
    """At most `MOST_POINTS` points: the lowest and the highest of each bin, of a band too, at their own steps.
    With `thinned`, page.js does not smooth them: a mean of extremes is not that of the values."""
    count = len(line["x"])
    if count <= MOST_POINTS:
        return line
    extremes = [(min, "y"), (max, "y"), *([(min, "low"), (max, "high")] if "low" in line else [])]
    size = -(-count // (MOST_POINTS // len(extremes)))
    kept = {0, count - 1}
    for start in range(0, count, size):
        bin_ = range(start, min(start + size, count))
        kept |= {extreme(bin_, key=line[name].__getitem__) for extreme, name in extremes}
    thin = {name: [line[name][at] for at in sorted(kept)] for name in ("x", "y", "low", "high") if name in line}
    notes = [line["note"]] if "note" in line else []
    shown = " ".join([*notes, f"The lowest and the highest of every {size} steps are shown."])
    return thin | {"thinned": True, "note": shown}


def _short(value: float) -> float:
    """Six digits are more than a screen shows."""
    return float(f"{value:.6g}")
