"""Whatever a run reads back or writes again is damaged: it goes on with one warning, or ends with one message."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from retouch.config import RunConfig
from retouch.engine import CheckpointError
from retouch.observe import sinks
from retouch.observe.run_dir import RunDir, read_metrics
from retouch.training.resume import evaluation_stands, resume_folder
from retouch.types import Failure, Outcome, Stopped
from tests.command_line import retouch
from tests.conftest import small_run
from tests.selection import covering, default, rows
from tests.tiny_models import shallow_flux

from .runs import Config, Use, brightness, of_kind, same_weights, train
from .test_old_runs import FIRST, copied, resume

WEIGHTS = "checkpoints/step-000003/weights/diffusion_pytorch_model.safetensors"


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def halved(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def garbage(path: Path) -> None:
    path.write_bytes(b"\xff\x00\x81garbage\n" * 20)


def other_json(path: Path) -> None:
    path.write_bytes(b'[1, {"step": "x", "kind": 7}]\n')


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES = (emptied, halved, garbage, other_json, folder)

GOES_ON = "goes on"
"""It is written again, or nothing reads it."""
WARNS = "warns"
REFUSED = "refused"

FILES: dict[str, dict[str, str]] = {
    ".lock": {"folder": REFUSED},
    "config.yaml": {"": WARNS, "folder": REFUSED},
    "environment.json": {"folder": REFUSED},
    "metrics.jsonl": {"": WARNS, "folder": REFUSED},
    "log.txt": {"folder": REFUSED},
    "report.html": {"folder": REFUSED},
    "evaluations/step-000000/rows.jsonl": {"": WARNS},
    "evaluations/step-000000/00000.png": {"": WARNS},
    "evaluations/step-000002/rows.jsonl": {"": WARNS},
    "evaluations/step-000002/00000.png": {},
    "images/step-000000/evaluation.png": {},
    "checkpoints/step-000002/complete.json": {"": REFUSED, "folder": GOES_ON},
    "checkpoints/step-000002/state.json": {"": REFUSED},
    "checkpoints/step-000002/optimizer.pt": {"": REFUSED},
    "checkpoints/step-000002/rng.pt": {"": REFUSED},
    "checkpoints/step-000002/weights/config.json": {"": REFUSED},
    "checkpoints/step-000002/weights/diffusion_pytorch_model.safetensors": {"": REFUSED},
}
"""File of a run -> what follows of each damage, "" for the others; nothing where it is not named. Without its
complete.json a checkpoint does not count, and the one before is taken."""


@pytest.fixture(scope="module")
def whole(signs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of three steps, an evaluation and a checkpoint after each."""
    root = tmp_path_factory.mktemp("whole")
    run = small_run(
        signs,
        root,
        model__path=shallow_flux(),
        training__max_steps=3,
        training__checkpoint_every=1,
        training__eval_every=1,
        evaluation__num_steps=1,
        evaluation__num_examples=1,
        logging__sinks=["tensorboard"],
    )
    (root / "run.yaml").write_text(yaml.safe_dump(run), encoding="utf-8")
    assert retouch("train", root / "run.yaml").code == 0
    return root / "t"


