"""Sinks: the same names everywhere, one run of a service for a run, and services that may be slow, away or wrong.

wandb is the real one, offline, whose files are read back. trackio asks for another Pillow than the tests are made with:
a module with the same functions stands for it, and where the real one is installed it is tested as well.
"""

from __future__ import annotations

import errno
import importlib
import json
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from retouch.config import ConfigError, RunConfig
from retouch.observe import RunDir, sinks
from retouch.observe.sinks import Beside, TensorBoard, require_sinks
from tests.command_line import retouch

pytestmark = pytest.mark.usefixtures("shallow")

Config = Callable[..., RunConfig]


@pytest.fixture
def wandb_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """wandb as somebody finds it who has never used it, and offline; its settings are read when it is first called."""
    import wandb

    for name in ("WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb-config"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb.teardown()
    yield monkeypatch
    wandb.teardown()


def opened(config: RunConfig, resume_step: int | None = None, *, main: bool = True) -> RunDir:
    directory = RunDir(config, main=main)
    directory.open(resume_step)
    return directory


@dataclass
class Sent:
    """What a .wandb file holds.

    Attributes:
        rows: numbers and pictures as they were sent, one dictionary a call.
    """

    run: Any = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    exit_code: int | None = None

    @property
    def config(self) -> dict[str, Any]:
        return {item.key: json.loads(item.value_json) for item in self.run.config.update}

    def numbers(self, name: str) -> list[tuple[int, Any]]:
        """(step, value) in the order in which they were sent."""
        return [(row["step"], row[name]) for row in self.rows if name in row]


def sent_to_wandb(run: Path) -> list[Sent]:
    """Of every part of a run, in order, once its service has written them out, as at the end of a process."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()
    parts: list[Sent] = []
    for file in sorted(run.glob("wandb/*-run-*/*.wandb"), key=lambda path: path.stat().st_mtime):
        part = Sent()
        for data in logged(file.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                part.run = record.run
            elif kind == "history":
                part.rows.append(row_of(record.history.item))
            elif kind == "exit":
                part.exit_code = record.exit.exit_code
        parts.append(part)
    return parts


def row_of(items: Any) -> dict[str, Any]:
    """What was logged in one call; of a picture, what is said of its file."""
    row: dict[str, Any] = {}
    for item in items:
        name, *inside = item.nested_key or [item.key]
        value = json.loads(item.value_json)
        row[name] = {**row.get(name, {}), inside[0]: value} if inside else value
    return row


def logged(data: bytes) -> Iterator[bytes]:
    """Records of LevelDB's log format, after wandb's own 7 bytes: blocks of 32 KiB of records, each after 4 bytes of
    checksum, 2 of length and 1 of type (1 a whole record; 2, 3, 4 the first, a middle and the last piece of one)."""
    at, block, pieces = 7, 32768, b""
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        pieces = data[at + 7 : at + 7 + length] if kind in (1, 2) else pieces + data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield pieces


def write_records(directory: RunDir) -> None:
    directory.log("eval", 0, {"moment": "start", "images": 2, "ocr": 0.25})
    directory.log("rollout", 1, {"epoch": 0, "combined_score": 0.5})
    directory.log("train", 1, {"loss": 0.5, "phase": "rl", "skipped": True, "grad_norm": float("inf")}, {"step": 2.0})
    directory.save_image(1, "evaluation", Image.new("RGB", (8, 8), "red"))


# --- wandb ---


def test_tensorboard_never_imports_tensorflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not fit protobuf ended a run when it began."""
    (tmp_path / "tensorflow.py").write_text("raise TypeError('Descriptors cannot be created directly')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if f"{name}.".startswith(("tensorboard.", "torch.utils.tensorboard."))]:
        monkeypatch.delitem(sys.modules, name)
    sink = TensorBoard(tmp_path / "events", None)
    sink.numbers({"loss": 1.0}, 1)
    sink.close(failed=False)
    assert len(list((tmp_path / "events").iterdir())) == 1 and "tensorflow" not in sys.modules


def test_wandb_has_the_names_of_tensorboard(config: Config, wandb_offline: object) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = config(logging__sinks=["tensorboard", "wandb"], logging__project="signs", logging__group="first")
    directory = opened(run)
    write_records(directory)
    directory.log("train", 0, {"loss": 9.0})  # as after a resume that steps back
    directory.log("event", 1, {"event": "finished"})
    directory.close()
    events = EventAccumulator(str(directory.path / "tensorboard")).Reload()
    [part] = sent_to_wandb(directory.path)
    names = {name for row in part.rows for name in row if not name.startswith("_")}
    assert names == {*events.Tags()["scalars"], *events.Tags()["images"], "step"}
    assert {"eval/ocr", "rollout/combined_score", "train/loss", "time/step", "evaluation"} < names
    assert (part.numbers("train/loss"), part.numbers("eval/ocr")) == ([(1, 0.5), (0, 9.0)], [(0, 0.25)])
    assert part.numbers("train/grad_norm") == [(1, float("inf"))]
    [(step, picture)] = part.numbers("evaluation")
    assert (step, picture["_type"], picture["width"]) == (1, "image-file", 8)
    assert (part.run.display_name, part.run.project, part.run.run_group) == ("t", "signs", "first")
    assert part.config["optimizer"] == run.model_dump(mode="json")["optimizer"]
    assert part.exit_code == 0


def test_a_resumed_run_goes_on_in_the_same_run_of_wandb(config: Config, wandb_offline: object) -> None:
    """Also one that steps back: what comes again is there a second time, and nothing is dropped."""
    directory = opened(config(logging__sinks=["wandb"]))
    for step in range(1, 6):
        directory.log("train", step, {"loss": 1.0 * step})
    directory.close()
    again = opened(config(logging__sinks=["wandb"], resume="auto", optimizer__lr=5e-5), 3)
    for step in range(4, 7):
        again.log("train", step, {"loss": 10.0 * step})
    again.log("event", 6, {"event": "finished"})
    again.close()
    first, second = sent_to_wandb(directory.path)
    assert first.run.run_id == second.run.run_id == (directory.path / "run_id").read_text().strip()
    assert first.numbers("train/loss") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 5.0)]
    assert second.numbers("train/loss") == [(4, 40.0), (5, 50.0), (6, 60.0)]
    assert second.config["optimizer"]["lr"] == 5e-5
    assert (first.exit_code, second.exit_code) == (1, 0)


