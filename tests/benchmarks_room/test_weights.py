"""Benchmarks of trained weights: of a run against its base, and of a text encoder that writes completions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from retouch.data.identity import digest
from tests.algorithms.vlm_runs import RunFile, vlm_file
from tests.command_line import retouch
from tests.data.protocols import write_complex_edit

__all__ = ["vlm_file"]

pytestmark = pytest.mark.full

READERS = "tests.benchmarks_room.stub_readers"


def benchmark_file(file: Path, /, **keys: Any) -> Path:
    file.write_text(yaml.safe_dump(keys), encoding="utf-8")
    return file


def test_a_run_is_compared_with_its_base_and_with_other_runs(
    finished: Callable[[str], Path], signs: Path, tmp_path: Path
) -> None:
    keys: dict[str, Any] = {"name": "calligrapher_self", "path": str(signs / "held_out"), "resolution": [32, 64]}
    rewards = {"ocr": {"scorer": "fn", "fn": f"{READERS}:read"}, "style": {"scorer": "fn", "fn": f"{READERS}:style"}}
    file = benchmark_file(tmp_path / "b.yaml", **keys, num_steps=1, images_per_item=1, rewards=rewards)
    run = finished("full")
    outcome = retouch("eval", "--benchmark", file, "--run", run, "--out", tmp_path / "one", "--json")
    assert outcome.code == 0, outcome.err
    result = json.loads(outcome.out)
    assert list(result["measures"]) == ["base", "warmed-up", "after-RL"]
    assert list(result["differences"]) == ["warmed-up - base", "after-RL - warmed-up"]
    values = [of["ned"] for of in result["measures"].values()]
    assert len(set(values)) == 3
    [value, low, high] = result["differences"]["after-RL - warmed-up"]["ned"]
    assert value == pytest.approx(values[2] - values[1]) and low <= value <= high
    about = result["weights"]["after-RL"]
    assert about["sha256"] == {p.name: digest(p) for p in Path(about["folder"]).iterdir() if p.is_file()}
    several = retouch(
        "eval", "--benchmark", file, "--run", run, "--run", finished("lora"), "--out", tmp_path / "two", "--json"
    )
    assert several.code == 0, several.err
    both = json.loads(several.out)
    assert list(both["measures"]) == ["base", "full", "lora"]
    assert both["measures"]["full"] == result["measures"]["after-RL"]
    assert both["measures"]["base"] == result["measures"]["base"]


def test_completions_are_saved_beside_their_images(vlm_file: RunFile, tmp_path: Path) -> None:
    write_complex_edit(tmp_path / "data", real=2, syn=0)
    rewards = {"complex_edit": {"scorer": "fn", "fn": f"{READERS}:judged"}}
    keys = {"name": "complex_edit", "path": str(tmp_path / "data"), "num_steps": 1, "rewards": rewards}
    file = benchmark_file(tmp_path / "b.yaml", **keys)
    command = ("eval", "--benchmark", file, "--config", vlm_file(), "--out", tmp_path / "out", "--json", "--images", 2)
    outcome = retouch(*command)
    assert outcome.code == 0, outcome.err
    folder = tmp_path / "out/images/base/test_real/complexity_8"
    names = {"0000.png", "0000_1.png", "0001.png", "0001_1.png"}
    assert {path.name for path in folder.glob("*.png")} == names
    assert {path.with_suffix(".png").name for path in folder.glob("*.txt")} == names
    result = json.loads(outcome.out)
    assert result["weights"]["base"]["images"] == 4
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / "0001_1.png").unlink()
    again = retouch(*command)
    assert again.code == 0, again.err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert json.loads(again.out)["measures"] == result["measures"]
