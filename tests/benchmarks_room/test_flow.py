"""`retouch eval --benchmark` with a tiny base: killed and started again, on shards, with images of another program."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from retouch.benchmarks.outputs import Shard
from retouch.observe.distances import fid, kid
from retouch.use import benchmark, benchmark_images, benchmark_scores
from retouch_bench.benchmarks.calligrapher import CalligrapherSelf
from tests.benchmarks_room import stub_readers
from tests.command_line import Outcome, retouch
from tests.conftest import small_run

Eval = Callable[..., Outcome]


@pytest.fixture(scope="module")
def place(signs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run file, and a benchmark file with stand-ins for its scorers: four items, two images each."""
    folder = tmp_path_factory.mktemp("benchmark")
    run = small_run(signs, folder / "runs", rollout__batch_size_per_device=3)
    (folder / "run.yaml").write_text(yaml.safe_dump(run), encoding="utf-8")
    readers = "tests.benchmarks_room.stub_readers"
    keys = {
        "name": "calligrapher_self",
        "path": str(signs / "held_out"),
        "resolution": [32, 64],
        "num_steps": 1,
        "rewards": {
            "ocr": {"scorer": "fn", "fn": f"{readers}:read"},
            "style": {"scorer": "fn", "fn": f"{readers}:style"},
        },
    }
    (folder / "benchmark.yaml").write_text(yaml.safe_dump(keys), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def sharded(place: Path) -> tuple[list[Outcome], Path]:
    """Two shards, one after the other, and their folder. Do not write to it."""
    out = place / "sharded"
    common = ("eval", "--benchmark", place / "benchmark.yaml", "--config", place / "run.yaml", "--out", out)
    return [retouch(*common, "--shard", shard) for shard in ("1/2", "2/2")], out


def result_in(out: Path) -> dict[str, Any]:
    return json.loads((out / "result.json").read_text(encoding="utf-8"))


def test_the_last_shard_writes_the_result(sharded: tuple[list[Outcome], Path], place: Path) -> None:
    outcomes, out = sharded
    assert [outcome.code for outcome in outcomes] == [0, 0], [outcome.err for outcome in outcomes]
    assert outcomes[0].out == ""
    assert outcomes[1].out.startswith("Calligrapher self")
    result = result_in(out)
    assert (result["data"]["items"], result["weights"]["base"]["images"]) == (4, 8)
    assert sorted(path.name for path in (out / "observations").iterdir()) == [
        "base.1-of-2.jsonl", "base.2-of-2.jsonl",
    ]  # fmt: skip
    lines = [line for path in (out / "observations").iterdir() for line in path.read_text().splitlines()]
    observed = [json.loads(line) for line in lines]
    values = [o["outcomes"]["ocr"]["detail"]["ned"] for o in observed if "ocr" in o["outcomes"]]
    assert len(values) == 8
    assert result["measures"]["base"]["ned"] == pytest.approx(sum(values) / 8)
    about = result["weights"]["base"]
    assert about["sampling"] == {
        "num_steps": 1, "guidance_scale": 30.0, "resolution": [32, 64], "seed": 0, "mixed_precision": "no",
    }  # fmt: skip
    assert result["rewards"]["ocr"]["revision"].startswith("fn tests.benchmarks_room.stub_readers:read ")


def test_a_shard_scores_the_images_that_it_sampled(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks hold images of one shape: of a run on shapes they are others than those of the list alone."""
    data, run = tmp_path / "signs", yaml.safe_load((place / "run.yaml").read_text(encoding="utf-8"))
    data.mkdir()
    for n in range(5):
        size = (64, 32) if n % 2 else (32, 64)
        Image.new("RGB", size, "white").save(data / f"test{n}_source.png")
        mask = Image.new("L", size)
        mask.paste(255, (8, 8, 24, 24))
        mask.save(data / f"test{n}_mask.png")
    (data / "self_bench.txt").write_text("".join(f"{n}-ABCD\n" for n in range(5)), encoding="utf-8")
    shapes = {"pixels": 2048, "multiple": 16}
    run["data"]["resolution"] = run["evaluation"]["data"]["resolution"] = shapes
    run["rollout"]["batch_size_per_device"] = 3
    given = yaml.safe_load((place / "benchmark.yaml").read_text(encoding="utf-8"))
    del given["resolution"]
    for name, content in (("run", run), ("benchmark", given)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")

    def sampled(config: Any, weights: Any, section: Any, outputs: Any, folder: Path, shard: Shard, asked: Any) -> None:
        for chunk in benchmark_images.chunks_of(config, section, outputs, shard, asked):
            for output in chunk:
                Image.new("RGB", (8, 8)).save(folder / "base" / output.own_file)

    monkeypatch.setattr(benchmark, "sample_outputs", sampled)
    monkeypatch.setattr(CalligrapherSelf, "official", replace(CalligrapherSelf.official, resolution=None))
    common = ("--config", tmp_path / "run.yaml", "--path", data, "--out", tmp_path / "out")
    ended = [
        retouch("eval", "--benchmark", tmp_path / "benchmark.yaml", *common, "--shard", f"{n}/3") for n in (1, 2, 3)
    ]
    assert [one.code for one in ended] == [0, 0, 0], [one.err for one in ended]
    assert [bool(one.out) for one in ended] == [False, False, True]


def test_a_start_after_a_kill_does_what_is_missing(
    sharded: tuple[list[Outcome], Path], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between sampling and scoring, an image lost, a scored line cut off: then all is as in one piece, and as on
    two shards."""
    out = place / "resumed"
    command = ("eval", "--benchmark", place / "benchmark.yaml", "--config", place / "run.yaml", "--out", out)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(benchmark_scores, "score", killed)
        assert retouch(*command).code != 0
    assert not (out / "result.json").exists()
    kept = {path: path.stat().st_mtime_ns for path in (out / "images/base").iterdir()}
    assert len(kept) == 8
    (out / "images/base/test203_1.png").unlink()
    first = retouch(*command)
    assert first.code == 0, first.err
    samples, other = out / "images/base", sharded[1] / "images/base"
    assert {p.name: p.read_bytes() for p in samples.iterdir()} == {p.name: p.read_bytes() for p in other.iterdir()}
    assert result_in(out) == result_in(sharded[1])
    unchanged = [path for path, at in kept.items() if path.stat().st_mtime_ns == at]
    assert len(unchanged) == 6  # the lost image shared its batch with one other

    path = out / "observations/base.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 16  # each reward is recorded as it comes
    path.write_bytes(b"".join(line for line in lines if b'"test202_0.png"' not in line or b'"ocr"' not in line)[:-30])
    stub_readers.SEEN.clear()
    monkeypatch.setattr(benchmark_images, "_sample_chunk", None)  # nothing is sampled any more
    again = retouch(*command)
    assert again.code == 0, again.err
    assert len(stub_readers.SEEN) == 1
    assert result_in(out) == result_in(sharded[1])


def test_other_weights_or_settings_do_not_mix_with_kept_images(
    sharded: tuple[list[Outcome], Path], place: Path
) -> None:
    out = place / "mixed"
    shutil.copytree(sharded[1], out)
    changed = place / "changed.yaml"
    changed.write_text((place / "benchmark.yaml").read_text().replace("num_steps: 1", "num_steps: 2"))
    outcome = retouch("eval", "--benchmark", changed, "--config", place / "run.yaml", "--out", out)
    assert outcome.code == 2
    assert "holds images of another sampling.num_steps (1, now 2)" in " ".join(outcome.err.split())
    assert "give another --out" in " ".join(outcome.err.split())


def test_other_items_do_not_mix_with_kept_images(
    sharded: tuple[list[Outcome], Path], place: Path, signs: Path, tmp_path: Path
) -> None:
    """Other data have the same official names: the images would be scored against texts that they never had."""
    out, other = tmp_path / "out", tmp_path / "signs"
    shutil.copytree(sharded[1], out)
    shutil.copytree(signs / "held_out", other)
    source = sorted(other.glob("*_source.png"))[-1]
    Image.new("RGB", Image.open(source).size).save(source)
    command = ("eval", "--benchmark", place / "benchmark.yaml", "--config", place / "run.yaml", "--out", out)
    outcome = retouch(*command, "--path", other)
    assert outcome.code == 2
    assert "was sampled for another item: other data have the same official names" in " ".join(outcome.err.split())


def test_a_result_of_another_benchmark_is_kept(sharded: tuple[list[Outcome], Path], place: Path) -> None:
    """Its name is looked for in result.json, and before there is one in the record of each folder of images."""
    out = place / "other"
    shutil.copytree(sharded[1], out)
    for name, told in (("result.json", "benchmark"), ("images/base.json", None)):
        content = json.loads((out / name).read_text())
        (content if told is None else content[told])["name" if told else "benchmark"] = "brushbench"
        (out / name).write_text(json.dumps(content))
    before = (out / "result.json").read_bytes()
    command = ("eval", "--benchmark", place / "benchmark.yaml", "--config", place / "run.yaml", "--out", out)
    outcome = retouch(*command)
    assert outcome.code == 2
    assert "holds the result of brushbench, given the benchmark calligrapher_self" in " ".join(outcome.err.split())
    assert (out / "result.json").read_bytes() == before
    (out / "result.json").unlink()
    outcome = retouch(*command)
    assert outcome.code == 2
    assert "images of another benchmark (brushbench, now calligrapher_self)" in " ".join(outcome.err.split())


def test_images_of_another_program_are_scored_without_a_model(
    sharded: tuple[list[Outcome], Path], place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is missing, one is no output, one cannot be read, one is a JPEG: each is told, and none is a number."""
    monkeypatch.setattr(benchmark, "sample_outputs", None)
    folder = tmp_path / "theirs"
    shutil.copytree(sharded[1] / "images" / "base", folder)
    (folder / "test200_0.png").unlink()
    (folder / "test201_0.png").write_bytes(b"no image")
    Image.open(folder / "test202_0.png").save(folder / "test202_0.jpg", quality=95)
    (folder / "test202_0.png").unlink()
    Image.new("RGB", (4, 4)).save(folder / "extra.png")
    out = tmp_path / "out"
    outcome = retouch("eval", "--benchmark", place / "benchmark.yaml", "--images", folder, "--out", out)
    assert outcome.code == 0, outcome.err
    told = " ".join(outcome.err.split())
    assert "1 of 8 images missing" in told
    assert "not scored, because it is no output of the benchmark: 1 image; the first: extra.png" in told
    result = result_in(out)
    about = result["weights"]["theirs"]
    assert (about["images"], about["missing_files"]) == (7, ["test200_0.png"])
    assert about["failures"] == {"ocr": {"bad_item": 1}, "style": {"bad_item": 1}}
    assert "theirs: 7 images, 1 missing, failed scores: 1 x ocr, 1 x style" in outcome.out
    assert "theirs: 1 missing image; theirs: 2 failed scores" in outcome.out
    beside = retouch(
        "eval", "--benchmark", place / "benchmark.yaml", "--images", sharded[1] / "images" / "base",
        "--images", folder, "--out", out, "--json",
    )  # fmt: skip
    assert list(json.loads(beside.out)["differences"]) == ["theirs - base"]


def test_images_of_another_program_are_compared_with_the_weights(
    sharded: tuple[list[Outcome], Path], place: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(sharded[1], out)
    theirs = shutil.copytree(out / "images" / "base", tmp_path / "theirs")
    outcome = retouch(
        "eval", "--benchmark", place / "benchmark.yaml", "--config", place / "run.yaml", "--images", theirs,
        "--out", out, "--json",
    )  # fmt: skip
    assert list(json.loads(outcome.out)["differences"]) == ["theirs - base"]


def test_prompts_alone_need_a_family_that_generates(place: Path, tmp_path: Path) -> None:
    (tmp_path / "test.txt").write_text('a sign that says "OPEN"\n', encoding="utf-8")
    outcome = retouch(
        "eval", "--benchmark", "ocr_prompts", "--path", tmp_path / "test.txt", "--config", place / "run.yaml",
        "--out", tmp_path / "out",
    )  # fmt: skip
    assert outcome.code == 2
    assert "--run: flux_fill needs mask, source of each item, but" in " ".join(outcome.err.split())


@pytest.mark.parametrize(("visible", "left"), [(None, "2"), ("4,5,6,7", "6"), ("", "")])
def test_under_torchrun_the_rank_is_the_shard(visible: str | None, left: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process sees its own GPU and no launcher: they do not wait for each other."""
    for name, value in {"RANK": "6", "WORLD_SIZE": "8", "LOCAL_RANK": "2", "MASTER_ADDR": "x"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert benchmark.launcher_shard() == Shard(6, 8)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == left
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"} & os.environ.keys()
    assert benchmark.launcher_shard() is None


class Colour(torch.nn.Module):
    """Mean colour as features of an image."""

    def forward(self, x: torch.Tensor, return_features: bool = False) -> torch.Tensor:
        assert return_features
        return x.float().flatten(2).mean(2)


def test_distances_of_the_outputs_to_real_images_are_in_the_result(
    sharded: tuple[list[Outcome], Path], place: Path, tmp_path: Path
) -> None:
    torch.jit.script(Colour()).save(str(tmp_path / "colour.pt"))
    keys = yaml.safe_load((place / "benchmark.yaml").read_text())
    entry = {"extractor": "torchscript", "path": str(tmp_path / "colour.pt"), "draws": 5}
    keys["distances"] = {"fid_colour": {**entry, "measure": "fid"}, "kid": {**entry, "measure": "kid", "draws": 0}}
    (tmp_path / "benchmark.yaml").write_text(yaml.safe_dump(keys), encoding="utf-8")
    samples = sharded[1] / "images" / "base"
    outcome = retouch(
        "eval", "--benchmark", tmp_path / "benchmark.yaml", "--images", samples, "--out", tmp_path / "out"
    )
    assert outcome.code == 0, outcome.err

    def colours(paths: Iterable[Path]) -> Any:
        return np.array([np.asarray(Image.open(path).convert("RGB")).mean((0, 1)) for path in sorted(paths)])

    made, real = colours(samples.glob("*.png")), colours(Path(keys["path"]).glob("*_source.png"))
    told = result_in(tmp_path / "out")["distances"]["base"]
    assert told["fid_colour"]["value"] == pytest.approx(fid(made, real), rel=1e-4)
    assert told["kid"]["value"] == pytest.approx(kid(made, real), rel=1e-4)
    assert (told["kid"]["images"], told["kid"]["real_images"], told["kid"]["interval"]) == (8, 4, None)
    assert told["kid"]["extractor"].startswith("colour.pt ")
    assert "warning" in told["fid_colour"]
    assert "warning" not in told["kid"]
    assert "(too few images) by colour.pt" in outcome.out
    assert "FID of fewer than 2048 images is mostly bias" in " ".join(outcome.err.split())


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"real": "target"}, "distances.d.real: given 'target', which has 0 images of this benchmark; give source"),
        ({"real": "{none}"}, "distances.d.real: given '{none}'; expected source, target, or a folder of images"),
        ({"path": "{none}"}, "distances.d.path: given '{none}'; no such folder"),
        ({"path": "{none}", "extractor": "torchscript"}, "distances.d.path: given '{none}'; expected a TorchScript"),
    ],
)
def test_distances_that_cannot_be_had_are_told_before_anything_is_scored(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: dict[str, str], message: str
) -> None:
    keys = yaml.safe_load((place / "benchmark.yaml").read_text())
    none = str(tmp_path / "none")
    given = {name: value.format(none=none) for name, value in entry.items()}
    keys["distances"] = {"d": {"measure": "kid", "path": str(tmp_path), **given}}
    (tmp_path / "benchmark.yaml").write_text(yaml.safe_dump(keys), encoding="utf-8")
    monkeypatch.setattr(benchmark_scores, "scorers_of", None)
    command = ("eval", "--benchmark", tmp_path / "benchmark.yaml", "--config", place / "run.yaml")
    outcome = retouch(*command, "--out", tmp_path / "out")
    assert (outcome.code, outcome.err.startswith(f"error: {message.format(none=none)}")) == (2, True), outcome.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--benchmark", "nothing", "--path", "{data}", "--images", "{data}"), "--benchmark: given 'nothing'; known:"),
        (("--benchmark", "{none}.yaml", "--images", "{data}"), "--benchmark: given {none}.yaml; no such file"),
        (("--benchmark", "calligrapher_self"), "--path: not set; give the data of calligrapher_self"),
        (("--benchmark", "{file}"), "--benchmark: give --run RUN_DIR or --config RUN.yaml to sample, or --images"),
        (
            ("--benchmark", "{file}", "--images", "{none}", "--out", "{out}"),
            "--images: given {none}; expected a folder",
        ),
        (
            ("--benchmark", "{file}", "--images", "{data}", "--out", "{out}"),
            "--images: {data} has none of the 8 images",
        ),
        (("--benchmark", "{file}", "--images", "{data}"), "--out: not set; give a folder"),
        (("--benchmark", "{file}", "--images", "{data}", "--ema"), "--raw/--ema: given without --run or --config"),
        (("--benchmark", "{file}", "--images", "{data}", "--shard", "3/2"), "--shard: given '3/2'; write I/N"),
        (("--benchmark", "{file}", "--data", "{data}"), "--data: given with --benchmark, which has its own data"),
        (("--benchmark", "{file}", "--path", "{none}", "--images", "{data}", "--out", "{out}"), "--path: {none}:"),
        (("--shard", "1/2", "--run", "{data}"), "--shard: given without --benchmark"),
        (("--images", "{data}", "--run", "{data}"), "--images: given {data}; expected a number of images"),
        (("--images", "0", "--run", "{data}"), "--images: given 0; expected one number of 1 to 1000"),
    ],
)
def test_mistakes_are_told_before_a_model_is_loaded(
    arguments: tuple[str, ...], message: str, place: Path, signs: Path, tmp_path: Path
) -> None:
    names = {"data": signs, "none": tmp_path / "none", "file": place / "benchmark.yaml", "out": tmp_path / "out"}
    outcome = retouch("eval", *(argument.format(**names) for argument in arguments))
    assert outcome.code == 2
    assert " ".join(message.format(**names).split()) in " ".join(outcome.err.split())