@pytest.fixture
def cut(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it without its last checkpoint."""
    monkeypatch.setenv("COLUMNS", "2000")
    shutil.copytree(whole, tmp_path / "t")
    shutil.rmtree(tmp_path / "t/checkpoints/step-000003")
    return tmp_path / "t"


def kinds(names: Collection[str]) -> set[str]:
    return {re.sub(r"/step-\d+", "/step", name) for name in names}


OPENED: list[tuple[str, int]] | None = None
"""Files that are opened, with the flags of the system; None while nobody asks."""


def _note_opened(event: str, arguments: tuple[Any, ...]) -> None:
    if OPENED is not None and event == "open" and isinstance(arguments[0], str | bytes):
        OPENED.append((os.fsdecode(arguments[0]), arguments[2]))


sys.addaudithook(_note_opened)


def resumed(whole: Path, run: Path) -> Any:
    """Every kind of file of the run that is read back is in FILES; test_integrity.py has that of a checkpoint inside an
    epoch."""
    global OPENED
    before = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    OPENED = opened = []
    try:
        outcome = retouch("train", whole.parent / "run.yaml", f"logging.dir={run.parent}", "resume=auto")
    finally:
        OPENED = None
    read = {os.path.relpath(path, run) for path, flags in opened if flags & os.O_ACCMODE != os.O_WRONLY}
    assert kinds(read & before) <= kinds({*FILES, "checkpoints/step-000001/rollouts.safetensors"})
    return outcome


def ends(outcome: Any, expected: str, whole: Path, run: Path) -> None:
    """As expected, without a traceback, with one line about the damage, and with the weights of the whole run."""
    assert "Traceback" not in outcome.err
    told = [line for line in outcome.err.splitlines() if "WARNING" in line and "changed since" not in line]
    errors = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    if expected == REFUSED:
        assert outcome.code == 2 and len(errors) == 1, outcome.err
        return
    assert outcome.code == 0, outcome.err
    assert len(told) == (expected == WARNS), outcome.err
    assert same_weights(load_file(whole / WEIGHTS), load_file(run / WEIGHTS))


READ_BACK = ("config.yaml", "metrics.jsonl", "evaluations/step-000000/rows.jsonl")
TRIALS = [(name, damage.__name__) for name in FILES for damage in DAMAGES]
CHOSEN = covering([trial for trial in TRIALS if trial[0] in READ_BACK or trial[1] == "garbage"], strength=1)


@pytest.mark.parametrize(("name", "how"), rows(TRIALS, CHOSEN))  # type: ignore[arg-type]
def test_a_damaged_file_is_written_again_or_done_without_or_named(name: str, how: str, whole: Path, cut: Path) -> None:
    (damage,) = (one for one in DAMAGES if one.__name__ == how)
    damage(cut / name)
    expected = FILES[name].get(how, FILES[name].get("", GOES_ON))
    ends(resumed(whole, cut), expected, whole, cut)


@pytest.mark.parametrize("name", ["images", "evaluations", "tensorboard", "checkpoints", "evaluations/step-000001"])
def test_a_file_in_the_place_of_a_folder_is_named_at_the_start(name: str, whole: Path, cut: Path) -> None:
    shutil.rmtree(cut / name, ignore_errors=True)
    (cut / name).write_text("x", encoding="utf-8")
    outcome = resumed(whole, cut)
    ends(outcome, REFUSED, whole, cut)
    assert f"{cut / name} is not a folder; delete it" in outcome.err


def test_what_an_unfinished_checkpoint_left_may_be_a_file(whole: Path, cut: Path) -> None:
    (cut / "checkpoints/.writing-step-000003").write_text("x", encoding="utf-8")
    (cut / "checkpoints/step-000003").write_text("x", encoding="utf-8")
    ends(resumed(whole, cut), GOES_ON, whole, cut)


@pytest.mark.skipif(os.getuid() == 0, reason="nothing is closed to root")
@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "evaluations/step-000000/rows.jsonl", ".lock"])
def test_a_file_without_permission_is_named(name: str, whole: Path, cut: Path) -> None:
    (cut / name).chmod(0)
    outcome = resumed(whole, cut)
    assert outcome.code in (0, 1, 2) and "Traceback" not in outcome.err


@pytest.mark.parametrize("damage", default(DAMAGES, {garbage, folder}.__contains__), ids=lambda one: one.__name__)
def test_a_record_of_checked_items_is_made_again(damage: Callable[[Path], None], whole: Path, cut: Path) -> None:
    """It lies in the user's cache, not in the run."""
    records = [path for path in (Path(os.environ["XDG_CACHE_HOME"]) / "retouch/checked").iterdir() if path.is_file()]
    for record in records:
        damage(record)
    try:
        ends(resumed(whole, cut), GOES_ON, whole, cut)
    finally:
        for record in records:
            if record.is_dir():
                record.rmdir()


@pytest.mark.parametrize("damage", [emptied, garbage, other_json], ids=lambda damage: damage.__name__)
def test_what_a_run_was_begun_from_is_not_taken_for_the_base(damage: Callable[[Path], None], config: Config) -> None:
    """Without a checkpoint of its own, it would begin from there; runs of earlier versions have it in config.yaml."""
    run = RunDir(config(resume="auto"))
    run.path.mkdir(parents=True)
    assert resume_folder(run.config, run) is None
    for name in ("config.yaml", "begun_from"):
        damage(run.path / name)
        with pytest.raises(CheckpointError, match=r"begun from (cannot be read|.*no complete)"):
            resume_folder(run.config, run)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("evaluations/step-000000/rows.jsonl", WARNS), ("checkpoints/step-000002/trainer_state.json", REFUSED)],
)
def test_a_damaged_run_of_vlm_grpo(name: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its trainer has checkpoints and evaluations of its own."""
    pytest.importorskip("trl")
    folder = copied(FIRST, "vlm_grpo-1", tmp_path)
    garbage(folder / "runs/vlm_grpo-1" / name)
    code, errors = resume(folder, "vlm_grpo-1", monkeypatch)
    assert "Traceback" not in errors and code == (2 if expected == REFUSED else 0), errors
    assert sum("damaged" in line and Path(name).name in line for line in errors.splitlines()) == 1, errors


# --- metrics.jsonl ---


def test_records_that_are_lost_are_counted(whole: Path, cut: Path) -> None:
    halved(cut / "metrics.jsonl")
    left = sum(r["kind"] == "train" for r in read_metrics(cut / "metrics.jsonl"))
    outcome = resumed(whole, cut)
    assert (
        f"metrics.jsonl: damaged: {2 - left} of the 2 optimizer steps before the checkpoint are missing in it"
        in outcome.err
    )


def test_a_run_of_an_earlier_version_that_was_begun_from_another_has_lost_no_records(whole: Path, cut: Path) -> None:
    """Nothing but its records tells where it began."""
    metrics = cut / "metrics.jsonl"
    lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True)
    metrics.write_text("".join(line for line in lines if json.loads(line)["step"] >= 2), encoding="utf-8")
    outcome = resumed(whole, cut)
    assert outcome.code == 0 and "damaged" not in outcome.err


def test_a_run_with_checkpoints_and_no_metrics_is_no_new_run(whole: Path, cut: Path) -> None:
    """A new one would be resumed from the old checkpoints."""
    emptied(cut / "metrics.jsonl")
    outcome = retouch("train", whole.parent / "run.yaml", f"logging.dir={cut.parent}")
    assert outcome.code == 2 and "already holds a run" in outcome.err


def test_rows_of_an_evaluation_that_are_too_few_are_not_compared(whole: Path, cut: Path) -> None:
    """Cut off between two lines."""
    lines = (cut / "metrics.jsonl").read_text(encoding="utf-8")
    (cut / "metrics.jsonl").write_text(lines.replace('"images": 1,', '"images": 2,', 1), encoding="utf-8")
    outcome = resumed(whole, cut)
    ends(outcome, WARNS, whole, cut)
    assert "rows.jsonl: damaged (1 row for the 2 images of metrics.jsonl)" in outcome.err


# --- evaluations without a reward ---


@pytest.mark.parametrize("moment", default(["start", "step", "end"], {"start", "step"}.__contains__))
def test_an_evaluation_in_which_every_reward_failed_is_repeated_when_the_run_is_resumed(
    moment: str, config: Config, scripted: Use
) -> None:
    at = {"start": 0, "step": 1, "end": 2}[moment]
    broken = True

    def sometimes(item: Any) -> Outcome:
        of_evaluation = int(item.group or 0) >= 200
        step = max((r["step"] for r in read_metrics(metrics) if r["kind"] == "train"), default=0)
        return Failure("scorer_error", "broken") if broken and of_evaluation and step == at else brightness(item)

    metrics = Path(config(name="r").logging.dir) / "r/metrics.jsonl"
    scripted(sometimes)
    given = {"name": "r", "training__checkpoint_every": 1, "training__eval_every": 1}
    if moment == "start":
        with pytest.raises(Stopped):
            train(config(**given, training__max_minutes=1e-6))
    else:
        train(config(**given, training__max_steps=at))
    (failed,) = [r for r in of_kind(read_metrics(metrics), "eval") if r["step"] == at]
    assert "preservation" not in failed and failed["failed"] == 2
    broken = False
    _, after = train(config(**given, training__max_steps=2, resume="auto"))
    assert [r["step"] for r in of_kind(after, "eval")] == [0, 1, 2]
    assert all("preservation" in r for r in of_kind(after, "eval"))


def test_an_evaluation_by_rewards_of_other_names_stands(config: Config, scripted: Use) -> None:
    scripted(brightness)
    run, _ = train(config(name="r", training__checkpoint_every=1))
    kept = read_metrics(run.dir.path / "metrics.jsonl")
    assert evaluation_stands(kept, 0, run.rewards)
    renamed = [{name.replace("preservation", "other"): value for name, value in r.items()} for r in kept]
    assert evaluation_stands(renamed, 0, run.rewards)
    assert not evaluation_stands([{**r, "failed": 2.0} for r in renamed], 0, run.rewards)


# --- run_id, which only the services read ---


@pytest.mark.parametrize("damage", [emptied, garbage, other_json])
def test_a_damaged_run_id_is_replaced(damage: Callable[[Path], None], tmp_path: Path, caplog: Any) -> None:
    first = sinks._run_id(tmp_path)
    assert sinks._run_id(tmp_path) == first
    damage(tmp_path / "run_id")
    second = sinks._run_id(tmp_path)
    assert re.fullmatch("[0-9a-f]{8}", second) and second != first
    assert len(caplog.records) == 1 and "damaged" in caplog.text
    assert sinks._run_id(tmp_path) == second


def test_who_holds_a_lock_is_unknown_where_its_file_is_garbage(config: Callable[..., RunConfig]) -> None:
    one, other = RunDir(config()), RunDir(config())
    one.lock()
    garbage(one.path / ".lock")
    with pytest.raises(Exception, match=r"another process \(pid unknown\) is writing"):
        other.lock()
    one.close()
