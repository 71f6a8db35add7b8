"""The end of a run as it is printed: what it gained, where its report is, and what to type next."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from retouch.adapters import FORMATS_OF
from retouch.config import RunConfig
from retouch.observe.measures import DRIFT, judged
from retouch.observe.report import paired_values
from retouch.observe.run_dir import read_metrics, rows_of
from retouch.observe.settings import alike
from retouch.observe.statistics import mean_of_each, paired_difference
from retouch.process.plain_text import count_of

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Gain:
    """A measure of the first evaluation (after a warm-up: of the one behind it) and of the last one, over the images
    that both measured.

    Attributes:
        low, high: limits of the 95 % interval of the mean difference; None of a single example.
    """

    before: float
    after: float
    mean: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        interval = "one example" if self.low is None else f"95 % interval [{self.low:+.3f}, {self.high:+.3f}]"
        return f"{self.mean:+.3f} ({interval}), from {self.before:.3f} to {self.after:.3f}"


@dataclass(frozen=True)
class Ending:
    """The end of a run.

    Attributes:
        steps: of the two evaluations that are compared; () if there are not two.
        held_out: whether none of their images is trained on.
        gains: measure -> its gain.
        report: None if it could not be written.
        next_commands: to look at samples, and to use the weights elsewhere.
    """

    run: str
    steps: tuple[int, ...]
    held_out: bool
    images: int
    gains: Mapping[str, Gain]
    report: str | None
    next_commands: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """The end as lines of text, without the run itself."""
        kind = "held-out" if self.held_out else "training"
        lines = [f"gain: {m} {gain}{' (less is better)' * (m == DRIFT)}" for m, gain in self.gains.items()]
        if lines:
            lines[-1] += f"; {count_of(self.images, f'{kind} image')}, step {self.steps[0]} to {self.steps[1]}"
        if self.report is not None:
            lines.append(f"report: {self.report}")
        return [*lines, *(f"next: {command}" for command in self.next_commands)]


def ending(config: RunConfig, run: Path) -> Ending:
    """The end of a run, by the files that it left.

    Raises:
        ConfigError: files that are not of a run.
    """
    evaluations = [record for record in read_metrics(run / "metrics.jsonl") if record["kind"] == "eval"]
    report = run / "report.html"
    compared = _compared(alike(run, evaluations))
    rows = [rows_of(run, one) for one in compared]
    last = compared[-1] if compared else {}
    return Ending(
        str(run),
        tuple(one["step"] for one in compared),
        last.get("examples") == "held_out",
        last.get("images", 0),
        gains_at_end(rows[0], rows[1], judged(config.rewards)) if compared else {},
        str(report) if report.is_file() else None,
        next_commands(config, run),
    )


def _compared(evaluations: Sequence[Record]) -> list[Record]:
    """The last evaluation that training began from, and the last one; none where these are one."""
    first = [one for one in evaluations if one.get("moment") in ("start", "warmup")]
    return [first[-1], evaluations[-1]] if first and first[-1]["step"] < evaluations[-1]["step"] else []


def gains_at_end(before: Sequence[Record], after: Sequence[Record], measures: Sequence[str]) -> dict[str, Gain]:
    """The gains of measures between the rows of two evaluations, in which every example counts the same; without those
    that they share no image of."""
    found = dict[str, Gain]()
    for measure in measures:
        examples, new, old = paired_values(before, after, measure)
        if not examples:
            continue
        mean, low, high = paired_difference(new, old, examples)
        limits = (low, high) if len({*examples}) > 1 else (None, None)
        ends = [float(mean_of_each(np.asarray(values, np.float64), examples).mean()) for values in (old, new)]
        found[measure] = Gain(ends[0], ends[1], mean, *limits)
    return found


def next_commands(config: RunConfig, run: Path) -> tuple[str, ...]:
    """The two commands that follow a run, as a shell takes them."""
    where = shlex.quote(str(run))
    look = f"retouch eval --run {where} --out {shlex.quote(str(run / 'comparison'))}"
    if config.algorithm.trains_text_encoder:  # its weights are a folder of transformers or PEFT already
        data = shlex.quote((config.evaluation.data or config.data).path)
        return look, f"retouch sample --run {where} --data {data} --out {shlex.quote(str(run / 'samples'))}"
    return look, f"retouch export {where} --to {FORMATS_OF[config.model.train.kind][0]}"
