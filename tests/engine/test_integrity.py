"""What a checkpoint holds is what was written: every byte of every file, and nothing that no run could have written."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from retouch.engine import CheckpointError, Checkpoints, Policy
from retouch.engine.checkpoint import verify_once
from retouch.engine.saved import (
    read_complete,
    read_state,
    record_files,
    require_sound,
    saved_run_file,
    sound_state,
    verify_files,
)
from retouch.files.saved_tensors import DamagedFile, load_saved

from .test_engine import checkpoints, engine_for, linear

FILES = [
    "weights/w.pt",
    "ema/w.pt",
    "snapshots/old.safetensors",
    "optimizer.pt",
    "rng.pt",
    "rollouts.safetensors",
    "state.json",
]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint with everything that one may hold."""
    net = linear()
    engine, policy = engine_for(net), Policy(net)
    policy.snapshot("ema")
    policy.snapshot("old")
    engine.backward(engine.network(torch.ones(2, 2)).square().sum())
    engine.step(lr=0.1)
    return checkpoints(tmp_path).save(3, engine, policy, {"step": 3}, {"latents": torch.arange(3.0)})


def load(folder: Path) -> tuple[dict[str, Any], Any]:
    net = linear()
    store: Checkpoints = checkpoints(folder.parent)
    return store.load(folder, engine_for(net), Policy(net))


def test_all_files_are_recorded(saved: Path) -> None:
    assert set(read_complete(saved)["files"]) == set(FILES)
    assert load(saved)[0] == {"step": 3}


