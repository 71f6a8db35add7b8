"""compare.html: several runs in one offline file.

Evaluations come from the run directories, or were made for the comparison (`Sampled`). Differences from the first run
are paired by example and index; they are omitted for runs with different evaluation examples, and for a reward that the
runs define differently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from retouch.config.parts import completed, model_of
from retouch.errors import ConfigError
from retouch.files.disk import write_whole
from retouch.observe.grids import grid
from retouch.observe.html import (
    LINE_COLOURS,
    document,
    escape,
    image_tag,
    marked,
    section,
    table,
    verdict,
)
from retouch.observe.report import (
    Record,
    change_of,
    curves,
    evaluation_table,
    judgement,
    records_by_kind,
    rows_of,
    subtitle,
)
from retouch.observe.run_dir import read_config, read_metrics, reading_records
from retouch.rewards.base import UNSCORED
from retouch.rewards.judge import with_judge

_GRID_EXAMPLES = 8

_HOW_READ = (
    "resolution",
    "fit",
    "reference",
    "reference_strip",
    "prompt_template",
    "target",
    "max_bad_items",
    "curriculum",
)
"""Keys of a data section that do not change which examples it has."""

_OF_ITS_OWN = ("name", "resume", "logging")
"""Keys that the table of differences leaves out."""


@dataclass(frozen=True)
class RunRecord:
    """The content of a run directory."""

    name: str
    path: Path
    config: Record
    by_kind: dict[str, list[Record]]

    @property
    def rewards(self) -> Record:
        """With what they have from the section `judge`; as they are stored if only a plug-in's rewards take it, whose
        module is not imported here."""
        with suppress(ValueError):
            return with_judge(self.config).get("rewards") or {}
        return self.config.get("rewards") or {}

    @property
    def evaluation_data(self) -> Record:
        """Falls back to the training data, as the run does."""
        return self.config["evaluation"].get("data") or self.config["data"]


@dataclass(frozen=True)
class Column:
    """An evaluation: its title, means by measure, and the measures of each image."""

    title: str
    means: Record
    rows: Sequence[Record]


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


def write_comparison(runs: Mapping[str, Path], out: Path, sampled: Sampled | None = None) -> Comparison:
    """Write `out`.

    Args:
        runs: run directories by name; see `run_names`.
        sampled: evaluations to show instead of the last one of each run.

    Raises:
        ConfigError: files that are not of a run.
    """
    with reading_records(", ".join(map(str, runs.values()))):
        return _write(runs, out, sampled)


def _write(runs: Mapping[str, Path], out: Path, sampled: Sampled | None) -> Comparison:
    records = [_read(name, path) for name, path in runs.items()]
    columns = sampled.columns if sampled else {r.name: _last_evaluation(r) for r in records if r.by_kind["eval"]}
    conflicts = {} if sampled else {**sampling_conflicts(records), **example_conflicts(records)}
    paired = [record for record in records if record.name in columns and record.name not in conflicts]
    paired = paired if records[0] in paired else []
    unevaluated = [f"{record.name} has no evaluation yet" for record in records if not record.by_kind["eval"]]
    problems = [] if sampled else [*conflicts.values(), *reward_conflicts(records), *unevaluated]
    left_out = {run.name: set() if sampled else set(_scored_differently(records[0], run)) for run in records}
    verdicts = _verdicts(paired, columns, left_out)
    body = (
        _legend(records),
        *(verdict(text) for text in (*problems, *verdicts)),
        _table(paired, columns, left_out),
        _images(paired, sampled),
        curves([record.by_kind for record in records]),
        _differences(records),
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, document(" · ".join(runs), body))
    return Comparison(out, verdicts, problems)


def example_conflicts(runs: Sequence[RunRecord]) -> dict[str, str]:
    """Runs with other evaluation examples than the first, each with a sentence."""
    first = runs[0]
    found: dict[str, str] = {}
    for run in runs[1:]:
        keys = [k for k in differing(first.evaluation_data, run.evaluation_data) if k.split(".")[0] not in _HOW_READ]
        shown = ", ".join(f"{k} {_at(first.evaluation_data, k)} and {_at(run.evaluation_data, k)}" for k in keys)
        if not keys and _texts_differ(first, run):
            shown = "the same data section, but other texts: the data have changed between the runs"
        if shown:
            found[run.name] = (
                f"evaluation.data: {first.name} and {run.name} evaluate on different examples ({shown}): their "
                f"values are not paired; run `retouch eval --run {first.path} --run {run.path} --data DATA` to sample "
                "both on the same examples"
            )
    return found


def sampling_conflicts(runs: Sequence[RunRecord]) -> dict[str, str]:
    """Runs whose evaluations were sampled with other settings than the first's, each with a sentence."""
    first = runs[0]
    found: dict[str, str] = {}
    for run in runs[1:]:
        keys = {**sampling_differences(first.config, run.config), **_other_weights(first.config, run.config)}
        shown = ", ".join(f"{key} {one} and {other}" for key, (one, other) in keys.items())
        if shown:
            found[run.name] = (
                f"evaluation: {first.name} and {run.name} were sampled with different settings ({shown}): their values "
                f"are not paired; run `retouch eval --run {first.path} --run {run.path}` to sample both with those of "
                f"{first.name}"
            )
    return found


