"""`retouch.train`, `retouch.load` and what a run offers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

import retouch
from retouch.config import ConfigError
from retouch.data.base import DataError
from retouch.use import loaded, trained
from tests.command_line import retouch as command
from tests.docs.pages import REPOSITORY, blocks

Finished = Callable[[str], Path]


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image.convert("RGB"))


def test_the_ten_lines_of_the_documentation(
    run_file: Callable[..., dict[str, Any]],
    signs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(yaml.safe_dump(run_file(rollout__group_size=2)), encoding="utf-8")
    shutil.copy(signs / "held_out/test200_source.png", "photo.png")
    shutil.copy(signs / "held_out/test200_mask.png", "mask.png")
    names: dict[str, Any] = {}
    exec(blocks(REPOSITORY / "docs/python.md", "python")[0], names)
    run = names["run"]
    assert (run.config.rollout.group_size, run.config.training.max_steps) == (4, 4)
    assert repr(run) == f"Run('{tmp_path}/runs/t', grpo, step 4)"
    assert [record["step"] for record in run.metrics if record["kind"] == "train"] == [1, 2, 3, 4]
    first, second = names["images"]
    source, hole = pixels(Image.open("photo.png")), np.asarray(Image.open("mask.png").convert("L")) >= 128
    for image in (first, second):
        assert np.array_equal(pixels(image)[~hole], source[~hole])
    assert not np.array_equal(pixels(first), pixels(second))
    assert np.array_equal(pixels(Image.open("open.png")), pixels(first))
    assert names["result"]["images"] == 2
    assert list(names["result"]["means"]) == ["base", "after RL"]
    exported = run.path / "exports/step-000004-safetensors/t-step-000004.safetensors"
    assert capsys.readouterr().out.splitlines()[-1] == str(exported)
    assert run.report() == run.path / "report.html"


def test_samples_are_those_of_the_command(finished: Finished, signs: Path, tmp_path: Path) -> None:
    """From paths and from images alike; raw weights and an older checkpoint are other weights."""
    folder, text = finished("full"), "ABC"
    source, mask = (signs / f"held_out/test201_{part}.png" for part in ("source", "mask"))
    outcome = command(
        *("sample", "--run", folder, "--image", source, "--mask", mask, "--text", text),
        *("--seed", 3, "--count", 2, "--steps", 2, "--out", tmp_path / "out"),
    )
    expected = [pixels(Image.open(path)) for path in outcome.out.splitlines()]
    run = retouch.load(str(folder))
    by_path = run.sample(source, str(mask), text=text, seed=3, count=2, steps=2)
    by_image = run.sample(Image.open(source), Image.open(mask), text=text, seed=3, count=2, steps=2)
    box = Image.open(mask).convert("L").getbbox()  # masks of signs are boxes
    by_box = run.sample(source, box=box, text=text, seed=3, count=2, steps=2)
    for images in (by_path, by_image, by_box):
        assert [np.array_equal(pixels(a), b) for a, b in zip(images, expected, strict=True)] == [True, True]
    for other in (retouch.load(folder, raw=True), retouch.load(folder, checkpoint=folder / "checkpoints/step-000002")):
        assert not np.array_equal(pixels(other.sample(source, mask, text=text, seed=3, steps=2)[0]), expected[0])


def test_a_mistyped_path_loads_no_model(
    finished: Finished, signs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded, "Loaded", lambda config, **_: pytest.fail("loaded"))
    run = retouch.load(finished("full"))
    with pytest.raises(DataError, match=r"no\.png: no such file"):
        run.sample(signs / "held_out/test201_source.png", tmp_path / "no.png", text="A")


def test_weights_are_verified_once(finished: Finished, signs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their digests take seconds for a model of 12 billion parameters."""
    verified: list[Path] = []
    monkeypatch.setattr(trained, "verify_files", lambda folder, part: verified.append(folder))
    run = retouch.load(finished("full"))
    source, mask = (signs / f"held_out/test201_{part}.png" for part in ("source", "mask"))
    for seed in (0, 1):
        run.sample(source, mask, text="A", seed=seed, steps=2)
    assert [folder.name for folder in verified] == ["step-000002", "step-000004"]


def test_an_evaluation_is_that_of_the_command(finished: Finished, signs: Path, tmp_path: Path) -> None:
    data = signs / "held_out"
    outcome = command("eval", "--run", finished("full"), "--data", data, "--images", 1, "--json")
    run = retouch.load(finished("full"))
    assert run.evaluate(data, images=1, out=tmp_path / "grid") == json.loads(outcome.out)
    assert (tmp_path / "grid/grid.png").is_file()


def test_a_run_from_a_mapping_that_reaches_its_time_limit(run_file: Callable[..., dict[str, Any]]) -> None:
    run = retouch.train(run_file(), training={"max_minutes": 1e-4})
    assert [record["event"] for record in run.metrics if record["kind"] == "event"] == ["stopped"]


def test_mistakes_are_one_message(finished: Finished, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a run directory"):
        retouch.load(tmp_path)
    with pytest.raises(ConfigError, match=r"no such run file"):
        retouch.train(tmp_path / "run.yaml")
    with pytest.raises(ConfigError, match=r"rollout\.group_sise: unknown key; .*group_size"):
        retouch.train(finished("full") / "config.yaml", rollout={"group_sise": 4})
    with pytest.raises(ConfigError, match="--mask"):
        retouch.load(finished("full")).sample(Image.new("RGB", (64, 32)), text="A")


@pytest.mark.parametrize("given", [{"count": 0}, {"steps": 0}, {"steps": 1001}, {"resolution": 0}])
def test_counts_that_the_command_does_not_take(
    finished: Finished, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    """0 solver steps were the number of the run, and 0 images none, or the number of the run."""
    monkeypatch.setattr(loaded, "Loaded", lambda config, **_: pytest.fail("loaded"))
    run = retouch.load(finished("full"))
    name = next(iter(given))
    with pytest.raises(ConfigError, match=f"^(--)?{name}: given {given[name]}"):
        run.sample(Image.new("RGB", (64, 32)), box=(0, 0, 32, 32), text="A", **given)
    with pytest.raises(ConfigError, match="--images: given 0; expected 1 to 1000"):
        run.evaluate(images=0)


def test_an_export_into_the_home_directory(finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert retouch.load(finished("full")).export("safetensors", "~/mine").is_relative_to(tmp_path / "mine")


def test_only_what_is_public_is_there() -> None:
    assert {"train", "load", "Run"} <= set(retouch.__all__)
    with pytest.raises(AttributeError, match="no attribute 'tran'"):
        _ = retouch.tran  # pyright: ignore[reportAttributeAccessIssue]
