"""Files of earlier attempts in a run directory: moved away, dropped or kept when a run starts again or resumes."""

from __future__ import annotations

import errno
import itertools
import logging
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from retouch.config import yaml12
from retouch.files.complete import complete_checkpoints

logger = logging.getLogger(__name__)

Records = Sequence[Mapping[str, Any]]
"""Records of a metrics.jsonl."""

OF_AN_ATTEMPT = ("images", "evaluations", "tensorboard", "wandb", "run_id", "metrics.jsonl")
"""Files that are moved to a folder of their own when a run starts again; the last one marks a directory as a run."""

_BY_STEP = ("evaluations", "images", "checkpoints")
"""Folders with a folder `step-000040` for each step; the last one shows that a run has later steps."""

_STEP = re.compile(r"(?:\.replaced-)?step-(\d+)")


def warn_of_lost_records(metrics: Path, records: Records, step: int) -> None:
    """Warn where metrics.jsonl has no record of optimizer steps before a checkpoint, which needs none of them. A run
    that was begun from another run's checkpoint has those after it: they begin with its first record."""
    taken = {record["step"] for record in records if record["kind"] == "train"}
    first = min((record["step"] + (record["kind"] != "train") for record in records), default=1)
    lost = sum(number not in taken for number in range(first, step + 1))
    if lost:
        logger.warning(
            "%s: damaged: %d of the %d optimizer steps before the checkpoint are missing in it, in curves and in "
            "reports; training is not affected",
            metrics,
            lost,
            step,
        )


def finished_at(records: Records, step: int) -> bool:
    """Whether a run finished at this step."""
    return any((record["step"], record.get("event")) == (step, "finished") for record in records)


def records_until(records: Records, step: int, *, evaluated: bool) -> Records:
    """The records without those that a run that is resumed at a step writes again: later steps, an evaluation of this
    step that the checkpoint does not know of, and that of the end unless the run finished."""
    kept = [record for record in records if record["step"] <= step]
    finished = finished_at(kept, step)
    for place, record in enumerate(kept):
        repeated = not evaluated or (record.get("moment") == "end" and not finished)
        if (record["step"], record["kind"]) == (step, "eval") and repeated:
            return kept[:place]
    return kept


def put_aside(run: Path, files: Sequence[Path]) -> Path:
    """Move files of an attempt to a folder of the run directory."""
    aside = _new_attempt(run)
    _move(run, files, aside)
    return aside


def _new_attempt(run: Path) -> Path:
    places = (run / f"attempt-{number}" for number in itertools.count(1))
    aside = next(place for place in places if not place.exists())
    aside.mkdir()
    return aside


def _move(run: Path, files: Sequence[Path], aside: Path) -> None:
    """Move files of a run, in their order. A folder may be a link to another file system, to which renaming cannot
    lead: what is in it stays there, in a folder of the name of `aside`."""
    for file in files:
        place = aside / file.relative_to(run)
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            file.rename(place)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            beside = file.parent / aside.name / file.name
            beside.parent.mkdir(exist_ok=True)
            file.rename(beside)


def put_later_aside(run: Path, step: int) -> None:
    """Where a run resumes from an earlier checkpoint than its newest, move the files of later steps away: the next
    `resume=auto` would go on from a checkpoint of steps that metrics.jsonl has no more."""
    later = [
        folder
        for part in _BY_STEP
        for folder in sorted((run / part).glob("*step-*"))
        if (match := _STEP.fullmatch(folder.name)) and int(match[1]) > step
    ]
    if not any(folder in later for folder in complete_checkpoints(run / "checkpoints")):
        return  # it was stopped after its newest checkpoint, and comes to the same files again
    aside = _new_attempt(run)
    if (run / "metrics.jsonl").is_file():  # first: after a kill, the next start finds later checkpoints again
        shutil.copyfile(run / "metrics.jsonl", aside / "metrics.jsonl")
    _move(run, later, aside)
    logger.warning("the checkpoints of steps after %d, and their files, were moved to %s", step, aside)


def keep_config(run: Path, step: int, now: str) -> None:
    """Keep the run file that was in use up to a step as config-000040.yaml if the present one differs. Run files of
    dropped steps are deleted."""
    ends = {leg: leg.stem.partition("-")[2] for leg in sorted(run.glob("config-*.yaml"))}
    beyond = [leg for leg, end in ends.items() if end.isdecimal() and int(end) >= step]
    held = beyond[0] if beyond else run / "config.yaml"
    written = held.read_text(encoding="utf-8", errors="replace") if held.exists() else now
    if not _is_run_file(written):
        logger.warning("%s: damaged; the run file of the steps before the checkpoint is lost", held)
    elif _without_resume(written) != _without_resume(now):
        held.replace(run / f"config-{step:06d}.yaml")
        beyond = beyond[1:]
    for leg in beyond:
        leg.unlink()


def _is_run_file(text: str) -> bool:
    try:
        return isinstance(found := yaml12.parse(text), dict) and "algorithm" in found
    except yaml.YAMLError:
        return False


def _without_resume(run_file: str) -> list[str]:
    return [line for line in run_file.splitlines() if not line.startswith("resume:")]