def sampling_differences(one: Record, other: Record) -> dict[str, tuple[Any, Any]]:
    """Settings that change the images of an evaluation whatever the weights are, with the values of two run files: a
    difference in quality would be theirs. Scales of guidance of two families are not compared."""
    flat, also = _sampling(one), _sampling(other)
    if one["model"]["family"] != other["model"]["family"]:
        del flat["rollout.guidance_scale"]
    return {key: (value, also[key]) for key, value in flat.items() if value != also[key]}


def _other_weights(one: Record, other: Record) -> dict[str, tuple[Any, Any]]:
    """The key of the evaluated weights, where both runs have EMA weights and one evaluates its raw ones."""
    kinds = ["raw" if run["evaluation"].get("weights") == "raw" else "ema" for run in (one, other)]
    both = bool(one.get("ema") and other.get("ema"))
    return {"evaluation.weights": (kinds[0], kinds[1])} if both and kinds[0] != kinds[1] else {}


def _sampling(config: Record) -> Record:
    """Settings by key, as they apply: with the model's own scale of guidance where none is given."""
    evaluation, rollout = config["evaluation"], config["rollout"]
    data = evaluation.get("data") or config["data"]
    size, guidance = data.get("resolution"), rollout.get("guidance_scale")
    if guidance is None:
        with suppress(ConfigError):  # a family that is not known here
            guidance = model_of(config, "").guidance_scale
    return {
        "num_steps": evaluation.get("num_steps") or rollout.get("num_steps"),
        "rollout.guidance_scale": guidance,
        "resolution": [size, size] if isinstance(size, int) else size,
        "fit": data.get("fit"),
    }


def reward_conflicts(runs: Sequence[RunRecord]) -> list[str]:
    """One sentence for each reward of one name that two runs define differently."""
    first = runs[0]
    return [
        f"rewards.{name}: {first.name} and {run.name} define it differently ({', '.join(keys)}); its scores "
        "are not compared"
        for run in runs[1:]
        for name, keys in _scored_differently(first, run).items()
    ]


def scoring_differences(one: Record, other: Record) -> list[str]:
    """Keys by which two rewards of one name score differently."""
    return [key for key in differing(one, other) if key.split(".")[0] not in UNSCORED]


def differing(one: Record, other: Record) -> list[str]:
    """Dotted keys whose values differ, or that are missing in one of the two."""
    flat, also = _flat(one), _flat(other)
    return [key for key in dict.fromkeys([*flat, *also]) if flat.get(key) != also.get(key)]


def _read(name: str, path: Path) -> RunRecord:
    config = completed(read_config(path))  # with defaults for keys of newer versions
    return RunRecord(name, path, config, records_by_kind(read_metrics(path / "metrics.jsonl")))


def _last_evaluation(run: RunRecord) -> Column:
    last = run.by_kind["eval"][-1]
    title = f"{run.name} (step {last['step']}, {last['images']} images)"
    return Column(title, last, rows_of(run.path, last))


