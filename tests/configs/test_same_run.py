"""Every published file is the same run on any number of processes, or is refused; and what `check` warns of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from retouch.config import ConfigError, load_run
from retouch.config.advice import ADVICE, advice
from retouch.config.derived import numbers

from .conftest import RUNS, VLM_RUNS, name_of

FILES = [*RUNS, *(path for path in VLM_RUNS if path.parent.name != "tiny")]
"""A tiny text encoder has all completions of a step in one forward of one process."""
PROCESSES = (1, 2, 4, 8)
SAME = (
    *("global_images_per_epoch", "global_rows_per_step", "optimizer_steps_per_epoch", "epochs", "trained_steps"),
    *("global_completions_per_step", "global_completions_per_generation", "optimizer_steps_per_generation"),
)
"""Numbers of a run that do not depend on how many processes share it, of either trainer."""


def of_processes(path: Path, world_size: int) -> dict[str, Any] | str:
    """The numbers that must not change, or the message with which a number of processes is refused."""
    try:
        found = numbers(load_run(path), world_size).as_dict()
    except ConfigError as error:
        return str(error)
    return {name: found[name] for name in SAME if name in found}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_it_is_the_same_run_on_any_number_of_processes(path: Path) -> None:
    one, *more = (of_processes(path, count) for count in PROCESSES)
    assert isinstance(one, dict) and len(one) >= 3
    for found in more:
        assert found == one or (isinstance(found, str) and re.search(r"; set .* processes$", found)), found


def test_none_is_refused() -> None:
    refused = [(name_of(path), n) for path in FILES for n in PROCESSES if isinstance(of_processes(path, n), str)]
    assert refused == []


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_it_counts_its_step_on_all_processes(path: Path) -> None:
    run = load_run(path)
    assert run.optimizer.global_batch_size is not None and run.optimizer.gradient_accumulation is None


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_its_warnings_have_a_reason_in_the_file(path: Path) -> None:
    """`# warned: NAME: reason`, in the file or in one that it extends; and no file names a warning that it has not."""
    run, own, all_of_them = load_run(path), reasons(path), reasons(path, inherited=True)
    assert {*own} <= {*ADVICE} and all(len(reason.split()) > 3 for reason in own.values())
    for world_size in PROCESSES:
        found = {*advice(run, world_size)}
        assert {*own} <= found <= {*all_of_them}


def reasons(path: Path, *, inherited: bool = False) -> dict[str, str]:
    text = path.read_text(encoding="utf-8")
    below = re.search(r"^extends: (\S+)", text, re.MULTILINE) if inherited else None
    found = reasons(path.parent / below[1], inherited=True) if below else {}
    return {**found, **dict(re.findall(r"^ *# warned: (\w+): (.+)$", text, re.MULTILINE))}
