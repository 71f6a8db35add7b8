"""Errors of the file system through the command line: exit code 1 and one line, never a traceback."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import save_file

from retouch.files.disk import file_problem, write_whole, writing
from retouch.imaging.png import write_png
from retouch.process import machine
from retouch.process.machine import Machine
from retouch.process.replacing import beside
from tests.command_line import Outcome, retouch

FULL = "free space, or set --out to another disk"


def failed(outcome: Outcome, code: int = 1) -> str:
    """The last line of a run that failed, with nothing like a traceback before it."""
    assert outcome.code == code and "Traceback" not in outcome.err, outcome.err
    line = outcome.err.splitlines()[-1]
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


@pytest.fixture
def run_yaml(run_file: Callable[..., dict[str, Any]], tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(run_file(training__max_steps=1)), encoding="utf-8")
    return path


@contextlib.contextmanager
def no_file_over_a_kilobyte() -> Iterator[None]:
    """As on a full disk: the system refuses, whichever library writes. No fixture: before its end pytest writes that
    the test has passed, to a file perhaps."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (lambda path: save_file({"a": torch.zeros(9999)}, path), "file too large"),
        (lambda path: torch.save({"a": torch.zeros(9999)}, path), "writing was cut off, as on a full disk"),
        (lambda path: Image.effect_noise((99, 99), 90).save(path, "PNG"), "file too large"),
        (lambda path: path.write_bytes(bytes(9999)), "file too large"),
    ],
    ids=["safetensors", "torch", "Pillow", "Python"],
)
def test_every_library_that_cannot_write(tmp_path: Path, write: Callable[[Path], object], reason: str) -> None:
    with pytest.raises(OSError) as raised, no_file_over_a_kilobyte(), writing(tmp_path / "run"):
        write(tmp_path / "file")
    assert file_problem(raised.value) == f"{tmp_path / 'run'}: {reason}; {FULL}"


def test_what_is_not_the_disks_keeps_its_traceback() -> None:
    for error in (RuntimeError("shapes differ"), ValueError("os error 28"), ConnectionRefusedError(111, "refused")):
        with pytest.raises(type(error)) as raised, writing("run"):
            raise error
        assert raised.value is error
    assert file_problem(FileNotFoundError(errno.ENOENT, "No such file", "x")) is None
    assert file_problem(PermissionError(errno.EPERM, "not yours")) is None


@pytest.mark.parametrize("target", ["my.yaml", "my.yaml/below"])
def test_a_file_where_a_folder_should_be(run_yaml: Path, tmp_path: Path, target: str) -> None:
    (tmp_path / "my.yaml").write_text("kept")
    place = tmp_path / target
    says = "a file exists where a folder is expected; set --out to a folder"
    trained = failed(retouch("train", run_yaml, f"logging.dir={place}"), 2)
    assert trained.endswith(f": {says.replace('--out', 'logging.dir')}")
    assert failed(retouch("data", "precompute", run_yaml, "--out", place), 2) == f"{place}: {says}"
    edits = retouch("data", "edits", "--count", 1, "--out", place)
    if target == "my.yaml":  # the folder itself is looked at before anything is made
        assert (edits.code, edits.err) == (2, f"error: {place} is a file; give a folder as --out\n")
    else:
        assert failed(edits, 2) == f"{place}: {says}"
    assert (tmp_path / "my.yaml").read_text() == "kept"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_folder_that_is_read_only(
    run_yaml: Path, signs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(self: Path, *_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number), str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    reason = f"{os.strerror(number).lower()}; change its permissions, or set --out to a writable folder"
    for command in (
        ("train", run_yaml, f"logging.dir={tmp_path}/ro"),
        ("sample", "--config", run_yaml, "--data", signs / "held_out", "--out", tmp_path / "ro"),
        ("data", "precompute", run_yaml, "--out", tmp_path / "ro"),
        ("data", "edits", "--count", 1, "--out", tmp_path / "ro"),
        ("data", "synth", "--count", 1, "--out", tmp_path / "ro"),
    ):
        says = failed(retouch(*command))
        told = reason.replace("--out", "logging.dir") if command[0] == "train" else reason
        assert says.startswith(f"{tmp_path}/ro") and says.endswith(f": {told}"), says


def test_a_disk_that_is_full_when_a_checkpoint_is_saved(
    run_yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534")

    monkeypatch.setattr(torch, "save", full)
    says = failed(retouch("train", run_yaml))
    assert says == f"{tmp_path}/runs/t: writing was cut off, as on a full disk; {FULL.replace('--out', 'logging.dir')}"


def test_a_disk_that_is_full_when_pictures_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Image.Image, "save", full)
    for kind in ("edits", "synth"):
        says = failed(retouch("data", kind, "--count", 1, "--out", tmp_path / kind))
        assert says == f"{tmp_path / kind}: no space left on device; {FULL}"


def test_a_disk_that_is_full_when_weights_are_exported(
    finished: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    checkpoint = finished("lora") / "checkpoints" / "step-000004"
    monkeypatch.setattr("retouch.adapters.export.write_tensors", full)
    says = failed(retouch("export", checkpoint, "--to", "diffusers-lora", "--out", tmp_path / "x"))
    assert says == f"{tmp_path / 'x'}: no space left on device; {FULL}"


def test_what_could_not_be_read_lies_elsewhere(tmp_path: Path) -> None:
    """No advice about where to write; and another option is named where it says the place."""
    with pytest.raises(OSError) as raised, writing(tmp_path / "run"):
        raise PermissionError(errno.EACCES, "Permission denied", "/data/train.json")
    assert file_problem(raised.value) == "/data/train.json: permission denied; change its permissions"
    with pytest.raises(OSError) as raised, writing(tmp_path / "run", "--endpoints and --log-dir"):
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "run" / "x"))
    says = "permission denied; change its permissions, or set --endpoints and --log-dir to a writable folder"
    assert file_problem(raised.value) == f"{tmp_path / 'run' / 'x'}: {says}"