def _texts_differ(one: RunRecord, other: RunRecord) -> bool:
    """Whether examples of one id have different texts in the last evaluations."""
    if not (one.by_kind["eval"] and other.by_kind["eval"]):
        return False
    texts = {row["example"]: row.get("text") for row in _last_evaluation(one).rows}
    return any(texts.get(row["example"], row.get("text")) != row.get("text") for row in _last_evaluation(other).rows)


def _scored_differently(one: RunRecord, other: RunRecord) -> dict[str, list[str]]:
    common = [name for name in one.rewards if name in other.rewards]
    keys = {name: scoring_differences(one.rewards[name], other.rewards[name]) for name in common}
    return {name: differing for name, differing in keys.items() if differing}


def _legend(runs: Sequence[RunRecord]) -> str:
    return "".join(
        f"<p>{marked(LINE_COLOURS[i % len(LINE_COLOURS)], '')}<b>{escape(run.name)}</b> "
        f"<span class=dim>{escape(subtitle(run.config, run.by_kind))}</span></p>"
        for i, run in enumerate(runs)
    )


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


def _table(paired: Sequence[RunRecord], columns: Mapping[str, Column], left_out: Mapping[str, set[str]]) -> str:
    """Means of all evaluations, and differences of the paired runs."""

    def change(measure: str, run: str) -> tuple[float, float, float] | None:
        compared = measure.partition(".")[0] not in left_out[run]
        return change_of(columns[paired[0].name].rows, columns[run].rows, measure) if compared else None

    changes = {f"{run.name} − {paired[0].name}": partial(change, run=run.name) for run in paired[1:]}
    means = {column.title: column.means for column in columns.values()}
    return evaluation_table(means, changes, "differences are paired, over the images that both runs have.")


def _images(paired: Sequence[RunRecord], sampled: Sampled | None) -> str:
    if sampled:
        return section("Samples", image_tag("samples", sampled.grid))
    kept = {run.name: _kept_images(run) for run in paired}
    common = [key for key in next(iter(kept.values()), {}) if all(key in images for images in kept.values())]
    if not common:
        return ""
    rows = [[images[key] for images in kept.values()] for key in common[:_GRID_EXAMPLES]]
    note = "Last evaluations, the same examples and seeds. Under each image: the target text and the text OCR read."
    return section("Samples", image_tag("samples", grid(rows, list(kept))), note)


def _kept_images(run: RunRecord) -> dict[tuple[int, int], tuple[Image.Image, str]]:
    """Kept images of the last evaluation by example and index, with the target text and the OCR text."""
    last = run.by_kind["eval"][-1]
    files = sorted((run.path / "evaluations" / f"step-{last['step']:06d}").glob("*.png"))
    found: dict[tuple[int, int], tuple[Image.Image, str]] = {}
    for row, file in zip(rows_of(run.path, last), files, strict=False):  # the first so many are kept
        with Image.open(file, formats=("PNG",)) as image:
            label = ": ".join(str(row[name]) for name in ("text", "read") if row.get(name) is not None)
            found[row["example"], row["index"]] = image.convert("RGB"), label
    return found


def _differences(runs: Sequence[RunRecord]) -> str:
    """Keys whose values differ between the run files."""
    configs = [{k: v for k, v in run.config.items() if k not in _OF_ITS_OWN} for run in runs]
    keys = dict.fromkeys(key for config in configs[1:] for key in differing(configs[0], config))
    if not keys:
        return section("Run files", "<p>They are the same.</p>")
    lines = ([key, *(_at(config, key) for config in configs)] for key in keys)
    return section("Run files: keys that differ", table(["", *(run.name for run in runs)], lines))


def _flat(node: Any, key: str = "") -> Record:
    if not isinstance(node, dict):
        return {key: node}
    return {
        k: v for name, child in node.items() for k, v in _flat(child, f"{key}.{name}" if key else str(name)).items()
    }


def _at(config: Record, key: str) -> Any:
    return _flat(config).get(key, "–")
