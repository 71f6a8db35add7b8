"""The runs of a comparison as their directories hold them, and the sentences on what two of them cannot be compared by:
other examples, other settings of sampling, other definitions of a reward."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from retouch.observe.report import Record
from retouch.observe.run_dir import rows_of
from retouch.observe.settings import alike, by_dotted_key, differing, sampling_differences, scoring_differences
from retouch.process.plain_text import count_of
from retouch.rewards.judge import with_judge

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


@dataclass(frozen=True)
class RunRecord:
    """The content of a run directory."""

    name: str
    path: Path
    config: Record
    by_kind: dict[str, list[Record]]

    @cached_property
    def evaluations(self) -> list[Record]:
        """The records of those that were made by the run file of today."""
        return alike(self.path, self.by_kind["eval"])

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


def example_conflicts(runs: Sequence[RunRecord]) -> dict[str, str]:
    """Runs with other evaluation examples than the first, each with a sentence."""
    first = runs[0]
    found: dict[str, str] = {}
    for run in runs[1:]:
        keys = [k for k in differing(first.evaluation_data, run.evaluation_data) if k.split(".")[0] not in _HOW_READ]
        shown = ", ".join(
            f"{k} {value_at(first.evaluation_data, k)} and {value_at(run.evaluation_data, k)}" for k in keys
        )
        if not keys and (other := _other_examples(first, run)):
            shown = f"the same data section, but {other}: the data have changed between the runs"
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


def _other_weights(one: Record, other: Record) -> dict[str, tuple[Any, Any]]:
    """The key of the evaluated weights, where both runs have EMA weights and one evaluates its raw ones."""
    kinds = ["raw" if run["evaluation"].get("weights") == "raw" else "ema" for run in (one, other)]
    both = bool(one.get("ema") and other.get("ema"))
    return {"evaluation.weights": (kinds[0], kinds[1])} if both and kinds[0] != kinds[1] else {}


def reward_conflicts(runs: Sequence[RunRecord]) -> list[str]:
    """One sentence for each reward of one name that two runs define differently."""
    first = runs[0]
    return [
        f"rewards.{name}: {first.name} and {run.name} define it differently ({', '.join(keys)}); its scores "
        "are not compared"
        for run in runs[1:]
        for name, keys in scored_differently(first, run).items()
    ]


def last_evaluation(run: RunRecord) -> Column:
    last = run.evaluations[-1]
    title = f"{run.name} (step {last['step']}, {count_of(last['images'], 'image')})"
    return Column(title, last, rows_of(run.path, last))


def _other_examples(one: RunRecord, other: RunRecord) -> str:
    """By what the last evaluations have other examples: other ids, or other texts of the same ids; "" if by neither."""
    if not (one.evaluations and other.evaluations):
        return ""
    texts, others = ({row["example"]: row.get("text") for row in last_evaluation(run).rows} for run in (one, other))
    if texts and others and texts.keys().isdisjoint(others):
        return "no example in common"
    return "other texts" if any(texts.get(example, text) != text for example, text in others.items()) else ""


def scored_differently(one: RunRecord, other: RunRecord) -> dict[str, list[str]]:
    common = [name for name in one.rewards if name in other.rewards]
    keys = {name: scoring_differences(one.rewards[name], other.rewards[name]) for name in common}
    return {name: differing for name, differing in keys.items() if differing}


def value_at(config: Record, key: str) -> Any:
    return by_dotted_key(config).get(key, "–")