def test_a_run_that_begins_anew_is_another_run(config: Config, wandb_offline: object) -> None:
    for _ in range(2):
        directory = opened(config(logging__sinks=["wandb"], resume="auto"))
        directory.log("train", 1, {"loss": 1.0})
        directory.close()
    [first], [second] = sent_to_wandb(directory.path / "attempt-1"), sent_to_wandb(directory.path)
    assert first.run.run_id != second.run.run_id


def test_other_ranks_send_nothing(config: Config, wandb_offline: object) -> None:
    directory = opened(config(logging__sinks=["wandb"]), main=False)
    write_records(directory)
    directory.close()
    assert not directory.path.exists()


def test_a_run_with_wandb_from_the_command_line(
    run_file: Callable[..., dict[str, Any]], wandb_offline: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A run that fails in a step is a failed run there as well."""
    import yaml

    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(run_file(logging__sinks=["wandb"], training__max_steps=1)), encoding="utf-8")
    assert retouch("train", path).code == 0
    wandb_offline.setattr("retouch.engine.Engine.step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        retouch("train", path, "name=u")
    codes = {name: [part.exit_code for part in sent_to_wandb(tmp_path / "runs" / name)] for name in ("t", "u")}
    assert codes == {"t": [0], "u": [1]}
    assert sent_to_wandb(tmp_path / "runs/t")[0].numbers("train/loss")


def test_a_run_that_had_ended_ends_well_again(
    run_file: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What has more steps to take has not ended: it fails where it does."""
    import yaml

    services: list[Service] = []
    monkeypatch.setattr("retouch.observe.run_dir.open_sinks", lambda *_: services.append(Service()) or services[-1:])
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(run_file(training__max_steps=1)), encoding="utf-8")
    assert retouch("train", path).code == 0
    assert retouch("train", path, "resume=auto").code == 0
    monkeypatch.setattr("retouch.engine.Engine.step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        retouch("train", path, "resume=auto", "training.max_steps=2")
    assert [service.calls[-1] for service in services] == [False, False, True]


def test_a_server_that_cannot_be_reached_costs_nothing(
    config: Config,
    wandb_offline: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One warning, and what was to be sent is there to be sent later; the look at the key says nothing."""
    wandb_offline.setenv("WANDB_MODE", "online")
    wandb_offline.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    wandb_offline.setenv("WANDB_API_KEY", "0" * 40)
    wandb_offline.setenv("WANDB_INIT_TIMEOUT", "1")
    run = config(logging__sinks=["wandb"])
    require_sinks(run)
    assert capsys.readouterr() == ("", "")
    directory = opened(run)
    write_records(directory)
    directory.close()
    told = [r for r in caplog.records if r.name.startswith("retouch")]
    warnings = [r.getMessage() for r in told if r.levelno >= logging.WARNING]
    assert len(warnings) == 1 and "127.0.0.1:9" in warnings[0] and "is kept for `wandb sync` in" in warnings[0]
    part = sent_to_wandb(directory.path)[-1]
    assert part.numbers("train/loss") == [(1, 0.5)]
    assert part.run.run_id == (directory.path / "run_id").read_text().strip()


@pytest.mark.parametrize(
    ("key", "says"),
    [
        (None, "wandb has no API key; run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline"),
        ("short", "wandb rejects the API key: "),
    ],
)
def test_wandb_online_needs_a_key_before_anything_is_loaded(
    key: str | None, says: str, config: Config, wandb_offline: pytest.MonkeyPatch
) -> None:
    wandb_offline.setenv("WANDB_MODE", "online")
    if key:
        wandb_offline.setenv("WANDB_API_KEY", key)
    with pytest.raises(ConfigError, match=f"^logging.sinks: {says}"):
        require_sinks(config(logging__sinks=["wandb"]))


def test_a_missing_package_is_named_before_anything_is_loaded(
    run_file: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A folder of its name, as wandb leaves them behind, is no package."""
    import yaml

    (tmp_path / "trackio").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(p for p in sys.path if not (Path(p) / "trackio").is_dir())])
    monkeypatch.setattr("retouch.training.build.load_model", lambda *_: pytest.fail("the model was loaded"))
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(run_file(logging__sinks=["trackio"])), encoding="utf-8")
    outcome = retouch("train", path)
    assert (outcome.code, outcome.err) == (
        2,
        'error: logging.sinks: trackio is not installed: pip install "retouch[trackio]", or remove it from the sinks\n',
    )


