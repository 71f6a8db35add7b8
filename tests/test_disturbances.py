"""What a machine does to a run: folders vanish, clocks jump, two processes start at once."""

from __future__ import annotations

import ast
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

import retouch as package
from retouch.engine import Engine
from tests import forked
from tests.command_line import retouch

pytestmark = pytest.mark.usefixtures("shallow")

RunFile = Callable[..., dict[str, Any]]


def at_step(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], object]) -> None:
    """Act once, before the optimizer step of this number."""
    step, taken = Engine.step, [0]

    def counted(self: Engine, lr: float) -> dict[str, float]:
        taken[0] += 1
        if taken[0] == number:
            act()
        return step(self, lr)

    monkeypatch.setattr(Engine, "step", counted)


def written(folder: Path, run: dict[str, Any]) -> Path:
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(run), encoding="utf-8")
    return file


def trained(folder: Path) -> dict[str, torch.Tensor]:
    newest = sorted((folder / "checkpoints").glob("step-*"))[-1]
    return {name: t for file in (newest / "weights").glob("*.safetensors") for name, t in load_file(file).items()}


# --- folders that vanish ---


@pytest.mark.parametrize("part", ["checkpoints", pytest.param("images", marks=pytest.mark.full), "."])
def test_a_folder_of_the_run_that_vanishes(
    tmp_path: Path, run_file: RunFile, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Checkpoints are written again; without the run directory the run ends with one line, or goes on."""
    run = run_file(training__checkpoint_every=1, logging__rollout_images_every=1)
    where = tmp_path / "runs" / "t"
    at_step(monkeypatch, 3, lambda: shutil.rmtree(where / part))
    outcome = retouch("train", written(tmp_path, run))
    assert outcome.code in (0, 1) and "Traceback" not in outcome.err, outcome.err
    if part != ".":
        assert outcome.code == 0
    if outcome.code == 0:
        assert (where / "checkpoints" / "step-000004" / "complete.json").is_file()


def test_data_that_vanishes_ends_the_run_with_its_name(
    tmp_path: Path, run_file: RunFile, signs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "prompts"
    shutil.copytree(signs / "prompts", own)
    run = run_file(data__path=str(own), training__max_steps=8, training__checkpoint_every=1)
    at_step(monkeypatch, 1, lambda: shutil.rmtree(own))
    outcome = retouch("train", written(tmp_path, run))
    assert outcome.code in (1, 2) and "Traceback" not in outcome.err, outcome.err
    assert str(own) in outcome.err.splitlines()[-1]


def test_a_checkpoint_that_vanishes_before_it_is_resumed(tmp_path: Path, run_file: RunFile) -> None:
    """The one before it is taken, and the end is the same."""
    run = run_file(training__checkpoint_every=1, resume="auto")
    where = tmp_path / "runs" / "t"
    assert retouch("train", written(tmp_path, run)).code == 0
    before = trained(where)
    shutil.rmtree(where / "checkpoints" / "step-000004")
    assert retouch("train", written(tmp_path, run)).code == 0
    after = trained(where)
    assert all(torch.equal(before[name], after[name]) for name in before)


# --- clocks that jump ---


@pytest.mark.parametrize("jump_s", [-86_400.0 * 365, pytest.param(86_400.0 * 365, marks=pytest.mark.full)])
def test_a_clock_that_jumps_changes_nothing(
    tmp_path: Path, run_file: RunFile, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    """Neither the time limit of the run nor a deadline of a reward, nor any number."""
    run = run_file(training__max_minutes=60)
    assert retouch("train", written(tmp_path, {**run, "name": "still"})).code == 0
    now, jumped = time.time, threading.Event()
    at_step(monkeypatch, 2, jumped.set)
    monkeypatch.setattr(time, "time", lambda: now() + jump_s * jumped.is_set())
    assert retouch("train", written(tmp_path, {**run, "name": "jumps"})).code == 0
    assert jumped.is_set()
    still, jumps = trained(tmp_path / "runs" / "still"), trained(tmp_path / "runs" / "jumps")
    assert all(torch.equal(still[name], jumps[name]) for name in still)


def test_the_package_measures_no_time_by_the_wall_clock() -> None:
    """`time.monotonic` cannot jump. One exception writes a time stamp for torch's launcher, another subtracts from the
    date of a Retry-After that of a reply without one, and a third dates votes."""
    found = [
        f"{file.name}:{node.lineno}"
        for file in sorted(Path(package.__file__).parents[1].rglob("*.py"))
        for text in [file.read_text(encoding="utf-8")]
        if "time.time" in text or "datetime" in text
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("time.time", "datetime.now", "datetime.utcnow")
    ]
    assert [place.partition(":")[0] for place in found] == ["__init__.py", "addresses.py", "votes.py"], found


# --- two processes ---


def test_two_processes_that_start_at_once(tmp_path: Path, run_file: RunFile) -> None:
    """One trains, the other is refused and changes nothing; what is left is the run of one."""
    file = written(tmp_path, run_file(resume="auto", training__checkpoint_every=1))
    command = [sys.executable, "-m", "retouch", "train", str(file)]
    outcomes: list[Any] = []
    threads = [threading.Thread(target=lambda: outcomes.append(forked.run(command, timeout=300))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    codes = sorted(one.returncode for one in outcomes)
    assert codes in ([0, 2], [0, 0]), [one.stderr for one in outcomes]  # [0, 0]: the second came after the end
    refused = [one for one in outcomes if one.returncode == 2]
    assert all("another process (pid" in one.stderr and "Traceback" not in one.stderr for one in refused)
    alone = forked.run([*command, "name=alone"], timeout=300)
    assert alone.returncode == 0, alone.stderr
    mine, theirs = trained(tmp_path / "runs" / "t"), trained(tmp_path / "runs" / "alone")
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
