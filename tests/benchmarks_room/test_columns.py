"""Columns of a result: the images of a difference and of an interval, the rewards that are shown, the images kept."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from retouch.benchmarks import BENCHMARKS
from retouch.benchmarks.base import Benchmark, ImageRow
from retouch.benchmarks.outputs import Shard, outputs_of
from retouch.benchmarks.result import ResultColumn, result_of
from retouch.config import RunConfig
from retouch.data.base import ItemFiles
from retouch.errors import ConfigError
from retouch.files.disk import write_whole
from retouch.types import Failure, Outcome, Score
from retouch.use import benchmark_images
from retouch.use.benchmark import _weights
from retouch.use.benchmark_images import about_weights, as_trained, claim, with_settings
from retouch.use.trained import Trained
from retouch_bench.benchmarks.anytext import language_of
from tests.conftest import small_run

LOST = Failure("unavailable", "no answer", True)


def benchmark(name: str, **options: Any) -> Benchmark:
    return BENCHMARKS[name].model_validate({"name": name, "path": "x", **options})


def result(given: Benchmark, **columns: Sequence[ImageRow]) -> dict[str, Any]:
    return result_of(given, {name: ResultColumn(rows, [], {}) for name, rows in columns.items()}, {"items": 9}, {})


# --- differences ---


def read(values: Sequence[float | None], style: float = 0.5) -> list[ImageRow]:
    """An image of each item with this NED; None is a failure."""

    def outcome(value: float | None) -> Outcome:
        return LOST if value is None else Score(value, {"ned": value, "exact": False})

    return [
        ImageRow(str(n), 0, {}, {"ocr": outcome(value), "style": Score(style)}, f"{n}.png")
        for n, value in enumerate(values)
    ]


@pytest.mark.parametrize("name", ["imgedit", "complex_edit", "calligrapher_cross"])
def test_edits_of_one_image_are_one_unit_of_intervals(name: str) -> None:
    """ImgEdit has 737 edits of 171 images, Complex-Edit up to 8 of each. Their outputs keep their own names."""
    about = {"image_type": "real", "image": "real/0", "reference_item": 2, "item": 1}
    sources = (Path("a.png"), Path("b.png"), Path("a.png"), None, None)
    items = [
        ItemFiles(n, "edit it", source, metadata=about | {"key": f"k{n}", "complexity": n})
        for n, source in enumerate(sources)
    ]
    rewards = {"rewards": {name: None}} if name != "calligrapher_cross" else {}  # no judge is asked here
    found = outputs_of(benchmark(name, images_per_item=1, **rewards), items)
    assert [output.key for output in found] == ["k0", "k1", "k0", "k3", "k4"]
    assert len({output.file for output in found}) == 5


def test_a_difference_is_of_images_that_were_scored_in_both() -> None:
    """The hardest item fails before and the easiest after: each gain is .1, that of the means would be -.03."""
    before, after = read([None, 0.4, 0.6, 0.9]), read([0.1, 0.5, 0.7, None], style=0.75)
    found = result(benchmark("calligrapher_self"), a=before, b=after)
    assert found["differences"]["b - a"]["ned"] == pytest.approx([0.1, 0.1, 0.1])
    assert found["differences"]["b - a"]["style"] == pytest.approx([0.25, 0.25, 0.25])
    measures = found["measures"]
    assert measures["b"]["ned"] - measures["a"]["ned"] == pytest.approx(0.4333 - 0.6333, abs=1e-3)
    assert (found["weights"]["a"]["failures"], found["weights"]["b"]["failures"]) == ({"ocr": {"unavailable": 1}},) * 2


def test_images_that_one_column_has_are_in_no_difference() -> None:
    """Two images of an item, of which the column before has one."""
    rows = read([0.4, 0.6])
    more = [ImageRow("0", 1, {}, {"ocr": Score(0.0, {"ned": 0.0, "exact": False})}, "0_1.png")]
    found = result(benchmark("calligrapher_self"), a=rows, b=[*rows, *more])
    assert found["differences"]["b - a"]["ned"] == [0, 0, 0]


def test_items_with_one_key_stay_apart_and_are_drawn_together() -> None:
    """Complex-Edit has several instructions on one image."""

    def scored(gain: float) -> list[ImageRow]:
        parts = ("instruction_following", "identity_preservation", "perceptual_quality")
        values = [(key, level, dict.fromkeys(parts, level / 10 + gain)) for key in "abc" for level in (1, 8)]
        return [
            ImageRow(key, 0, {"complexity": level}, {"complex_edit": Score(0.0, of)}, f"{key} {level}")
            for key, level, of in values
        ]

    given = benchmark("complex_edit", rewards={"complex_edit": {"model": "m"}})
    found = result(given, a=scored(0.0), b=scored(0.1))
    assert found["differences"]["b - a"]["overall"] == pytest.approx([1, 1, 1])
    assert found["intervals"]["a"]["overall C8"] == pytest.approx([8, 8])


def test_the_interval_of_prompts_is_that_of_a_mean_over_prompts() -> None:
    """A prompt that a sample has twice counts twice: counted once, the interval would be a quarter narrower."""
    right = np.random.default_rng(0).random((400, 2)) < 0.3
    rows = [
        ImageRow(str(n), k, {"tag": "colors"}, {"geneval": Score(0.0, {"correct": bool(correct)})}, f"{n} {k}")
        for n, of in enumerate(right) for k, correct in enumerate(of)
    ]  # fmt: skip
    found = result(benchmark("geneval"), a=rows)
    best = right.any(1)
    assert found["measures"]["a"]["prompts"] == pytest.approx(best.mean())
    low, high = found["intervals"]["a"]["prompts"]
    assert high - low == pytest.approx(2 * 1.96 * best.std() / 20, rel=0.06)


# --- measures ---


def test_a_reward_that_no_measure_reads_is_shown_by_its_name() -> None:
    rewards = {"hpsv2": {}, "quality": {"scorer": "jpeg_size"}}
    rows = [
        ImageRow(str(n), 0, {}, {"clip": Score(0.2), "hpsv2": Score(0.3), "quality": Score(n / 10)}, str(n))
        for n in range(4)
    ]
    found = result(benchmark("brushbench", rewards=rewards), a=rows)
    assert found["measures"]["a"] == pytest.approx({"clip": 20, "hps_v2.1": 30, "quality": 0.15})
    assert found["intervals"]["a"].keys() == {"clip", "hps_v2.1", "quality"}


@pytest.mark.parametrize(
    ("path", "language"),
    [
        ("data/wukong_word", "zh"), ("data/wukong_word/test1k.json", "zh"), ("WuKong/", "zh"),
        ("wukong_models/laion_word", "en"), ("wukong/laion_word/test1k.json", "en"), ("laion_word", "en"),
        ("wukong_1k/data", "zh"), ("wukong_1k/annotations/test1k.json", "zh"), ("data/wukong.json", "zh"),
        ("laion/wukong_1k/annotations/test1k.json", "zh"), ("wukong/laion_1k/data", "en"), ("data/test1k.json", "en"),
    ],
)  # fmt: skip
def test_the_folder_names_the_language_of_anytext(path: str, language: str) -> None:
    assert language_of({"path": path}) == language


# --- whose images are kept ---


def trained(**options: Any) -> Trained:
    config = RunConfig.model_validate(small_run(Path("signs"), Path("runs"), **options))
    return Trained(config, {"after RL": Path("weights")})


@pytest.mark.parametrize("names", [("base", "other"), ("a/b", "a-b")])
def test_two_weights_have_two_folders(names: tuple[str, str]) -> None:
    """A run that is called like the base, and two whose names differ in a slash alone."""
    with pytest.raises(
        ConfigError, match=r"--run: the images of .* would be in the folder .*; rename its run directory"
    ):
        _weights({name: trained() for name in names})
    assert list(_weights({"a": trained(), "b": trained()})) == ["base", "a", "b"]
    assert list(_weights({"": trained()})) == ["base", "after-RL"]


LORA = {"kind": "lora", "rank": 4, "initial_adapter": "{folder}/adapter.safetensors"}

DATA = ("data", "warmup_data", "evaluation__data")

CHANGES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("model", {"model__path": "another"}, {}),
    ("read.train.rank", {"model__train": LORA | {"rank": 8}}, {}),
    ("read.initial_adapter", {"model__train": LORA | {"initial_adapter": "{folder}/other/adapter.safetensors"}}, {}),
    ("read.images.reference_strip", {f"{data}__reference_strip": 32 for data in DATA}, {}),
    ("sampling.num_steps", {"rollout__num_steps": 4}, {}),
    ("sampling.num_steps", {}, {"num_steps": 7}),
    ("sampling.guidance_scale", {"rollout__guidance_scale": 2.5}, {}),
    ("sampling.guidance_scale", {}, {"guidance_scale": 2.5}),
    ("sampling.seed", {}, {"seed": 1}),
    ("sampling.resolution", {}, {"resolution": [64, 64]}),
    ("sampling.mixed_precision", {"training__mixed_precision": "bf16"}, {}),
]
"""Key of the record that changes; changes of the run file; changes of the benchmark file."""


@pytest.mark.parametrize(
    ("key", "of_run", "of_benchmark"), CHANGES, ids=lambda one: one if isinstance(one, str) else ""
)
def test_images_that_other_settings_would_sample_are_not_kept(
    key: str, of_run: dict[str, Any], of_benchmark: dict[str, Any], tmp_path: Path
) -> None:
    for folder in (tmp_path, tmp_path / "other"):
        folder.mkdir(exist_ok=True)
        (folder / "adapter.safetensors").write_text(str(folder))

    def about(of_run: dict[str, Any], of_benchmark: dict[str, Any]) -> dict[str, Any]:
        filled = yaml.safe_load(yaml.safe_dump({"model__train": LORA, **of_run}).replace("{folder}", str(tmp_path)))
        given = benchmark("calligrapher_self", **{"resolution": [32, 64], **of_benchmark})
        config = with_settings(RunConfig.model_validate(small_run(Path("s"), Path("r"), **filled)), given)
        return about_weights(config, None, given, as_trained(given.data(), given, config))

    claim(tmp_path / "images", about({}, {}))
    claim(tmp_path / "images", about({}, {}))
    with pytest.raises(ConfigError, match=rf"holds images of another {key}"):
        claim(tmp_path / "images", about(of_run, of_benchmark))
    earlier = {name: value for name, value in about({}, {}).items() if name != "read"}
    claim(tmp_path / "earlier", earlier)
    claim(tmp_path / "earlier", about({}, {}))


def test_another_base_under_the_same_path_takes_no_images_over(tmp_path: Path) -> None:
    """Where its files are here, then and now; earlier versions did not record them."""

    def about(base: bytes | None) -> dict[str, Any]:
        shutil.rmtree(tmp_path / "base", ignore_errors=True)
        if base is not None:
            (tmp_path / "base/transformer").mkdir(parents=True)
            (tmp_path / "base/model_index.json").write_text("{}")
            (tmp_path / "base/transformer/model.safetensors").write_bytes(base)
        given = benchmark("calligrapher_self", resolution=[32, 64])
        run = small_run(Path("s"), Path("r"), model__train=LORA, model__path=str(tmp_path / "base"))
        config = with_settings(RunConfig.model_validate(run), given)
        return about_weights(config, None, given, as_trained(given.data(), given, config))

    first, unknown = about(b"first"), about(None)
    claim(tmp_path / "images", first)
    for same in (unknown, {**first, "folder": "moved"}):
        claim(tmp_path / "images", same)
    with pytest.raises(ConfigError, match=r"holds images of another files\.network_files"):
        claim(tmp_path / "images", about(b"other"))
    earlier = {name: value for name, value in first.items() if name != "files"}
    claim(tmp_path / "earlier", earlier)
    claim(tmp_path / "earlier", about(b"other"))
    for base in (unknown, first, unknown):  # as of the hub, which the first process downloads while it samples
        claim(tmp_path / "downloaded", base)
    with pytest.raises(ConfigError, match=r"holds images of another files\.network_files"):
        claim(tmp_path / "downloaded", about(b"other"))
    claim(tmp_path / "part", unknown)
    claim(tmp_path / "part", {"files": first["files"]})  # once it is loaded
    with pytest.raises(ConfigError, match=r"holds images of another files\.network_files"):
        claim(tmp_path / "part", about(b"other"))


def test_a_base_that_is_downloaded_to_sample_is_recorded_before_its_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, run = benchmark("calligrapher_self", resolution=[32, 64]), small_run(Path("s"), Path("r"))
    config = with_settings(RunConfig.model_validate(run), given)
    here, recorded = dict[str, str | None](network_files=None), list[object]()

    def loaded(*_: object, **__: object) -> SimpleNamespace:
        here["network_files"] = "a"
        return SimpleNamespace(load=lambda _: recorded.append(json.loads((tmp_path / "base.json").read_text())))

    for name, stub in {
        "_files_of": lambda _: dict(here),
        "chunks_of": lambda *_: [[SimpleNamespace(own_file="1.png")]],
        "_encoded": lambda *_: [],
    }.items():
        monkeypatch.setattr(benchmark_images, name, stub)
    monkeypatch.setattr("retouch.use.loaded.Loaded", loaded)
    monkeypatch.setattr("retouch.use.loaded.for_items", lambda *_: None)
    claim(tmp_path / "base", {"files": dict(here)})
    benchmark_images.sample_outputs(config, {"base": None}, given.data(), [], tmp_path, Shard(), given)
    assert recorded == [{"files": {"network_files": "a"}}]


def test_of_two_processes_that_download_a_base_one_has_it_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, problems = tmp_path / "images", list[ConfigError]()
    claim(folder, {"files": {"network_files": None}})

    def other() -> None:
        try:
            claim(folder, {"files": {"network_files": "b"}})
        except ConfigError as error:
            problems.append(error)

    second = threading.Thread(target=other)

    def write(path: Path, text: str) -> None:
        monkeypatch.undo()
        second.start()
        second.join(0.3)
        write_whole(path, text)

    monkeypatch.setattr(benchmark_images, "write_whole", write)
    claim(folder, {"files": {"network_files": "a"}})
    second.join(60)
    assert [str(one).partition(" (")[0] for one in problems] == [
        f"--out: {folder} holds images of another files.network_files"
    ]
    assert json.loads((tmp_path / "images.json").read_text()) == {"files": {"network_files": "a"}}