# --- a service beside training ---


class Service:
    """Takes what it is given, but for what `fails` says."""

    def __init__(self, fails: Callable[[str], None] = lambda call: None) -> None:
        self.fails, self.calls = fails, list[object]()

    def numbers(self, values: object, step: int) -> None:
        self.calls.append((values, step))
        self.fails("numbers")

    def image(self, name: str, image: object, step: int) -> None:
        self.calls.append((name, step))
        self.fails("picture")

    def close(self, *, failed: bool) -> None:
        self.calls.append(failed)
        self.fails("close")


def test_errors_of_a_service_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def fails(call: str) -> None:
        raise OSError(f"no way to {call}")

    service = Service(fails)
    beside = Beside("it", lambda: service)
    values = {"a": 1.0}
    beside.numbers(values, 1)
    values["a"] = 2.0  # what was given then is what counts
    beside.image("grid", Image.new("RGB", (1, 1)), 1)
    beside.close(failed=True)
    assert service.calls == [({"a": 1.0}, 1), ("grid", 1), True]
    [record] = caplog.records
    assert record.getMessage() == (
        "it: OSError: no way to numbers; training continues, and metrics.jsonl has every record"
    )


def test_a_service_that_does_not_open_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def opening() -> Service:
        raise RuntimeError("nobody is\nthere")

    beside = Beside("it", opening)
    for step in range(3):
        beside.numbers({"a": 1.0}, step)
    beside.close(failed=False)
    assert [r.getMessage().partition(";")[0] for r in caplog.records] == ["it: RuntimeError: nobody is there"]


def test_a_service_that_hangs_holds_up_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It takes a bounded number of records, and a bounded time at the end: less than its first call."""
    monkeypatch.setattr(sinks, "_WAITING", 5)
    monkeypatch.setattr(sinks, "_CLOSE_S", 0.2)
    over = threading.Event()
    service = Service(lambda call: over.wait(60))
    beside = Beside("it", lambda: service)
    for step in range(20):
        beside.numbers({"a": 1.0}, step)
    beside.close(failed=False)
    over.set()
    [record] = caplog.records
    assert "it: does not respond, with 5 records waiting" in record.getMessage()


# --- trackio ---

TRACKIO = """
import json, pathlib
Image = lambda value: ["image", *value.size]
def init(project, name=None, group=None, space_id=None, config=None, resume="never", embed=True):
    print("* Trackio project initialized:", project)
    return Run({"project": project, "name": name, "group": group, "config": config, "resume": resume})
