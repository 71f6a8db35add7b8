"""metrics.jsonl: what stands in it, and that resuming cuts off what will come again."""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from retouch.config import ConfigError, RunConfig, load_run
from retouch.observe import RunDir, run_dir
from retouch.observe.kept import kept_rows
from retouch.observe.run_dir import read_metrics, read_own_rows
from tests.fuzz.inputs import bounded

Config = Callable[..., RunConfig]


def test_the_records_of_a_run(finished: Callable[[str], Path]) -> None:
    """One JSON object a line: step, kind, numbers; timings under "time" and nowhere else."""
    run = finished("full")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(r["kind"], r["step"]) for r in records] == [
        ("eval", 0),
        ("train", 1),
        ("train", 2),
        ("eval", 2),
        ("rollout", 3),
        ("train", 3),
        ("train", 4),
        ("eval", 4),
        ("event", 4),
    ]
    evaluation, rollout, step = records[0], records[4], records[6]
    assert (evaluation["moment"], evaluation["examples"], evaluation["images"]) == ("start", "held_out", 2)
    assert {"epoch", "images", "failed", "combined_score", "combined_std", "reward/preservation"} <= rollout.keys()
    assert {"phase", "epoch", "loss", "grad_norm", "lr", "ratio", "max_abs_log_ratio", "time"} <= step.keys()
    assert records[-1]["event"] == "finished"
    timed = [r["kind"] for r in records if "time" in r]
    assert timed == ["eval", "train", "train", "eval", "train", "train", "eval"]
    for record in (r for r in records if "time" in r):  # an evaluation's time is its own, and no step's
        assert (record["time"]["eval"] > 0) == (record["kind"] == "eval")


def test_the_files_of_a_run(finished: Callable[[str], Path]) -> None:
    run = finished("full")
    assert load_run(run / "config.yaml").name == "full"
    environment = json.loads((run / "environment.json").read_text())
    assert {"python", "packages", "gpus", "command"} <= environment.keys()
    assert {"torch", "diffusers", "retouch"} <= environment["packages"].keys()
    assert "new run" in (run / "log.txt").read_text()
    assert sorted(p.name for p in (run / "images").iterdir()) == [f"step-00000{i}" for i in (0, 2, 3, 4)]


@pytest.mark.parametrize("name", ["config.yaml", "environment.json", "metrics.jsonl", "log.txt", "config-000003.yaml"])
@pytest.mark.parametrize(
    "make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/nowhere/x")], ids=["pipe", "folder", "link"]
)
def test_what_is_no_file_is_not_waited_for(
    config: Config, name: str, make: Callable[[Path], None], tmp_path: Path
) -> None:
    directory = RunDir(config())
    directory.path.mkdir(parents=True)
    make(directory.path / name)
    with bounded(), pytest.raises(ConfigError, match=f"{name} is not a file; delete it"):
        directory.open(2)
    directory.close()


def test_a_damaged_record_is_dropped_when_a_run_is_resumed(config: Config) -> None:
    directory = opened(config())
    directory.log("train", 1, {"loss": 1.0})
    directory.close()
    metrics = directory.path / "metrics.jsonl"
    with metrics.open("ab") as stream:
        stream.write(b'{"a": 1}\n{"kind": "train", "step": "x"}\n[]\n\xff\n{"kind": ["a"], "step": 1}\n')
    resumed = opened(config(), 1)
    resumed.close()
    assert [(record["kind"], record["step"]) for record in read_metrics(metrics)] == [("train", 1)]
    assert len(metrics.read_bytes().splitlines()) == 1


def opened(config: RunConfig, resume_step: int | None = None, *, main: bool = True) -> RunDir:
    directory = RunDir(config, main=main)
    directory.open(resume_step)
    return directory


def test_a_checkpoint_is_the_runs_own_by_its_folder(config: Config, tmp_path: Path) -> None:
    directory = RunDir(config())
    assert directory.owns(directory.checkpoints / "step-000001")
    assert not directory.owns(tmp_path / "another/checkpoints/step-000001")


