"""What `retouch eval --benchmark` reports before, or instead of, hours of sampling: files, overlap, parts, settings."""

from __future__ import annotations

import ast
import itertools
import json
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from retouch.benchmarks import BENCHMARKS
from retouch.benchmarks.base import Benchmark, ImageRow
from retouch.benchmarks.load import load_benchmark
from retouch.benchmarks.outputs import outputs_of
from retouch.benchmarks.result import ResultColumn, result_of
from retouch.config import RunConfig
from retouch.data.base import ItemFiles
from retouch.data.dataset import Dataset, load_dataset
from retouch.data.formats.manifest import ManifestData
from retouch.data.identity import content_of, trained_on
from retouch.data.tables import Table, image_of
from retouch.errors import ConfigError
from retouch.imaging.png import write_png
from retouch.imaging.reading import PackedImage
from retouch.observe.distances import interval, kid
from retouch.rewards import scorers
from retouch.rewards.scorers import make_scorer
from retouch.rewards.scorers.weights import version_of
from retouch.types import Score
from retouch.use import benchmark as running
from retouch.use import benchmark_distances
from retouch.use.benchmark_distances import check_distances
from retouch.use.overlap import seen_in_training
from retouch.use.trained import Trained
from retouch_bench.benchmarks.anytext import lines_of
from retouch_bench.scorers import anytext
from tests.benchmarks_room.cases import write_brushbench
from tests.command_line import retouch
from tests.conftest import small_run
from tests.data.protocols import edit_picture, write_complex_edit
from tests.tiny_models import tiny_clip


def benchmark(name: str, path: Path | str = "somewhere", **options: Any) -> Benchmark:
    return BENCHMARKS[name].model_validate({"name": name, "path": str(path), **options})


# --- files ---


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory with a CLIP in it."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home/clip").symlink_to(tiny_clip())
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize("name", ["clip", "image_similarity"])
def test_a_model_in_the_home_directory_is_loaded(name: str, home: Path) -> None:
    scorer = make_scorer(name, {"path": "~/clip"})
    scorer.load("cpu")
    assert f"~/clip fp32 {version_of(str(home / 'clip'))} " in scorer.spec.revision


def test_every_scorer_loads_models_by_expanded_paths() -> None:
    """The first argument of each `from_pretrained` is a path that `loading` or `model_path` returned."""
    found: list[str] = []
    for file in sorted(Path(scorers.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "from_pretrained":
                found.append(f"{file.stem}: {ast.unparse(node.args[0])}")
    assert len(found) > 10
    assert {one.partition(": ")[2] for one in found} == {"place", "inputs", "model_path(path)", "path", "None"}, found
    assert [one for one in found if one.endswith(": path")] == [
        "weights: path"
    ]  # of `image_processor`, which gets those


def write_module(path: Path, forward: str) -> Path:
    """A TorchScript network of 512 features."""

    class Colour(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.float().flatten(2).mean(2)

    class Narrow(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.float().reshape(-1, 7)

    torch.jit.script({"colour": Colour, "narrow": Narrow}[forward]()).save(str(path))
    return path


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"path": "~/clip"}, None),
        ({"path": "~/colour.pt", "extractor": "torchscript"}, None),
        ({"path": "~/no_clip"}, "distances.d.path: given '~/no_clip'; no such folder"),
        ({"path": "~/empty"}, "distances.d.path: given '~/empty': "),
        ({"path": "~/text.pt", "extractor": "torchscript"}, "distances.d.path: {home}/text.pt is no TorchScript file"),
        ({"path": "~/narrow.pt", "extractor": "torchscript"}, "distances.d.path: {home}/narrow.pt fails on [1, 3, H,"),
        ({"path": "~/clip", "real": "~/damaged"}, "distances.d.real: given '~/damaged', whose images cannot be read"),
    ],
)  # fmt: skip
def test_extractors_of_distances_are_tried_on_a_real_image(
    entry: dict[str, str], message: str | None, home: Path, tmp_path: Path
) -> None:
    for folder in ("empty", "damaged"):
        (home / folder).mkdir()
    for name in ("1.png", "2.png"):
        (home / "damaged" / name).write_bytes(b"no image")
    (home / "text.pt").write_text("none")
    for forward in ("colour", "narrow"):
        write_module(home / f"{forward}.pt", forward)
    given = benchmark("brushbench", write_brushbench(tmp_path / "data"), distances={"d": {"measure": "kid", **entry}})
    outputs = outputs_of(given, load_dataset(given.data(), "--path", frozenset()).items)
    if message is None:
        check_distances(given, outputs)
        return
    with pytest.raises(ConfigError) as raised:
        check_distances(given, outputs)
    assert str(raised.value).startswith(message.format(home=home))


