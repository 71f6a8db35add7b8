"""Folders of images, results and records of `retouch eval --benchmark` that are damaged, hostile, or shared."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from retouch.errors import ConfigError
from retouch.rewards.table import RewardTable, Scores
from retouch.use import benchmark_scores
from retouch.use.benchmark_images import claim
from tests.benchmarks_room import stub_readers
from tests.command_line import Outcome, retouch


@pytest.fixture(scope="module")
def place(signs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A benchmark file with stand-ins for its scorers, and `theirs`: an image for each of its 8 outputs."""
    folder = tmp_path_factory.mktemp("hostile")
    readers = "tests.benchmarks_room.stub_readers"
    rewards = {name: {"scorer": "fn", "fn": f"{readers}:{fn}"} for name, fn in (("ocr", "read"), ("style", "style"))}
    keys = {"name": "calligrapher_self", "path": str(signs / "held_out"), "resolution": [32, 64], "rewards": rewards}
    (folder / "benchmark.yaml").write_text(yaml.safe_dump(keys), encoding="utf-8")
    (folder / "theirs").mkdir()
    for item in range(200, 204):
        for index in (0, 1):
            Image.new("RGB", (64, 32), (item, 40 * index, 90)).save(folder / "theirs" / f"test{item}_{index}.png")
    return folder


@pytest.fixture
def score(place: Path, tmp_path: Path) -> Callable[..., Outcome]:
    """Scores a folder into `tmp_path / "out"`."""

    def run(*arguments: object, images: Path = place / "theirs", out: Path = tmp_path / "out") -> Outcome:
        return retouch("eval", "--benchmark", place / "benchmark.yaml", "--images", images, "--out", out, *arguments)

    return run


def measures(out: Path) -> dict[str, float]:
    (found,) = json.loads((out / "result.json").read_text(encoding="utf-8"))["measures"].values()
    return found


def told(outcome: Outcome, code: int = 2) -> str:
    """The one line of an error."""
    assert outcome.code == code, outcome.err
    (line,) = (line for line in outcome.err.splitlines() if line.startswith("error: "))
    assert "Traceback" not in outcome.err
    return line


@pytest.mark.parametrize(
    ("old", "new"), [(b'"ned": 0.', b'"ned": 9.'), (b'"ned"', b'"nex"'), (b'"exact": false', b'"exact": [1]'),
                     (b'"value": 0', b'"value": 1')],
)  # fmt: skip
def test_a_score_on_record_that_was_changed_is_scored_again(
    score: Callable[..., Outcome], tmp_path: Path, old: bytes, new: bytes
) -> None:
    assert score().code == 0
    right = measures(tmp_path / "out")
    record = tmp_path / "out/observations/theirs.jsonl"
    content = record.read_bytes()
    record.write_bytes(content.replace(old, new, 1))
    stub_readers.SEEN.clear()
    outcome = score()
    assert outcome.code == 0, outcome.err
    assert len(stub_readers.SEEN) == 1
    assert measures(tmp_path / "out") == right


def test_scores_on_record_of_an_earlier_version_are_read(score: Callable[..., Outcome], tmp_path: Path) -> None:
    assert score().code == 0
    record = tmp_path / "out/observations/theirs.jsonl"
    lines = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]
    record.write_text("".join(json.dumps({k: v for k, v in line.items() if k != "check"}) + "\n" for line in lines))
    stub_readers.SEEN.clear()
    assert score().code == 0
    assert not stub_readers.SEEN


@pytest.mark.parametrize("name", ["theirs.jsonl", "theirs.1-of-2.jsonl"])
@pytest.mark.parametrize(
    "put", [os.mkfifo, lambda p: p.symlink_to("/dev/zero"), Path.mkdir, lambda p: p.symlink_to(p)],
    ids=["pipe", "device", "folder", "loop"],
)  # fmt: skip
def test_what_is_no_file_in_place_of_scores_is_not_read(
    score: Callable[..., Outcome], tmp_path: Path, put: Callable[[Path], Any], name: str
) -> None:
    path = tmp_path / "out/observations" / name
    path.parent.mkdir(parents=True)
    put(path)
    assert told(score()) == f"error: --out: {path} is not a file; delete it"