def test_a_run_that_had_ended_is_no_failed_one_when_it_is_opened_again(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[bool] = []
    sink = SimpleNamespace(numbers=lambda *_: None, close=lambda failed: ends.append(failed))
    monkeypatch.setattr(run_dir, "open_sinks", lambda *_: [sink])
    steps = config().training.max_steps
    first = opened(config())
    first.log("event", steps, {"event": "finished"})
    first.close()
    opened(config(), steps).close()
    opened(config(), steps - 1).close()
    assert ends == [False, False, True]


def test_resuming_drops_what_will_come_again(config: Config) -> None:
    """Also the line that a kill cut off; what was logged up to the checkpoint stays."""
    directory = opened(config())
    for step in range(1, 6):
        directory.log("train", step, {"loss": step / 2}, {"step": 1.23456789})
    directory.close()
    metrics = directory.path / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"step": 6, "ki')
    again = opened(config(), 3)
    again.log("train", 4, {"loss": 9.0})
    again.close()
    assert [(r["step"], r["loss"]) for r in read_metrics(metrics)] == [(1, 0.5), (2, 1.0), (3, 1.5), (4, 9.0)]
    assert read_metrics(metrics)[0]["time"] == {"step": 1.2346}


def test_a_new_run_does_not_overwrite_another(config: Config) -> None:
    directory = opened(config())
    directory.close()
    opened(config()).close()  # nothing was logged: nothing is lost
    directory.open(None)
    directory.log("event", 0, {"event": "finished"})
    directory.close()
    with pytest.raises(ConfigError, match="already holds a run; continue it with resume=auto, set another name"):
        opened(config())


def test_the_run_files_of_earlier_legs_are_kept(config: Config) -> None:
    """Each by the step up to which it held; a leg that is cut off leaves none."""

    def legs(seed: int, resume_step: int | None) -> dict[str, int]:
        directory = opened(config(seed=seed, resume=None if resume_step is None else "auto"), resume_step)
        directory.close()
        return {path.stem: load_run(path).seed for path in sorted(directory.path.glob("config*.yaml"))}

    assert legs(1, None) == {"config": 1}
    assert legs(1, 20) == {"config": 1}  # but for resume, the same
    assert legs(2, 40) == {"config": 2, "config-000040": 1}
    assert legs(3, 60) == {"config": 3, "config-000040": 1, "config-000060": 2}
    assert legs(4, 50) == {"config": 4, "config-000040": 1, "config-000050": 2}
    assert legs(5, 30) == {"config": 5, "config-000030": 1}
    assert legs(1, 30) == {"config": 1}


def test_an_attempt_without_a_checkpoint_is_put_aside(config: Config) -> None:
    """resume=auto begins anew, however often; nothing of one attempt is taken for the next's."""
    for loss in (1.0, 2.0, 3.0):
        directory = opened(config(resume="auto"))
        directory.log("train", 1, {"loss": loss})
        directory.save_image(1, "grid", Image.new("RGB", (8, 8)))
        (directory.path / "evaluations" / "step-000000").mkdir(parents=True)
        directory.close()
    run = directory.path
    losses = [[r["loss"] for r in read_metrics(at / "metrics.jsonl")] for at in (run, *sorted(run.glob("attempt-*")))]
    assert losses == [[3.0], [1.0], [2.0]]
    moved = sorted(path.name for path in (run / "attempt-2").iterdir())
    assert moved == ["evaluations", "images", "metrics.jsonl"]
    log = (run / "log.txt").read_text()
    assert f"no checkpoint to resume from: starting again; earlier files were moved to {run / 'attempt-2'}" in log


def test_all_is_ended_whatever_fails(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk meets metrics.jsonl and TensorBoard; services are told all the same, and the directory is free."""
    told: list[str] = []

    class Ending:
        def __init__(self, name: str, problem: str = "") -> None:
            self.name, self.problem = name, problem

        def close(self, *, failed: bool = True) -> None:
            told.append(f"{self.name} {failed}")
            if self.problem:
                raise OSError(errno.ENOSPC, self.problem)

    sinks = [Ending("tensorboard", "events"), Ending("wandb"), Ending("trackio")]
    monkeypatch.setattr(run_dir, "open_sinks", lambda *_: list(sinks))
    handlers = list(logging.getLogger("retouch").handlers)
    directory = opened(config())
    monkeypatch.setattr(directory, "_metrics", Ending("metrics", "rows"))
    with pytest.raises(OSError, match="events"):
        directory.close()
    assert told == ["metrics True", "tensorboard True", "wandb True", "trackio True"]
    assert logging.getLogger("retouch").handlers == handlers
    RunDir(directory.config).require_free()
    directory.close()
    assert len(told) == 4


def test_numbers_that_json_has_no_word_for_are_null(config: Config) -> None:
    """The gradient norm of an fp16 overflow is infinite; that must not end the run."""
    directory = opened(config())
    directory.log("train", 1, {"grad_norm": float("inf"), "loss": float("nan"), "lr": 0.1})
    directory.close()
    (line,) = (directory.path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 1, "kind": "train", "grad_norm": None, "loss": None, "lr": 0.1}


def test_other_ranks_write_nothing(config: Config) -> None:
    directory = opened(config(), main=False)
    directory.log("train", 1, {"loss": 1.0})
    directory.save_image(1, "grid", Image.new("RGB", (8, 8)))
    directory.close()
    assert not directory.path.exists()


def test_tensorboard_gets_numbers_times_and_pictures(config: Config) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    directory = opened(config(logging__sinks=["tensorboard"]))
    directory.log("train", 1, {"loss": 0.5, "phase": "rl"}, {"step": 2.0})
    directory.save_image(1, "grid", Image.new("RGB", (8, 8), "red"))
    directory.close()
    events = EventAccumulator(str(directory.path / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == {"train/loss", "time/step"}
    assert events.Tags()["images"] == ["grid"]
    assert events.Scalars("train/loss")[0].value == 0.5


def test_the_log_file_ends_with_the_run(config: Config) -> None:
    directory = opened(config())
    logging.getLogger("retouch").warning("inside")
    directory.close()
    logging.getLogger("retouch").warning("outside")
    log = (directory.path / "log.txt").read_text()
    assert "inside" in log and "outside" not in log


@pytest.mark.parametrize("configured", [True, False])
def test_a_library_user_gets_the_log_file_and_no_more_output(
    config: Config, monkeypatch: pytest.MonkeyPatch, configured: bool
) -> None:
    """As in a notebook, with and without handlers: `retouch` inherits WARNING from the root logger. INFO goes to
    log.txt alone."""
    ours, root = logging.getLogger("retouch"), logging.getLogger()
    monkeypatch.setattr(root, "level", logging.WARNING)
    shown: list[str] = []
    terminal = logging.Handler()
    monkeypatch.setattr(terminal, "emit", lambda record: shown.append(record.getMessage()))
    monkeypatch.setattr(root, "handlers", [terminal] if configured else [])
    monkeypatch.setattr(ours, "handlers", [])
    monkeypatch.setattr(logging, "lastResort", terminal)
    before = ours.level
    ours.setLevel(logging.NOTSET)
    try:
        directory = opened(config())
        logging.getLogger("retouch.training.build").info("information")
        logging.getLogger("retouch.training.build").warning("warning")
        root.warning("of another library")
        directory.close()
        assert (ours.level, ours.handlers, terminal.filters) == (logging.NOTSET, [], [])
        logging.getLogger("retouch.training.build").info("afterwards")
    finally:
        ours.setLevel(before)
    log = (directory.path / "log.txt").read_text()
    assert "INFO retouch.training.build: information" in log and "WARNING retouch.training.build: warning" in log
    assert shown == ["warning", "of another library"]


def test_files_of_later_steps_are_put_aside_where_a_run_goes_back(
    config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    """`resume=RUN/checkpoints/step-000002` beside step 4: the next `auto` went on from step 4 of the other past."""
    directory = opened(config())
    for step in (2, 3, 4):
        directory.log("train", step, {})
    directory.close()
    for part in ("checkpoints", "evaluations", "images"):
        for step in (2, 4):
            (directory.path / part / f"step-{step:06d}").mkdir(parents=True)
    (directory.checkpoints / ".replaced-step-000003").mkdir()  # a kill while it was written again
    for name in ("step-000002", ".replaced-step-000003", "step-000004"):
        (directory.checkpoints / name / "complete.json").write_text("{}")
    again = RunDir(config(resume="auto"))
    again.open(4, checkpoint=directory.checkpoints / "step-000004")
    again.close()
    assert not (directory.path / "attempt-1").exists()
    back = RunDir(config(resume=str(directory.checkpoints / "step-000002")))
    back.open(2, checkpoint=directory.checkpoints / "step-000002")
    back.close()
    aside = directory.path / "attempt-1"
    assert not (directory.checkpoints / ".replaced-step-000003").exists()
    assert [record["step"] for record in read_metrics(aside / "metrics.jsonl")] == [2, 3, 4]
    for part in ("checkpoints", "evaluations", "images"):
        assert [folder.name for folder in (directory.path / part).iterdir()] == ["step-000002"]
        moved = {folder.name for folder in (aside / part).iterdir()}
        assert moved == {"step-000004", *([".replaced-step-000003"] if part == "checkpoints" else [])}
    assert f"were moved to {aside}" in caplog.text


def test_later_checkpoints_on_another_file_system_stay_there(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """`RUN/checkpoints` is a link: they cannot be renamed into the run directory."""
    directory = opened(config())
    directory.log("train", 4, {})
    directory.close()
    for step in (2, 4):
        (directory.checkpoints / f"step-{step:06d}").mkdir(parents=True)
        (directory.checkpoints / f"step-{step:06d}/complete.json").write_text("{}")
    rename = Path.rename

    def elsewhere(file: Path, place: Path) -> Path:
        if place.is_relative_to(directory.path / "attempt-1"):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        return rename(file, place)

    monkeypatch.setattr(Path, "rename", elsewhere)
    back = RunDir(config(resume=str(directory.checkpoints / "step-000002")))
    back.open(2, checkpoint=directory.checkpoints / "step-000002")
    back.close()
    assert (directory.checkpoints / "attempt-1" / "step-000004" / "complete.json").is_file()
    assert not (directory.checkpoints / "step-000004").exists()


def test_each_problem_of_a_file_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The report, alarms and grids read it again; one that had another problem was silently left out."""
    (tmp_path / "elsewhere").write_text("")
    folder = tmp_path / "run"
    folder.mkdir()
    file = folder / "rows.jsonl"
    file.symlink_to(tmp_path / "elsewhere")
    for _ in range(2):
        assert read_own_rows(folder, file) == []
    file.unlink()
    for content in ("", '{"example": 1}\n'):
        file.write_text(content)
        for _ in range(2):
            assert kept_rows(folder, None) is None
    file.unlink()
    file.mkdir()
    assert kept_rows(folder, None) is None and read_own_rows(folder, file) == []
    damages = ("damaged (empty)", "damaged (line 1 is no row of an evaluation)")
    problems = ("no file of the run itself", *damages, "not a file")
    assert [caplog.text.count(f"{file}: {problem}") for problem in problems] == [1, 1, 1, 1]
    assert len(caplog.records) == 4