def test_an_extractor_is_tried_where_it_will_run_and_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the first image that can be read, before the scorers load."""
    folder = tmp_path / "real"
    folder.mkdir()
    for number, content in enumerate((b"no image", None, None)):
        Image.new("RGB", (4, 4), (number, 0, 0)).save(folder / f"{number}.png")
        if content:
            (folder / f"{number}.png").write_bytes(content)
    made: list[tuple[str, weakref.ref[Any]]] = []
    seen: list[int] = []

    class Extractor:
        def __call__(self, images: Iterable[Any]) -> Any:
            seen.extend(int(image[0, 0, 0]) for image in images)
            return np.zeros((len(seen), 3))

    def extractor(entry: Any, where: str, device: str) -> tuple[Extractor, str]:
        extract = Extractor()
        extract.itself = extract  # as networks have cycles
        made.append((device, weakref.ref(extract)))
        return extract, "stub"

    monkeypatch.setattr(benchmark_distances, "own_device", lambda: "cuda:3")
    monkeypatch.setattr(benchmark_distances, "_extractor", extractor)
    entry = {"measure": "kid", "path": "some/where", "real": str(folder)}
    given = benchmark("brushbench", write_brushbench(tmp_path / "data"), distances={"d": entry})
    check_distances(given, outputs_of(given, load_dataset(given.data(), "--path", frozenset()).items))
    [(device, extract)] = made
    assert device == "cuda:3" and seen == [1] and extract() is None


def test_an_image_that_items_share_is_one_real_image_and_one_example_of_the_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Repeated, a real image is near itself, which KID counts as a difference of the sets."""

    def extract(images: Iterable[Any]) -> Any:
        return np.array([image.mean((0, 1)) / 64 for image in images])

    entry = {"measure": "kid", "path": "some/where", "draws": 20}
    given = benchmark(
        "complex_edit", write_complex_edit(tmp_path / "data", real=9), complexity="1,4,8", distances={"d": entry}
    )
    outputs = outputs_of(given, load_dataset(given.data(), "--path", frozenset()).items)
    noise = np.random.default_rng(0).integers(0, 256, (len(outputs), 4, 4, 3), np.uint8)
    for output, pixels in zip(outputs, noise, strict=True):
        write_png(Image.fromarray(pixels), tmp_path / "out" / output.file)
    monkeypatch.setattr(benchmark_distances, "_extractor", lambda *_: (extract, "stub"))
    places = {"out": tmp_path / "out"}
    told = benchmark_distances.distances_of(given, outputs, places, lambda _: iter(noise))["out"]["d"]
    made, real = extract(noise), extract(np.asarray(edit_picture(number)) for number in range(9))
    assert (told["images"], told["real_images"]) == (27, 9)
    assert told["value"] == pytest.approx(kid(made, real))
    assert told["interval"] == pytest.approx(interval(kid, made, real, 20, np.repeat(range(9), 3).tolist(), range(9)))


# --- items ---


def test_broken_items_are_counted_and_limited(tmp_path: Path) -> None:
    folder = write_brushbench(tmp_path / "data", 3)
    next((folder / "images").glob("*0.jpg")).write_bytes(b"no image")
    rewards = {"clip": None, "kept_area": None}
    with pytest.raises(Exception, match=r"1 of 3 items are broken, more than max_bad_items 0"):
        load_dataset(benchmark("brushbench", folder, max_bad_items=0, rewards=rewards).data(), "--path", frozenset())
    given = benchmark("brushbench", folder, saved_as="jpeg", rewards=rewards)
    data = {"items": 600, "unusable_items": 1}
    result = result_of(given, {"base": ResultColumn([], [], {})}, data, {})
    assert result["published"]["reasons"] == ["1 unusable item"]