@pytest.mark.parametrize("name", FILES)
def test_one_flipped_bit_is_found_and_its_file_is_named(saved: Path, name: str) -> None:
    whole = (saved / name).read_bytes()
    for place in (0, len(whole) // 2, len(whole) - 1):
        (saved / name).write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(CheckpointError, match=rf"damaged \({name}: its SHA-256 differs from complete\.json\)"):
            load(saved)
    (saved / name).write_bytes(whole)
    load(saved)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(saved: Path, name: str) -> None:
    """Without its rollouts a checkpoint inside an epoch would go on with other ones."""
    (saved / name).unlink()
    with pytest.raises(CheckpointError, match=rf"damaged \({name} is missing\)"):
        load(saved)


def test_a_part_is_compared_alone(saved: Path) -> None:
    (saved / "optimizer.pt").write_bytes(b"")
    verify_files(saved, "weights")
    with pytest.raises(CheckpointError, match="optimizer"):
        verify_files(saved)


def test_older_checkpoints_list_names_alone(saved: Path) -> None:
    complete = read_complete(saved)
    complete["files"] = [*complete["files"], "weights"]
    (saved / "complete.json").write_text(json.dumps(complete))
    load(saved)
    (saved / "rollouts.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"rollouts\.safetensors is missing"):
        load(saved)


def with_tensor(saved: Path, name: str, change: Callable[[Any], None]) -> None:
    """Change a file of tensors, and record it as if it had been written so."""
    content = torch.load(saved / name, weights_only=True)
    change(content)
    torch.save(content, saved / name)
    complete = read_complete(saved)
    complete["files"] = record_files(saved)
    (saved / "complete.json").write_text(json.dumps(complete))


def test_weights_and_moments_are_finite(saved: Path) -> None:
    with_tensor(saved, "optimizer.pt", lambda c: c["optimizer"]["state"][0]["exp_avg"].fill_(float("nan")))
    with pytest.raises(CheckpointError, match=r"optimizer: optimizer\.state\.0\.exp_avg contains NaN or Inf"):
        load(saved)


@pytest.mark.parametrize("part", ["weights", "ema"])
def test_weights_are_finite(saved: Path, part: str) -> None:
    with_tensor(saved, f"{part}/w.pt", lambda c: c["weight"].fill_(float("inf")))
    with pytest.raises(CheckpointError, match=rf"{part}: weight contains NaN or Inf"):
        load(saved)


def test_every_process_is_told(saved: Path) -> None:
    class Second:
        rank = 1
        world_size = 2

        def gather_list(self, values: Any) -> list[Any]:
            return ["a file is missing", *values]

    with pytest.raises(CheckpointError, match="a file is missing"):
        verify_once(saved, Second())


def test_a_file_that_cannot_be_read_is_no_traceback(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad sector, a stale handle of a network disk: the first process alone would see it."""

    def unreadable(path: Path) -> str:
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr("retouch.files.complete._digest", unreadable)
    with pytest.raises(CheckpointError, match=r"damaged \(.*Input/output error"):
        load(saved)


def test_an_old_checkpoint_whose_list_is_damaged_does_not_stop_the_next_save(tmp_path: Path) -> None:
    net = linear()
    engine, policy, store = engine_for(net), Policy(net), checkpoints(tmp_path, keep=1)
    (store.save(1, engine, policy, {}) / "complete.json").write_text("{")
    for step in (2, 3):
        store.save(step, engine, policy, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000003"]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", "{}", '{"files": 3}', '{"files": []}', '{"files": {}}', '{"files": [3]}', "\ufffd", "[" * 10**5],
)
def test_a_damaged_list_of_files_is_no_traceback(saved: Path, text: str) -> None:
    (saved / "complete.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"damaged \(complete\.json"):
        load(saved)


@pytest.mark.parametrize("name", ["ema/more.safetensors", "snapshots/reference.safetensors", "more.pt"])
def test_tensors_that_were_added_are_named(saved: Path, name: str) -> None:
    (saved / name).write_bytes((saved / "snapshots/old.safetensors").read_bytes())
    (saved / "README.md").write_text("A model card is no part of what is loaded.")
    with pytest.raises(CheckpointError, match=rf"damaged \({name} is not in complete\.json\)"):
        load(saved)
    (saved / name).unlink()
    load(saved)


@pytest.mark.parametrize("name", ["/dev/zero", "weights", "a\0b", "x" * 300, "\ud800"])
def test_a_list_of_what_are_no_files(saved: Path, name: str) -> None:
    """A device has no end."""
    complete = read_complete(saved)
    complete["files"][name] = {"bytes": 0, "sha256": ""}
    (saved / "complete.json").write_text(json.dumps(complete))
    with pytest.raises(CheckpointError, match="damaged"):
        load(saved)


# --- state.json ---

STATE: dict[str, Any] = {
    "progress": {"step": 3, "phase": "rl", "epoch": 1, "position": 0, "updates": 3, "updates_in_epoch": 0},
    "config": "name: x",
    "evaluated_at": 0,
    "rewards": {"asked": 4, "failed": 0, "golden": {"ocr": [0.5, 1.0]}},
}


def test_a_sound_state_is_taken_of_today_and_of_older_versions(saved: Path) -> None:
    require_sound(STATE, saved)
    require_sound({"progress": {"step": 3, "phase": "rl"}, "config": "", "something": "newer"}, saved)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("progress.step", -1), ("progress.step", 10**30), ("progress.step", 3.0), ("progress.step", "3"),
        ("progress.step", True), ("progress.step", 4), ("progress.phase", "after"), ("progress.epoch", -1),
        ("progress.position", 2**60), ("progress.updates", None), ("progress.on_policy", 1), ("progress", []),
        ("config", 3), ("evaluated_at", "never"), ("rewards.asked", -4), ("rewards.golden", {"ocr": [float("nan")]}),
        ("rewards.golden", {"ocr": ["1"]}), ("rewards", 1),
    ],
)  # fmt: skip
def test_a_state_that_no_run_wrote_is_refused(saved: Path, path: str, value: object) -> None:
    state = json.loads(json.dumps(STATE))
    inside, names = state, path.split(".")
    for name in names[:-1]:
        inside = inside[name]
    inside[names[-1]] = value
    with pytest.raises(CheckpointError, match=r"damaged \(state\.json"):
        require_sound(state, saved)


def test_a_pipe_or_a_device_in_place_of_the_state_is_not_read(saved: Path) -> None:
    (saved / "state.json").unlink()
    os.mkfifo(saved / "state.json")
    with pytest.raises(CheckpointError, match=r"damaged \(state\.json is missing\)"):
        sound_state(saved)
    with pytest.raises(CheckpointError, match="damaged"):
        read_state(saved)
    (saved / "state.json").unlink()
    (saved / "state.json").symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match="damaged"):
        read_state(saved)


@pytest.mark.parametrize(
    "text", ["", "- 1", "a: [1", "[" * 5000, "&a [*a]", "a: 2001-13-45\n- 1", "a: \0", "a: " + "9" * 5000]
)
def test_a_run_file_of_a_state_that_is_none(saved: Path, text: str) -> None:
    with pytest.raises(CheckpointError, match=r"damaged \(state\.json: config is"):
        saved_run_file({"config": text}, saved)
    assert saved_run_file({"config": "name: x"}, saved) == {"name": "x"}


# --- files of torch.save ---


def test_an_archive_that_grows_is_refused_unread(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", b"\0" * 10_000_000)
    assert (tmp_path / "bomb.pt").stat().st_size < 20_000
    with pytest.raises(DamagedFile, match="compressed"):
        load_saved(tmp_path / "bomb.pt")


def test_whatever_a_damaged_file_makes_torch_raise_is_one_error(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3), "b": [1, "x"]}, tmp_path / "t.pt")
    whole = (tmp_path / "t.pt").read_bytes()
    refused = 0
    for place in range(0, len(whole), 7):
        (tmp_path / "t.pt").write_bytes(whole[:place] + bytes([whole[place] ^ 255]) + whole[place + 1 :])
        try:
            load_saved(tmp_path / "t.pt")
        except DamagedFile as error:
            refused += bool(str(error))
    assert refused > 20
    (tmp_path / "t.pt").write_bytes(whole)
    assert load_saved(tmp_path / "t.pt") == {"a": pytest.approx(torch.ones(3)), "b": [1, "x"]}
