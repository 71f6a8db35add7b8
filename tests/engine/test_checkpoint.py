"""Checkpoints that go: at no moment does a part of one look like a whole."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from retouch.engine.saved import complete_checkpoints, discard, drop_unfinished, put_in_place


def checkpoint(folder: Path, content: str) -> Path:
    folder.mkdir()
    (folder / "weights.safetensors").write_text(content)
    (folder / "complete.json").write_text('{"step": 40}')
    return folder


def test_a_deletion_that_is_cut_short_leaves_nothing_that_looks_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(tmp_path / "step-000040", "old")

    def cut_short(path: Path, ignore_errors: bool = False) -> None:
        if path.exists():
            (path / "weights.safetensors").unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(shutil, "rmtree", cut_short)
        discard(folder)
    assert complete_checkpoints(tmp_path) == []
    checkpoint(folder, "again")
    discard(folder)  # over what the first left behind
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_takes_the_place_of_one_of_the_same_step(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "step-000040", "old")
    put_in_place(checkpoint(tmp_path / ".writing-step-000040", "new"), folder)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000040"]
    assert (folder / "weights.safetensors").read_text() == "new"


def test_a_kill_while_the_old_one_is_deleted_leaves_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(tmp_path / "step-000040", "old")

    def killed(path: Path, ignore_errors: bool = False) -> None:
        if path.exists():
            raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        put_in_place(checkpoint(tmp_path / ".writing-step-000040", "new"), folder)
    assert complete_checkpoints(tmp_path) == [folder]
    assert (folder / "weights.safetensors").read_text() == "new"


def test_a_kill_between_the_two_renames_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint(tmp_path / "step-000040", "old")
    rename = Path.rename

    def killed(path: Path, target: Path) -> Path:
        if path.name.startswith(".writing-step"):
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "rename", killed)
        put_in_place(checkpoint(tmp_path / ".writing-step-000040", "new"), folder)
    [left] = complete_checkpoints(tmp_path)
    assert (left / "weights.safetensors").read_text() == "old"

    drop_unfinished(tmp_path)  # what the run that goes on from it does, before it comes to that step again
    put_in_place(checkpoint(tmp_path / ".writing-step-000040", "again"), folder)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000040"]
    assert (folder / "weights.safetensors").read_text() == "again"


def test_one_that_was_moved_aside_is_not_counted_beside_its_successor(tmp_path: Path) -> None:
    checkpoint(tmp_path / ".replaced-step-000040", "old")
    folder = checkpoint(tmp_path / "step-000040", "new")
    assert complete_checkpoints(tmp_path) == [folder]
    put_in_place(checkpoint(tmp_path / ".writing-step-000040", "newer"), folder)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000040"]


def test_one_that_has_a_successor_never_counts_again(tmp_path: Path) -> None:
    """Killed before it was deleted; its successor is pruned later."""
    checkpoint(tmp_path / ".replaced-step-000040", "old")
    folder = checkpoint(tmp_path / "step-000040", "new")
    drop_unfinished(tmp_path)
    discard(folder)
    assert complete_checkpoints(tmp_path) == [] and list(tmp_path.iterdir()) == []