@pytest.mark.parametrize("name", ["result.json", "grid.png"])
def test_a_folder_in_place_of_a_result(score: Callable[..., Outcome], tmp_path: Path, name: str) -> None:
    path = tmp_path / "out" / name
    path.mkdir(parents=True)
    assert told(score(), 1) == f"error: {path}: a folder exists where a file is expected; move it away"
    assert not list(path.parent.glob(".*.tmp"))


@pytest.mark.parametrize("target", ["out", "nothing"])
def test_a_link_to_nothing_in_place_of_the_folder(score: Callable[..., Outcome], tmp_path: Path, target: str) -> None:
    (tmp_path / "out").symlink_to(tmp_path / target)
    assert "where a folder is expected" in told(score(), 2)


def test_a_folder_whose_name_is_not_utf_8(score: Callable[..., Outcome], place: Path, tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"th\xffirs\x1b[31m")
    shutil.copytree(place / "theirs", folder)
    outcome = score(images=folder)
    assert outcome.code == 0, outcome.err
    assert folder.name in json.loads((tmp_path / "out" / "result.json").read_bytes())["measures"]
    assert "\x1b" not in outcome.out
    outcome.out.encode()


@pytest.mark.parametrize("number", ["--5", "-1", "0", "1001", "1000000", "9" * 5000])
def test_numbers_of_images_that_are_none(score: Callable[..., Outcome], number: str) -> None:
    line = told(score("--images", number))
    assert line == f"error: --images: given {number[:20]}; expected one number of 1 to 1000, or folders"


def test_a_function_with_other_details_is_one_line(place: Path, tmp_path: Path) -> None:
    keys = yaml.safe_load((place / "benchmark.yaml").read_text())
    keys["rewards"]["ocr"]["fn"] = "tests.benchmarks_room.stub_readers:style"
    (tmp_path / "benchmark.yaml").write_text(yaml.safe_dump(keys), encoding="utf-8")
    outcome = retouch(
        "eval", "--benchmark", tmp_path / "benchmark.yaml", "--images", place / "theirs", "--out", tmp_path / "out"
    )
    assert "a detail of a score has not the form that Calligrapher self" in told(outcome)


