"""compare.html: several runs in one offline file, with the parts of the page about one run.

Runs that differ in their seed alone are one line of the curves. Evaluations come from the run directories, or were made
for the comparison (`Sampled`). Differences from the first run are paired by example and index; they are omitted for
runs with different evaluation examples, and for a reward that the runs define differently.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from PIL import Image

from retouch.config.parts import completed
from retouch.errors import ConfigError
from retouch.files.disk import write_whole, writing
from retouch.observe.charts import charts_of, is_number, measures_of
from retouch.observe.conflicts import (
    Column,
    RunRecord,
    example_conflicts,
    last_evaluation,
    reward_conflicts,
    sampling_conflicts,
    scored_differently,
    value_at,
)
from retouch.observe.gallery import Gallery, Stored, gallery, image_inside, linked_away, stored_of
from retouch.observe.measures import SECTIONS
from retouch.observe.page import Block, Markup, Page, PageTable, document, part, table
from retouch.observe.report import (
    TONES,
    Record,
    Verdict,
    change_of,
    evaluation_table,
    judgement,
    records_by_kind,
    subtitle,
)
from retouch.observe.run_dir import read_config, read_metrics, reading_records, require_own
from retouch.observe.settings import by_dotted_key, differing

_OF_ITS_OWN = ("name", "resume", "logging")
"""Keys that the table of differences leaves out."""

_MOST_VERDICTS = 4

_MOST_LABELS = 3
"""Keys by whose values a group of runs is called; one with more has the name of its first run."""


@dataclass(frozen=True)
class Sampled:
    """Evaluations of several runs on common examples.

    Attributes:
        columns: by name; the base, if it is one of them, comes first.
        grid: examples side by side.
    """

    columns: Mapping[str, Column]
    grid: Image.Image


@dataclass(frozen=True)
class Comparison:
    """The file, one sentence on each run after the first, and sentences on what could not be compared."""

    path: Path
    verdicts: list[str]
    problems: list[str]


BASE = "base"
"""Name of the untrained weights in comparisons."""


def run_names(paths: Sequence[Path]) -> dict[str, Path]:
    """Runs by the name of their directory, or by their path if two have the same name.

    Raises:
        ConfigError: fewer than two runs, a run given twice, or no run directory.
    """
    if len(paths) < 2:
        raise ConfigError(f"RUN: given {len(paths)}; a comparison needs two or more run directories")
    for path in paths:
        if not (path / "config.yaml").is_file():
            raise ConfigError(
                f"{path} is not a run directory (no config.yaml); give a folder that `retouch train` wrote"
            )
    if len({path.resolve() for path in paths}) < len(paths):
        raise ConfigError("RUN: given a run directory twice; name different ones")
    names = [path.resolve().name for path in paths]
    unique = len(set(names)) == len(names) and BASE not in names
    return dict(zip(names if unique else map(str, paths), paths, strict=True))


def write_comparison(
    runs: Mapping[str, Path], out: Path, sampled: Sampled | None = None, *, single_file: bool = False
) -> Comparison:
    """Write `out`.

    Args:
        runs: run directories by name; see `run_names`.
        sampled: evaluations to show instead of the last one of each run.
        single_file: keep images inside the file, however large it gets.

    Raises:
        ConfigError: files that are not of a run.
    """
    with reading_records(", ".join(map(str, runs.values()))):
        return _write(runs, out, sampled, True if single_file else None)


def _write(runs: Mapping[str, Path], out: Path, sampled: Sampled | None, inside: bool | None) -> Comparison:
    records = [_read(name, path) for name, path in runs.items()]
    columns = sampled.columns if sampled else {r.name: last_evaluation(r) for r in records if r.evaluations}
    conflicts = {} if sampled else {**sampling_conflicts(records), **example_conflicts(records)}
    paired = [record for record in records if record.name in columns and record.name not in conflicts]
    paired = paired if records[0] in paired else []
    unevaluated = [f"{record.name} has {_no_evaluation(record)}" for record in records if not record.evaluations]
    problems = [] if sampled else [*conflicts.values(), *reward_conflicts(records), *unevaluated]
    left_out = {run.name: set() if sampled else set(scored_differently(records[0], run)) for run in records}
    notes = Markup("".join(part("verdict", Verdict("Note:", one, "warning")) for one in problems))
    verdicts = _verdicts(paired, columns, left_out)
    groups = groups_of(records)
    rewards = {name: entry for record in records for name, entry in record.rewards.items()}
    # of the last evaluations that are paired, a column for each run
    shown = [Stored(run.name, one.rows, one.files) for run in paired for one in _last_stored(run)]
    images = Gallery({"items": []}, [], False) if sampled else gallery(shown, out, side_by_side=True, inside=inside)
    page = Page(
        " · ".join(runs) if len(runs) < 4 else f"{len(runs)} runs",
        [
            Block("html", "runs", _runs(groups)),
            Block("html", "problems", notes),
            Block("html", "verdicts", _shown(verdicts)),
            Block("tools"),
            *(Block("charts", key, title=SECTIONS[key]) for key in ("reward", "measures")),
            Block("html", "evaluation", Markup(_over_seeds(groups, columns) + _table(paired, columns, left_out))),
            Block("html", "samples", _samples(records, images, sampled, conflicts)),
            Block("gallery"),
            *(Block("charts", key, title=SECTIONS[key]) for key in ("loss", "ratio", "kl", "gradient")),
            Block("charts", "rest", title=SECTIONS["rest"], folded=True),
            Block("html", "differences", _differences(records)),
        ],
        {
            "lines": [
                {"name": g.title, "letter": g.letter, "about": ", ".join(r.name for r in g.runs)} for g in groups
            ],
            "charts": charts_of([[run.by_kind for run in group.runs] for group in groups], rewards),
            "gallery": images.data,
        },
        images.images,
        images.beside,
    )
    with writing(out.parent, "--out"):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, document(page))
    return Comparison(out, verdicts, problems)


@dataclass(frozen=True)
class Group:
    """Runs whose files differ in `seed` alone: one line of the curves.

    Attributes:
        letter: by which the legend, the curves and the table of runs refer to it.
    """

    letter: str
    title: str
    runs: Sequence[RunRecord]


def groups_of(runs: Sequence[RunRecord]) -> list[Group]:
    """Groups of runs whose files are equal except for the seed, in the order of the first run of each."""
    found: list[list[RunRecord]] = []
    for run in runs:
        same = next((group for group in found if _but_seed(group[0].config) == _but_seed(run.config)), None)
        found.append([run]) if same is None else same.append(run)
    flat = [by_dotted_key(_but_seed(group[0].config)) for group in found]
    keys = [
        key for key in dict.fromkeys(key for one in flat for key in one) if len({str(f.get(key)) for f in flat}) > 1
    ]
    return [
        Group(string.ascii_uppercase[at % 26], _title(group, {key: flat[at].get(key, "–") for key in keys}), group)
        for at, group in enumerate(found)
    ]


def _but_seed(config: Record) -> Record:
    return {key: value for key, value in config.items() if key not in (*_OF_ITS_OWN, "seed")}


def _title(runs: Sequence[RunRecord], values: Record) -> str:
    """The name of a run, or for several the values that other groups do not have."""
    if len(runs) == 1:
        return runs[0].name
    named = values and len(values) <= _MOST_LABELS
    what = ", ".join(f"{key} {value}" for key, value in values.items()) if named else f"as {runs[0].name}"
    return f"{what} ({len(runs)} seeds)"


def _read(name: str, path: Path) -> RunRecord:
    require_own(path)
    config = completed(read_config(path))  # with defaults for keys of newer versions
    return RunRecord(name, path, config, records_by_kind(read_metrics(path / "metrics.jsonl")))


def _runs(groups: Sequence[Group]) -> Markup:
    """A table of the runs, with the line of each."""
    lines = [
        (part("square", at % 8, group.letter), run.name, subtitle(run.config, run.by_kind))
        for at, group in enumerate(groups)
        for run in group.runs
    ]
    several = any(len(group.runs) > 1 for group in groups)
    note = "A line of several seeds is their mean; its band reaches from the lowest to the highest." if several else ""
    return part("section", "Runs", note, table(PageTable("runs", ["line", "run", "what it is"], lines, text=True)))


def _over_seeds(groups: Sequence[Group], columns: Mapping[str, Column]) -> Markup:
    """Means of the evaluations over the runs of each line, with the lowest and the highest of them."""
    if all(len(group.runs) == 1 for group in groups):
        return Markup()
    evaluated = [{run.name: columns[run.name].means for run in group.runs if run.name in columns} for group in groups]
    ends = [max((one.get("step", 0) for one in of.values()), default=0) for of in evaluated]
    early = [name for of, end in zip(evaluated, ends, strict=True) for name, one in of.items() if _early(one, end)]
    means = [[one for name, one in of.items() if name not in early] for of in evaluated]
    lines: list[list[object]] = []
    for measure in measures_of([one for group in means for one in group]):
        found = [[one[measure] for one in group if is_number(one.get(measure))] for group in means]
        lines.append(
            [measure, *(f"{sum(of) / len(of):.4f} [{min(of):.4f}, {max(of):.4f}]" if of else "–" for of in found)]
        )
    head = ["", *(f"{group.letter} {group.title}" for group in groups)]
    note = "Mean over the seeds of a line [lowest, highest seed], of their last evaluations"
    note += f", of step {', '.join(map(str, dict.fromkeys(ends)))}." if any(ends) else "."
    note += f" Left out, whose last evaluation is of an earlier step: {', '.join(early)}." if early else ""
    return part("section", "Evaluation over seeds", note, table(PageTable("over-seeds", head, lines)))


def _early(evaluation: Record, end: int) -> bool:
    """Whether it is of an earlier step than the last one of a line: a run that has not come as far as its other seeds
    would pull their mean towards the base. Those made for the comparison have no step."""
    return evaluation.get("step", end) < end


def _shown(verdicts: Sequence[str]) -> Markup:
    """Verdicts in the colours of their words, with the measure that decided; many of them are folded."""
    lines = Markup()
    for text in verdicts:
        runs, _, rest = text.partition(": ")
        word, _, details = rest.partition("; ")
        lines += part("verdict", Verdict(f"{runs}: {word}", details.partition("; ")[0], word * (word in TONES)))
    if len(verdicts) <= _MOST_VERDICTS:
        return Markup(lines)
    return part("folded", f"{len(verdicts)} verdicts, each run against the first", "", Markup(lines))


def _verdicts(
    paired: Sequence[RunRecord], columns: Mapping[str, Column], left_out: Mapping[str, set[str]]
) -> list[str]:
    """Whether each paired run is better than the first."""
    rewards = list(dict.fromkeys(name for run in paired for name in run.rewards))
    verdicts: list[str] = []
    for run in paired[1:]:
        first, column = columns[paired[0].name], columns[run.name]
        means = {m: v for m, v in column.means.items() if m.partition(".")[0] not in left_out[run.name]}
        word, parts = judgement(first.means, means, first.rows, column.rows, rewards)
        verdicts.append(f"{run.name} against {paired[0].name}: {word}; {'; '.join(parts)}")
    return verdicts


def _table(paired: Sequence[RunRecord], columns: Mapping[str, Column], left_out: Mapping[str, set[str]]) -> Markup:
    """Means of all evaluations, and differences of the paired runs."""

    def change(measure: str, run: str) -> tuple[float, float, float] | None:
        compared = measure.partition(".")[0] not in left_out[run]
        return change_of(columns[paired[0].name].rows, columns[run].rows, measure) if compared else None

    changes = {f"{run.name} − {paired[0].name}": partial(change, run=run.name) for run in paired[1:]}
    means = {column.title: column.means for column in columns.values()}
    return evaluation_table(means, changes, "differences are paired, over the images that both runs have.")


def _last_stored(run: RunRecord) -> list[Stored]:
    return stored_of(run.path, [one["step"] for one in run.evaluations[-1:]])


def _samples(
    runs: Sequence[RunRecord], images: Gallery, sampled: Sampled | None, conflicts: Mapping[str, str]
) -> Markup:
    """The grid of samples that were made for the page, or a sentence for each run whose samples are not in it."""
    if sampled:
        return part("section", "Samples", "", part("image", "samples", image_inside(sampled.grid)))
    shown = {variant["label"] for variant in images.data["variants"]}
    missing = {run.name: _why_no_samples(run, runs[0], conflicts) for run in runs if run.name not in shown}
    lines = Markup("".join(part("line", f"No samples of {name}: {why}.") for name, why in missing.items()))
    return part("section", "Samples that are missing", "", lines)


def _why_no_samples(run: RunRecord, first: RunRecord, conflicts: Mapping[str, str]) -> str:
    if not run.evaluations:
        return f"it has {_no_evaluation(run)}"
    if not _last_stored(run):
        return linked_away(run.path) or "its last evaluation kept no images; set evaluation.grid_examples"
    if run.name in conflicts:
        return f"they are not of the examples and settings of {first.name}"
    return f"{first.name}, with which they would be paired, has none"


def _no_evaluation(run: RunRecord) -> str:
    return "no evaluation with the settings of its run file yet" if run.by_kind["eval"] else "no evaluation yet"


def _differences(runs: Sequence[RunRecord]) -> Markup:
    """Keys whose values differ between the run files."""
    configs = [{k: v for k, v in run.config.items() if k not in _OF_ITS_OWN} for run in runs]
    keys = dict.fromkeys(key for config in configs[1:] for key in differing(configs[0], config))
    if not keys:
        return part("section", "Run files", "", part("line", "They are the same."))
    lines = [[key, *(value_at(config, key) for config in configs)] for key in keys]
    shown = table(PageTable("run-files", ["", *(run.name for run in runs)], lines))
    return part("section", "Run files: keys that differ", "", shown)