def test_a_key_selects_what_a_run_on_the_rest_does_not_train_on(tmp_path: Path) -> None:
    """The images of `part: train` of the same share, and those of the key, are all of them, and have none in common."""
    folder = tmp_path / "data"
    write_complex_edit(folder, real=12, syn=0)
    whole, held = (benchmark("complex_edit", folder, complexity="1", **o, rewards={"complex_edit": {"model": "m"}})
                   for o in ({}, {"held_out_share": 0.4}))  # fmt: skip
    train = whole.data().model_copy(update={"part": "train", "held_out_share": 0.4})
    keys = [{item.metadata["image"] for item in s.items() if isinstance(item, ItemFiles)}
            for s in (whole.data(), train, held.data())]  # fmt: skip
    assert keys[1] | keys[2] == keys[0] and not keys[1] & keys[2] and keys[1] and keys[2]
    assert "only the held-out share of 0.4 of the items" in held.departures()
    result = result_of(held, {"base": ResultColumn([], [], {})}, {"items": 3}, {})
    assert not [reason for reason in result["published"]["reasons"] if " of 531 items" in reason]


def test_a_format_without_parts_has_no_held_out_share(tmp_path: Path) -> None:
    file = tmp_path / "b.yaml"
    file.write_text(f"name: brushbench\npath: {tmp_path}\nheld_out_share: 0.1\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"held_out_share: given 0.1, but format 'brushbench' has no parts; divide"):
        load_benchmark(str(file), None)


# --- overlap with the training data ---


@pytest.mark.parametrize("sampled", [None, Path("weights")])
@pytest.mark.parametrize(("part", "count"), [("prompts", "all"), ("held_out", 0)])
def test_items_that_a_run_trained_on_are_counted(
    part: str, count: Any, sampled: Path | None, signs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    config = RunConfig.model_validate(small_run(signs, tmp_path))
    given = benchmark("calligrapher_self", signs / part, resolution=[32, 64])
    data = load_dataset(given.data(), "--path", frozenset())
    count = len(data) if count == "all" else count
    monkeypatch.setattr(running, "sample_outputs", lambda *_: None)
    about: dict[str, Any] = {"sampling": {}}
    monkeypatch.setattr(running, "about_weights", lambda *_: about)
    weights = {"after-RL": running.SampledWeights("", sampled)}
    runs: Mapping[str, Trained] = {"": None}  # type: ignore[dict-item]
    abouts = running._sample(given, runs, {"": config}, weights, data, [], tmp_path, running.Shard())
    told = abouts["after-RL"]["trained_on"]
    assert told == (count if sampled else 0)
    assert (f"--path: t trained on {count} of {len(data)} examples" in caplog.text) == bool(count)
    result = result_of(given, {"after-RL": ResultColumn([], [], abouts["after-RL"])}, {"items": len(data)}, {})
    reason = f"after-RL: its run trained on {told} of {len(data)} items"
    assert (reason in result["published"]["reasons"]) == bool(told)


def test_data_of_the_training_that_are_elsewhere_are_named(
    signs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = RunConfig.model_validate(small_run(signs, tmp_path, data__path=str(tmp_path / "none"), warmup_data=None))
    data = load_dataset(benchmark("calligrapher_self", signs / "held_out").data(), "--path", frozenset())
    assert seen_in_training(config, data, "--path") == []
    assert "--path: it is unknown whether t trained on these examples: data.path has no images on this machine" in (
        caplog.text
    )


def test_images_of_the_training_that_were_deleted_since_are_named(
    signs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Examples that are copies of these would count as held out, without a word."""
    (tmp_path / "l.json").write_text(json.dumps([{"prompt": "a", "image": f"{n}.png"} for n in range(3)]))
    Image.new("RGB", (8, 8)).save(tmp_path / "0.png")
    run = RunConfig.model_validate(small_run(signs, tmp_path))
    data = load_dataset(benchmark("calligrapher_self", signs / "held_out").data(), "--path", frozenset())
    for most, warned in ((2, False), (1, True)):
        section = ManifestData(path=str(tmp_path / "l.json"), max_bad_items=most)
        caplog.clear()
        assert seen_in_training(run.model_copy(update={"data": section, "warmup_data": None}), data, "--path") == []
        assert ("data.path has no images of 2 of 3 items on this machine" in caplog.text) is warned


@pytest.mark.parametrize("prompt", ["a  sign\u00a0that says X ", "A SIGN THAT SAYS X", "\uff21 sign that says x"])
def test_prompts_are_compared_as_data_split_compares_them(prompt: str) -> None:
    section = ManifestData(path="x")
    training = Dataset(section, [ItemFiles(0, "a sign that says x")])
    evaluation = Dataset(section, [ItemFiles(0, prompt), ItemFiles(1, "another sign")])
    assert [item.id for item in trained_on(evaluation, training)] == [0]


def test_an_image_in_a_table_is_the_same_as_its_file(tmp_path: Path) -> None:
    """A run that trained on files that were taken out of a benchmark's table has seen the benchmark."""
    for name, colour in (("a", "red"), ("b", "blue"), ("c", "green")):
        Image.new("RGB", (8, 8), colour).save(tmp_path / f"{name}.png")
    rows = [{"image": {"bytes": (tmp_path / name).read_bytes()}} for name in ("c.png", "a.png")]
    table = Table("test_real", len(rows), rows.__getitem__)
    images = [image_of(table, number, row) for number, row in enumerate(rows)]
    packed = Dataset(ManifestData(path="x"), [ItemFiles(n, "edit it", image) for n, image in enumerate(images)])
    files = Dataset(packed.config, [ItemFiles(n, "edit it", tmp_path / f"{name}.png") for n, name in enumerate("ab")])
    assert [item.id for item in trained_on(packed, files)] == [1]
    assert [item.id for item in trained_on(files, packed)] == [0]
    assert len(trained_on(packed, packed)) == 2
    # votes on copies of the image, taken from the file or from the table
    originals = [content_of(tmp_path / "a.png"), content_of(images[1])]
    for original in originals:
        voted = Dataset(packed.config, [ItemFiles(0, "edit it", tmp_path / "c.png", original=original)])
        assert 1 in [item.id for item in trained_on(packed, voted)]
        assert [item.id for item in trained_on(files, voted)] == [0]
    # which later votes share with earlier ones, or they could be in the other half of the votes
    assert isinstance(images[1], PackedImage) and originals[1] == images[1].digest


# --- settings of several weights ---


def test_weights_that_are_sampled_otherwise_are_named(caplog: pytest.LogCaptureFixture) -> None:
    abouts = {n: {"sampling": {"num_steps": 4, "guidance_scale": g}} for n, g in (("a", 1.0), ("b", 1.0), ("c", 3.5))}
    for name in abouts:
        running._warn_of_other_sampling(abouts, name)
    (line,) = caplog.messages
    assert line.startswith("--run: c is sampled with guidance_scale 3.5 instead of 1.0, as a is")


# --- intervals ---


def test_a_line_is_compared_once_however_many_samples_an_interval_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count()
    real = anytext.edit_distance
    monkeypatch.setattr(anytext, "edit_distance", lambda *texts: (next(calls), real(*texts))[1])
    lines = [[{"asked": f"once {n} {k}", "found": f"one {n} {k}"} for k in range(2)] for n in range(8)]
    rows = [ImageRow(str(n), 0, {}, {"anytext": Score(0.5, {"lines": of})}) for n, of in enumerate(lines)]
    result = result_of(
        benchmark("anytext"), {"a": ResultColumn(rows, [], {}), "b": ResultColumn(rows, [], {})}, {"items": 8}, {}
    )
    assert next(calls) == 16
    compared = [anytext.compare(line["asked"], line["found"], "en").ned for of in lines for line in of]
    assert result["measures"]["a"]["ned_en"] == pytest.approx(np.mean(compared))
    assert lines_of(rows, "zh")[0].ned == anytext.compare("once 0 0", "one 0 0", "zh").ned


def test_a_path_is_named_by_where_it_was_given(tmp_path: Path) -> None:
    """The option, or the key of the benchmark's own file."""
    file = tmp_path / "mine.yaml"
    file.write_text("{name: geneval, path: /nowhere/here}", encoding="utf-8")
    rest = ("--images", tmp_path, "--out", tmp_path / "out")
    for given, key in (((file,), f"--benchmark {file}: path"), (("geneval", "--path", "/nowhere/here"), "--path")):
        outcome = retouch("eval", "--benchmark", *given, *rest)
        assert outcome.code == 2 and outcome.err.startswith(f"error: {key}: /nowhere/here: no such file")