def test_what_could_not_be_written_whole_leaves_nothing(tmp_path: Path) -> None:
    """The file before stays, and no temporary file, also of a name as long as a name can be."""
    for name in ("a.json", "x" * 250 + ".json"):
        (tmp_path / name).write_text("before")
        with pytest.raises(UnicodeEncodeError):
            write_whole(tmp_path / name, "\ud800")
        assert (tmp_path / name).read_text() == "before"
        write_whole(tmp_path / name, "after")
        assert (tmp_path / name).read_text() == "after"
    write_png(Image.new("L", (2, 2)), tmp_path / ("y" * 250 + ".png"))
    with pytest.raises(OSError, match="mode"):
        write_png(Image.new("F", (2, 2)), tmp_path / "z.png")
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("kind", ["is_char_device", "is_block_device"])
@pytest.mark.parametrize("write", [write_whole, lambda path, text: write_png(Image.new("RGB", (1, 1)), path)])
def test_a_device_is_not_replaced(
    write: Callable[[Path, str], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """`--out /dev/null` would be a file from then on, where root runs it; a file stands in for it here."""
    (device := tmp_path / "null").write_text("a device")
    monkeypatch.setattr(Path, kind, lambda path: path == device)
    with pytest.raises(OSError, match="not a file") as raised:
        write(device, "a")
    assert device.read_text() == "a device" and [*tmp_path.iterdir()] == [device]
    assert file_problem(raised.value) == f"{device}: not a file; give the path of a file"


def test_the_pipe_behind_standard_output_is_not_replaced(tmp_path: Path) -> None:
    """`/dev/stdout` is a link to it in `retouch ... --out /dev/stdout | less`."""
    os.mkfifo(tmp_path / "pipe")
    (link := tmp_path / "stdout").symlink_to("pipe")
    with pytest.raises(OSError, match="not a file") as raised:
        write_whole(link, "a")
    assert file_problem(raised.value) == f"{link}: not a file; give the path of a file"
    assert link.is_symlink() and link.is_fifo() and sorted(tmp_path.iterdir()) == [tmp_path / "pipe", link]


def test_a_folder_that_takes_no_file_is_named_by_the_file(tmp_path: Path) -> None:
    """Not by one beside it, which nobody asked for."""
    target = tmp_path / "gone" / "page.html"
    with pytest.raises(OSError, match=r"page\.html'") as raised, writing(target.parent, "--out"):
        write_whole(target, "a")
    assert file_problem(raised.value) == f"{target}: no such file or directory; set --out to a writable folder"
    (tmp_path / "file").write_text("a")
    with pytest.raises(OSError, match=r"file/page\.html'"):  # what removes the file beside it fails as well
        write_whole(tmp_path / "file/page.html", "a")
    with pytest.raises(FileNotFoundError) as raised, writing(tmp_path, "--out"):
        (tmp_path / "to_be_read").read_text()
    assert file_problem(raised.value) is None


def test_containers_with_the_same_pid_write_a_file_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each writes one of its own beside it; the second would have deleted that of the first."""
    path = tmp_path / "shared.json"
    with beside(path) as first:
        first.write_text("first")
        monkeypatch.setattr(machine, "this_machine", lambda: Machine("another", ""))
        write_whole(path, "second")
        assert path.read_text() == "second"
        first.replace(path)
    assert path.read_text() == "first" and list(tmp_path.iterdir()) == [path]