class Run:
    def __init__(self, about):
        self.write(about)
    def write(self, line):
        with open(pathlib.Path(__file__).parent / "trackio.jsonl", "a") as file:
            file.write(json.dumps(line) + chr(10))
    def log(self, metrics, step=None):
        self.write([step, metrics])
    def finish(self):
        print("* Run finished.")
        self.write("finished")
"""
"""The functions of trackio 0.43 that are used, with its names of arguments and its printing."""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What was sent to the module that stands for trackio."""
    (tmp_path / "trackio.py").write_text(TRACKIO, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "trackio.jsonl"
    sys.modules.pop("trackio", None)


def test_trackio_is_given_the_same(config: Config, stand_in: Path) -> None:
    run = config(logging__sinks=["trackio"], logging__group="first")
    require_sinks(run)
    directory = opened(run)
    write_records(directory)
    directory.close()
    opened(config(logging__sinks=["trackio"], logging__group="first", resume="auto"), 1).close()
    about, *rows, last, again, _ = map(json.loads, stand_in.read_text().splitlines())
    name = f"t-{(directory.path / 'run_id').read_text().strip()}"
    known = {"project": "retouch", "name": name, "group": "first", "resume": "allow"}
    assert about == {**known, "config": run.model_dump(mode="json")}
    assert rows == [
        [0, {"eval/images": 2, "eval/ocr": 0.25}],
        [1, {"rollout/epoch": 0, "rollout/combined_score": 0.5}],
        [1, {"train/loss": 0.5, "train/grad_norm": float("inf"), "time/step": 2.0}],
        [1, {"evaluation": ["image", 8, 8]}],
    ]
    assert (last, {key: again[key] for key in known}) == ("finished", known)


def test_a_service_that_prints_takes_nothing_of_the_commands_output(
    config: Config, stand_in: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread is opening it, or ending it, while the command says what it has to say."""
    trackio = importlib.import_module("trackio")
    init, begun, told = trackio.init, threading.Event(), threading.Event()

    def slow(**options: Any) -> Any:
        begun.set()
        assert told.wait(10)
        return init(**options)

    monkeypatch.setattr(trackio, "init", slow)
    directory = opened(config(logging__sinks=["trackio"]))
    assert begun.wait(10)
    sys.stdout.write("done\n")
    told.set()
    directory.close()
    assert capsys.readouterr().out.splitlines()[0] == "done"


def test_an_id_is_there_whole_or_not_at_all(
    config: Config, stand_in: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A disk that was full when it was written leaves none that is empty."""

    def cut_off(path: Path, text: str, **options: Any) -> None:
        path.open("w").close()
        raise OSError(errno.ENOSPC, "full", str(path))

    with monkeypatch.context() as patch, pytest.raises(OSError, match="full"):
        patch.setattr(Path, "write_text", cut_off)
        sinks.open_sinks(config(logging__sinks=["trackio"]), tmp_path, None)
    assert not (tmp_path / "run_id").exists()
    [sink] = sinks.open_sinks(config(logging__sinks=["trackio"]), tmp_path, None)
    sink.close(failed=False)
    assert re.fullmatch("[0-9a-f]{8}\n", (tmp_path / "run_id").read_text())


def test_the_real_trackio_resumes_a_run_by_its_name(
    config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio", reason="asks for an older Pillow than the tests are made with")
    from trackio.sqlite_storage import SQLiteStorage

    directory = opened(config(logging__sinks=["trackio"]))
    write_records(directory)
    directory.close()
    again = opened(config(logging__sinks=["trackio"], resume="auto"), 0)
    again.log("train", 1, {"loss": 7.0})
    again.close()
    name = f"t-{(directory.path / 'run_id').read_text().strip()}"
    rows = SQLiteStorage.get_logs("retouch", name)
    assert [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row] == [(1, 0.5), (1, 7.0)]
    assert [row["step"] for row in rows if "evaluation" in row] == [1]
    assert len(SQLiteStorage.get_run_records("retouch")) == 1