def test_large_images_are_scored_in_bounded_memory(
    score: Callable[..., Outcome], place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch ends, and those before it are waited for, once its images have many pixels; scores stay theirs."""
    folder = tmp_path / "theirs"
    shutil.copytree(place / "theirs", folder)
    assert score(images=folder).code == 0
    right = measures(tmp_path / "out")
    monkeypatch.setattr(benchmark_scores, "_MOST_PIXELS", 64 * 32 * 2)
    sizes, held, most = list[int](), 0, 0
    real, real_result = RewardTable.submit, Scores.result

    def submit(self: RewardTable, items: Any, **options: Any) -> Scores:
        nonlocal held, most
        sizes.append(len(items))
        held += len(items)
        most = max(most, held)
        return real(self, items, **options)

    def result(self: Scores, until: float | None = None) -> Any:
        nonlocal held
        found = real_result(self, until)
        held -= len(next(iter(found.outcomes.values())))
        return found

    monkeypatch.setattr(RewardTable, "submit", submit)
    monkeypatch.setattr(Scores, "result", result)
    (folder / "test201_0.png").write_bytes(b"no image")
    outcome = score(images=folder, out=tmp_path / "again")
    assert outcome.code == 0, outcome.err
    assert sum(sizes) == 14 and max(sizes) == most == 2
    (folder / "test201_0.png").write_bytes((place / "theirs/test201_0.png").read_bytes())
    assert score(images=folder, out=tmp_path / "again").code == 0
    assert measures(tmp_path / "again") == right


@pytest.mark.parametrize("name", ["test_syn.jsonl", "test_syn.parquet", "test_syn.arrow"])
@pytest.mark.parametrize(
    "put", [os.mkfifo, lambda p: p.symlink_to("/dev/zero"), lambda p: p.symlink_to("/nowhere")],
    ids=["pipe", "device", "dead link"],
)  # fmt: skip
def test_what_is_no_file_in_place_of_a_table_is_not_read(
    place: Path, tmp_path: Path, put: Callable[[Path], Any], name: str
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    put(data / name)
    where = ("--path", data, "--images", place / "theirs", "--out", tmp_path / "out")
    assert told(retouch("eval", "--benchmark", "complex_edit", *where)) == f"error: {data / name}: not a file"


def test_a_folder_with_the_name_of_a_table_is_a_folder(place: Path, tmp_path: Path) -> None:
    """As Spark writes tables: `data.parquet/part-0.parquet`."""
    data = tmp_path / "data"
    (data / "test_syn.jsonl").mkdir(parents=True)
    where = ("--path", data, "--images", place / "theirs", "--out", tmp_path / "out")
    said = told(retouch("eval", "--benchmark", "complex_edit", *where))
    assert said.startswith(f"error: --path: {data} holds no ")


# --- the record of a folder of samples ---

ABOUT = {"model": {"path": "a"}, "sampling": {"num_steps": 1}}


def _claimed(folders: Sequence[Path], steps: int, start: Any, done: Any) -> None:
    for folder in folders:
        start.wait()
        try:
            claim(folder, {**ABOUT, "sampling": {"num_steps": steps}})
            done.put(folder)
        except ConfigError:
            pass


def test_of_processes_with_different_settings_one_gets_the_folder(tmp_path: Path) -> None:
    """They start at the same moment; their images would mix."""
    context = multiprocessing.get_context("fork")
    start, done = context.Barrier(4), context.Queue()
    folders = [tmp_path / str(trial) for trial in range(10)]
    processes = [context.Process(target=_claimed, args=(folders, n, start, done)) for n in range(4)]
    for process in processes:
        process.start()
    assert sorted(done.get(timeout=60) for _ in folders) == folders
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4 and done.empty()


def test_images_without_a_record_are_of_unknown_weights(tmp_path: Path) -> None:
    claim(tmp_path / "base", ABOUT)
    Image.new("RGB", (4, 4)).save(tmp_path / "base" / "1.png")
    claim(tmp_path / "base", ABOUT)
    (tmp_path / "base.json").unlink()
    with pytest.raises(ConfigError, match=r"base.json is missing, which names their weights; move them"):
        claim(tmp_path / "base", ABOUT)


def test_a_record_of_another_version_has_other_keys(tmp_path: Path) -> None:
    """A key that it has not is null; a value that differs is named with its place."""
    with_keys = {"model": {"path": "a", "new": None, "train": {"kind": "full"}}, "sampling": {"num_steps": 1}}
    claim(tmp_path / "base", {**ABOUT, "model": {"path": "a", "old": None, "train": {"kind": "full", "old": None}}})
    claim(tmp_path / "base", with_keys)
    for changed, message in (
        ({"path": "a", "new": None, "train": {"kind": "lora"}}, r"another model\.train\.kind \(full, now lora\)"),
        ({"path": "a", "train": {"kind": "full", "rank": 4}}, r"another model\.train\.rank \(None, now 4\)"),
        (None, r"another model \(.*, now None\)"),
    ):
        with pytest.raises(ConfigError, match=message):
            claim(tmp_path / "base", {**with_keys, "model": changed})


@pytest.mark.parametrize("put", [os.mkfifo, Path.mkdir, lambda p: p.symlink_to(p)], ids=["pipe", "folder", "loop"])
def test_what_is_no_file_in_place_of_a_record(tmp_path: Path, put: Callable[[Path], Any]) -> None:
    put(tmp_path / "base.json")
    with pytest.raises(ConfigError, match=r"base.json is not the record of the images"):
        claim(tmp_path / "base", ABOUT)
