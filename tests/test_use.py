"""`retouch sample` and `retouch eval` as people run them."""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image, ImageOps
from safetensors import safe_open
from safetensors.torch import load_file

from retouch.config import ConfigError, RunConfig, load_run
from retouch.data.base import ItemFiles
from retouch.data.item import read_item
from retouch.engine import CheckpointError
from retouch.errors import DataError
from retouch.families.flux_fill.model import FluxFill
from retouch.imaging.fitting import MaskCrop
from retouch.imaging.lines import parse_lines
from retouch.imaging.png import write_new_png
from retouch.imaging.reading import open_image, to_rgb
from retouch.training.evaluation import Evaluation
from retouch.use import exporting
from retouch.use.comparison import comparison_table, gains
from retouch.use.items import SampleRequest, items_to_sample, mask_crop
from retouch.use.loaded import Loaded
from retouch.use.regions import template_prompt
from retouch.use.sampling import free_paths
from retouch.use.trained import Trained, chosen_weights
from tests.command_line import Outcome, retouch
from tests.data.image_files import png_values
from tests.data.test_file_image import CASES

Finished = Callable[[str], Path]


def pixels(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB")).astype(int)


def inside(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("L")) >= 128


def drawn(out: Path, *arguments: object) -> dict[str, np.ndarray]:
    """Name -> picture of everything that `retouch sample` wrote."""
    outcome = retouch("sample", *arguments, "--out", out)
    assert outcome.code == 0, outcome.err
    paths = [Path(line) for line in outcome.out.splitlines()]
    assert paths == sorted(out.glob("*.png"))
    return {path.name: pixels(path) for path in paths}


# --- sample ---


def test_a_data_set_from_a_run(finished: Finished, signs: Path, tmp_path: Path) -> None:
    """Every item, repainted inside its mask and nowhere else; the same again with the same seed alone."""
    data = signs / "held_out"
    first = drawn(tmp_path / "a", "--run", finished("full"), "--data", data)
    assert list(first) == [f"test{n}_source.png" for n in range(200, 204)]
    for name, picture in first.items():
        number = int(name[4:7])
        source, hole = pixels(data / f"test{number}_source.png"), inside(data / f"test{number}_mask.png")
        assert np.array_equal(picture[~hole], source[~hole])
        assert np.abs(picture[hole] - source[hole]).mean() > 1
    again = drawn(tmp_path / "b", "--run", finished("full"), "--data", data)
    other = drawn(tmp_path / "c", "--run", finished("full"), "--data", data, "--seed", 1)
    for name, picture in first.items():
        assert np.array_equal(again[name], picture)
        assert not np.array_equal(other[name], picture)


def test_weights_are_those_asked_for(finished: Finished, signs: Path, tmp_path: Path) -> None:
    """A run file alone draws the base; a checkpoint with it, what --run draws; --raw, not the average."""
    run = finished("lora")
    common = ("--data", signs / "held_out", "--steps", 2)
    config = ("--config", run / "config.yaml")
    newest, first = (run / "checkpoints" / step for step in ("step-000004", "step-000002"))
    from_run = drawn(tmp_path / "run", "--run", run, *common)
    by_path = drawn(tmp_path / "path", *config, "--weights", newest, *common)
    assert all(np.array_equal(by_path[name], picture) for name, picture in from_run.items())
    others = {
        "base": drawn(tmp_path / "base", *config, *common),
        "raw": drawn(tmp_path / "raw", "--run", run, "--raw", *common),
        "warm-up": drawn(tmp_path / "warm-up", "--run", run, "--weights", first, *common),
    }
    for name, pictures in others.items():
        assert any(not np.array_equal(pictures[n], picture) for n, picture in from_run.items()), name


@pytest.fixture
def photo(tmp_path: Path) -> tuple[object, ...]:
    """The arguments of a picture of 301 x 211, which is no multiple of anything, and its mask."""
    draw = np.random.default_rng(0)
    Image.fromarray(draw.integers(0, 256, (211, 301, 3), np.uint8)).save(tmp_path / "photo.png")
    mask = np.zeros((211, 301), np.uint8)
    mask[120:150, 40:140] = 255
    Image.fromarray(mask).save(tmp_path / "mask.png")
    return "--image", tmp_path / "photo.png", "--mask", tmp_path / "mask.png"


def repainted_inside_alone(picture: np.ndarray, photo: Any) -> bool:
    source, hole = pixels(photo[1]), inside(photo[3])
    same = picture.shape == source.shape and np.array_equal(picture[~hole], source[~hole])
    return same and bool(np.abs(picture - source)[hole].mean() > 5)


def test_one_picture_of_any_size_keeps_its_size_and_its_outside(
    finished: Finished, photo: tuple[object, ...], tmp_path: Path
) -> None:
    """The run's 64 x 32 window around the mask is repainted, scaled back, and pasted into the mask alone."""
    run = ("--run", finished("full"))
    pictures = drawn(tmp_path / "out", *run, *photo, "--text", "MOON", "--count", 3)
    assert list(pictures) == ["photo-0.png", "photo-1.png", "photo-2.png"]
    assert all(repainted_inside_alone(picture, photo) for picture in pictures.values())
    first, second, _ = pictures.values()
    assert not np.array_equal(first, second)
    prompted = drawn(tmp_path / "prompt", *run, *photo, "--prompt", "The text is 'MOON'.")
    assert np.array_equal(prompted["photo.png"], first)  # --text makes just this prompt


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with `large.png`, 2000 x 1500, and `mask.png`, which masks 600 x 300 of it."""
    folder = tmp_path_factory.mktemp("large")
    y, x = np.mgrid[0:1500, 0:2000]
    image = np.stack([x // 8, y // 6, (x + y) // 14], -1).astype(np.uint8)
    Image.fromarray(image).save(folder / "large.png", compress_level=1)
    mask = np.zeros((1500, 2000), np.uint8)
    mask[750:1050, 1150:1750] = 255
    Image.fromarray(mask).save(folder / "mask.png", compress_level=1)
    return folder


def test_a_large_image_is_repainted_at_full_resolution_around_the_mask(
    finished: Finished, large: Path, tmp_path: Path
) -> None:
    """The model sees the box of 1200 x 600 and nothing else of the image: cut out, it is drawn alike."""
    run, text = ("--run", finished("full")), ("--text", "MOON")
    image, mask = ("--image", large / "large.png"), ("--mask", large / "mask.png")
    outcome = retouch("sample", *run, *image, *mask, *text, "--out", tmp_path / "out")
    assert outcome.code == 0, outcome.err
    assert (
        "large.png: the model receives 1200 x 600 pixels around the mask at 64 x 32: 512 effective pixels in the mask "
        "(184 without the crop, --crop none)"
    ) in " ".join(outcome.err.split())
    hard = pixels(tmp_path / "out/large.png")
    assert repainted_inside_alone(hard, (*image, *mask))

    left = 2000 - 1200  # the box lies at the right edge
    for name in ("large", "mask"):
        Image.open(large / f"{name}.png").crop((left, 600, 2000, 1200)).save(tmp_path / f"{name}.png")
    cut = ("--image", tmp_path / "large.png", "--mask", tmp_path / "mask.png")
    [alone] = drawn(tmp_path / "cut", *run, *cut, *text, "--crop", "none").values()
    assert np.array_equal(hard[600:1200, left:], alone)

    soft = drawn(tmp_path / "soft", *run, *image, "--box", "1150,750,1750,1050", *text, "--feather", 20)["large.png"]
    source, hole = pixels(large / "large.png"), inside(large / "mask.png")
    assert np.array_equal(soft[~hole], source[~hole]) and not np.array_equal(soft, hard)
    assert np.array_equal(soft[850:950, 1250:1650], hard[850:950, 1250:1650])  # a box is a mask


def test_small_images_are_cropped_only_when_asked(
    finished: Finished, photo: tuple[object, ...], tmp_path: Path
) -> None:
    """At 192 x 384 the photo of 301 x 211 has no more pixels than the model: `auto` shows all of it."""
    run = ("--run", finished("full"), *photo, "--text", "MOON", "--resolution", "192x384", "--steps", 1)
    auto, none, mask = (drawn(tmp_path / c, *run, "--crop", c)["photo.png"] for c in ("auto", "none", "mask"))
    assert np.array_equal(auto, none)
    assert not np.array_equal(mask, none) and repainted_inside_alone(mask, photo)


def test_editing_models_see_the_whole_image_unless_asked(config: Callable[..., RunConfig]) -> None:
    """As does everybody with an explicit fit."""
    fill, edit = config(), config(model={"family": "qwen_image_edit", "path": "tiny", "dtype": "fp32"})
    request = SampleRequest()
    assert mask_crop(fill, request) == MaskCrop(0.25, enlarge=False)
    assert mask_crop(edit, request) is None
    assert mask_crop(fill, replace(request, fit="crop")) is None
    assert mask_crop(fill, replace(request, crop="none")) is None
    assert mask_crop(fill, replace(request, for_votes=True)) is None
    with pytest.raises(ConfigError, match="--crop: given mask, but --for-votes"):
        items_to_sample(fill, replace(request, data=Path("x"), crop="mask", for_votes=True))
    assert mask_crop(edit, replace(request, crop="mask", context=0.5)) == MaskCrop(0.5, enlarge=True)


def test_further_source_images_beside_the_one_to_edit(
    config: Callable[..., RunConfig], photo: tuple[object, ...]
) -> None:
    """Of a model that reads several; their sizes are those of the run."""
    path = Path(str(photo[1]))
    plus = config(model={"family": "qwen_image_edit", "path": "x", "variant": "edit_plus", "vision_pixels": 2048})
    edit = config(model={"family": "qwen_image_edit", "path": "tiny", "dtype": "fp32"})
    with Image.open(path) as opened:
        request = SampleRequest(image=path, prompt="Put it there.", more_images=(path, opened.convert("RGB")))
    section, [item] = items_to_sample(plus, request)
    first, second = read_item(item, section)[0].more_images
    assert first.size == section.size[::-1] and np.array_equal(np.asarray(first), np.asarray(second))
    with pytest.raises(ConfigError, match="--more-image: example 0 has more_images, but qwen_image_edit reads one"):
        items_to_sample(edit, request)
    with pytest.raises(ConfigError, match="--more-image: given with --data"):
        items_to_sample(plus, replace(request, data=path, image=None, prompt=None))


def test_several_texts_have_a_region_each(
    finished: Finished, config: Callable[..., RunConfig], photo: tuple[object, ...], tmp_path: Path
) -> None:
    """By boxes or by masks, in their order: the same prompt, places, mask and pixels; the rest of the image stays."""
    path, boxes = Path(str(photo[1])), ((20, 10, 120, 60), (150, 100, 280, 150))
    hole = np.zeros((211, 301), bool)
    for number, (left, top, right, bottom) in enumerate(boxes):
        region = np.zeros((211, 301), np.uint8)
        region[top:bottom, left:right] = 255
        hole |= region > 0
        Image.fromarray(region).save(tmp_path / f"region{number}.png")
    asked = ("--run", finished("full"), "--image", path, "--text", "MOON", "--text", "SUN", "--crop", "none")
    places = [("--box", ",".join(map(str, box))) for box in boxes]
    [by_boxes] = drawn(tmp_path / "boxes", *asked, *places[0], *places[1]).values()
    masks = [item for number in (0, 1) for item in ("--mask", tmp_path / f"region{number}.png")]
    [by_masks] = drawn(tmp_path / "masks", *asked, *masks).values()
    assert np.array_equal(by_boxes, by_masks) and np.array_equal(by_boxes[~hole], pixels(path)[~hole])
    assert all(np.abs(by_boxes - pixels(path))[t:b, x:r].mean() > 5 for x, t, r, b in boxes)
    request = SampleRequest(image=path, texts=("MOON", "SUN"), boxes=boxes)
    _, [item] = items_to_sample(config(), request)
    assert item.prompt == "The text is 'MOON', 'SUN'." and item.metadata["text"] == "MOON SUN"
    assert [line.bounds for line in parse_lines(item.metadata["lines"])] == [*boxes]
    inverted = tuple(Image.fromarray(~np.asarray(Image.open(tmp_path / f"region{n}.png"))) for n in (0, 1))
    section, [other] = items_to_sample(config(), replace(request, boxes=(), masks=inverted, invert_mask=True))
    assert other.metadata == item.metadata and not other.inverts_mask(section.image_options)
    assert np.array_equal(np.asarray(open_image(other.mask_path)) > 0, hole)


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        ("The text is '{text}'.", "The text is 'A', 'B C'."),
        ('a sign with "{text}"', 'a sign with "A", "B C"'),
        ("Ein Schild: „{text}“", "Ein Schild: „A“, „B C“"),
        ("une enseigne « {text} »", "une enseigne « A », « B C »"),
        ("write {text}", "write A, B C"),
    ],
)
def test_a_template_quotes_each_of_several_texts(template: str, prompt: str) -> None:
    assert template_prompt(template, ["A", "B C"]) == prompt
    assert template_prompt(template, ["A"]) == template.replace("{text}", "A")


def test_several_texts_may_share_a_region_and_one_text_may_have_several(
    config: Callable[..., RunConfig], photo: tuple[object, ...]
) -> None:
    path, boxes = Path(str(photo[1])), ((20, 10, 120, 60), (150, 100, 280, 150))
    request = SampleRequest(image=path, texts=("A", "B"), boxes=boxes[:1])
    assert items_to_sample(config(), request)[1][0].metadata["lines"] == [{"text": "A"}, {"text": "B"}]
    one = replace(request, texts=("A",), boxes=boxes)
    assert items_to_sample(config(), one)[1][0].metadata == {"text": "A"}
    assert not items_to_sample(config(), replace(one, texts=(), prompt="'x'"))[1][0].metadata
    with pytest.raises(ConfigError, match="--text: given 3 times with 2 boxes or masks; expected one for all texts"):
        items_to_sample(config(), replace(one, texts=("A", "B", "C")))
    small = Image.new("L", (10, 10))
    small.paste(255, (2, 2, 5, 5))
    with pytest.raises(ConfigError, match=r"--mask: given mask, which is 10 x 10; with several masks each must have"):
        items_to_sample(config(), replace(one, boxes=(), masks=(small, small)))


def test_names_are_kept_and_files_as_well(finished: Finished, photo: tuple[object, ...], tmp_path: Path) -> None:
    """Also of the source itself, in whose folder the results are written."""
    run = ("--run", finished("full"), *photo, "--text", "MOON", "--steps", 1, "--out", tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.glob("*.png")}
    names = [Path(line).name for _ in range(2) for line in retouch("sample", *run).out.splitlines()]
    names += [Path(line).name for line in retouch("sample", *run, "--count", 2).out.splitlines()]
    assert names == ["photo-1.png", "photo-2.png", "photo-0.png", "photo-3.png"]
    assert all(path.read_bytes() == data for path, data in before.items())


def test_items_with_sources_of_one_name_are_told_apart_by_their_ids(tmp_path: Path) -> None:
    sources = {1: tmp_path / "a.png", 2: tmp_path / "a.jpg", 3: tmp_path / "b.png", 4: None}
    items = [ItemFiles(n, "x", source) for n, source in sources.items()]
    free = free_paths(items, tmp_path, 1)
    assert [free(n).name for n in sources] == ["a-00001.png", "a-00002.png", "b.png", "00004.png"]


def test_an_erased_region_is_repainted_with_invert_mask_and_warned_of_without(
    finished: Finished, photo: tuple[object, ...], tmp_path: Path
) -> None:
    erased = Image.open(tmp_path / "photo.png").convert("RGBA")
    erased.putalpha(ImageOps.invert(Image.open(tmp_path / "mask.png")))
    erased.save(tmp_path / "erased.png")
    run = ("--run", finished("full"), "--image", tmp_path / "photo.png", "--text", "MOON")
    warned = retouch("sample", *run, "--mask", tmp_path / "erased.png", "--out", tmp_path / "warned")
    assert "the border of this mask is opaque" in " ".join(warned.err.split()) and "--invert-mask" in warned.err
    meant = retouch("sample", *run, "--mask", tmp_path / "erased.png", "--invert-mask", "--out", tmp_path / "meant")
    assert meant.code == 0 and "opaque" not in meant.err
    assert repainted_inside_alone(pixels(tmp_path / "meant/photo.png"), photo)


def test_one_image_needs_no_data(
    run_file: Callable[..., dict[str, Any]],
    photo: tuple[object, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is read is named where it is missing."""
    monkeypatch.delenv("DATA_PATH", raising=False)
    run = run_file(data__path="${DATA_PATH}", evaluation__data__path="${DATA_PATH}/held_out")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    config = ("--config", tmp_path / "run.yaml")
    [picture] = drawn(tmp_path / "out", *config, *photo, "--text", "MOON", "--steps", 1).values()
    assert repainted_inside_alone(picture, photo)
    for command in (("eval", *config), ("train", tmp_path / "run.yaml")):
        assert "${DATA_PATH} is not set in the environment" in refused(retouch(*command))


def test_a_soft_edge_lies_inside_the_mask(finished: Finished, signs: Path, tmp_path: Path) -> None:
    data = signs / "held_out"
    hard = drawn(tmp_path / "hard", "--run", finished("full"), "--data", data)["test200_source.png"]
    soft = drawn(tmp_path / "soft", "--run", finished("full"), "--data", data, "--feather", 2)["test200_source.png"]
    source, hole = pixels(data / "test200_source.png"), inside(data / "test200_mask.png")
    assert np.array_equal(soft[~hole], source[~hole])
    assert not np.array_equal(soft, hard)
    rows, columns = np.flatnonzero(hole.any(1)), np.flatnonzero(hole.any(0))
    centre = (slice(rows[0] + 6, rows[-1] - 5), slice(columns[0] + 6, columns[-1] - 5))
    assert np.array_equal(soft[centre], hard[centre])


def test_a_mask_that_is_narrower_than_its_soft_edge_is_named(
    finished: Finished, photo: tuple[object, ...], tmp_path: Path
) -> None:
    """No pixel of the sample is left: the source comes back unchanged."""
    command = ("sample", "--run", finished("full"), *photo[:2], "--text", "MOON", "--steps", 1, "--box", "8,8,40,12")
    outcome = retouch(*command, "--feather", 8, "--out", tmp_path / "out")
    assert outcome.code == 0
    assert "is so narrow that at most 0 % of the sample shows; set less" in " ".join(outcome.err.split())
    assert "so narrow" not in retouch(*command, "--feather", 1, "--out", tmp_path / "out").err


@pytest.mark.parametrize("size", ["32x96", "48x64", "64"])
def test_any_size_that_the_model_divides_works(
    finished: Finished, photo: tuple[object, ...], tmp_path: Path, size: str
) -> None:
    run = ("--run", finished("full"))
    (picture,) = drawn(tmp_path / "out", *run, *photo, "--text", "MOON", "--resolution", size).values()
    assert repainted_inside_alone(picture, photo)


def test_a_picture_is_cropped_or_stretched_as_asked(
    finished: Finished, photo: tuple[object, ...], signs: Path, tmp_path: Path
) -> None:
    """Stretched, the whole of the picture is before the model; pictures of the run's own shape are the same."""
    run = ("--run", finished("full"))
    one = {
        fit: drawn(tmp_path / fit, *run, *photo, "--text", "MOON", "--fit", fit)["photo.png"]
        for fit in ("crop", "stretch")
    }
    assert np.array_equal(
        one["crop"], drawn(tmp_path / "own", *run, *photo, "--text", "MOON", "--crop", "none")["photo.png"]
    )
    assert not np.array_equal(one["crop"], one["stretch"])
    assert all(repainted_inside_alone(picture, photo) for picture in one.values())
    data = (*run, "--data", signs / "held_out")
    cropped, stretched = (drawn(tmp_path / f"data-{fit}", *data, "--fit", fit) for fit in ("crop", "stretch"))
    assert all(np.array_equal(stretched[name], picture) for name, picture in cropped.items())


def test_an_image_that_loses_its_mask_names_the_options_of_the_command(config: Callable[..., RunConfig]) -> None:
    mask = Image.new("L", (100, 50))
    mask.paste(255, (0, 10, 100, 20))
    request = SampleRequest(image=Image.new("RGB", mask.size), masks=(mask,), texts=("A",), crop="none", size=(64, 64))
    with pytest.raises(DataError, match=r"; set --fit stretch or another --resolution$"):
        items_to_sample(config(), request)


def test_a_fit_that_there_is_not_is_refused(finished: Finished, signs: Path, tmp_path: Path) -> None:
    arguments = ("--run", finished("full"), "--data", signs / "held_out", "--out", tmp_path)
    outcome = retouch("sample", *arguments, "--fit", "strech")
    assert (outcome.code, outcome.err) == (2, "error: --fit: given 'strech'; did you mean 'stretch'?\n")


def test_a_size_that_it_does_not_divide_is_refused(finished: Finished, signs: Path, tmp_path: Path) -> None:
    outcome = retouch(
        "sample", "--run", finished("full"), "--data", signs / "held_out", "--resolution", "36x65", "--out", tmp_path
    )
    assert (outcome.code, outcome.err) == (
        2,
        "error: resolution: given 36x65; flux_fill needs multiples of 16; set 32x64\n",
    )


# --- eval ---


@pytest.fixture(scope="module")
def evaluated(finished: Finished, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """`retouch eval --run … --json`, and its --out folder."""
    out = tmp_path_factory.mktemp("eval")
    outcome = retouch("eval", "--run", finished("full"), "--images", 2, "--json", "--out", out)
    assert outcome.code == 0, outcome.err
    return json.loads(outcome.out), out


def test_base_warm_up_and_rl_are_compared_on_the_same_images(evaluated: tuple[dict[str, Any], Path]) -> None:
    result, _ = evaluated
    assert list(result["means"]) == ["base", "warmed up", "after RL"]
    assert (result["examples"], result["images"]) == (2, 4)
    assert list(result["gains"]) == ["warmed up - base", "after RL - warmed up"]
    for measure, (mean, low, high) in result["gains"]["after RL - warmed up"].items():
        difference = result["means"]["after RL"][measure] - result["means"]["warmed up"][measure]
        assert mean == pytest.approx(difference, abs=1e-9)
        assert low <= mean <= high
    assert {"preservation", "outside_l1", "glyph_correlation"} <= result["means"]["base"].keys()


def test_the_weights_of_the_curves_are_those_that_eval_takes(
    evaluated: tuple[dict[str, Any], Path], finished: Finished, tmp_path: Path
) -> None:
    """The run's own evaluations and `retouch eval` measure one thing; `evaluation.weights` says which for both."""
    lines = (finished("full") / "metrics.jsonl").read_text().splitlines()
    curve = [record for record in map(json.loads, lines) if record["kind"] == "eval"]
    run = shutil.copytree(finished("full"), tmp_path / "run")

    def means(*arguments: object) -> dict[str, Any]:
        outcome = retouch("eval", "--run", run, "--json", *arguments)
        assert outcome.code == 0, outcome.err
        return json.loads(outcome.out)["means"]["after RL"]

    average = means()
    assert {name: curve[-1][name] for name in average} == pytest.approx(average, abs=1e-9)
    data = yaml.safe_load((run / "config.yaml").read_text())
    data["evaluation"]["weights"] = "raw"
    (run / "config.yaml").write_text(yaml.safe_dump(data))
    raw = means()
    assert average != raw
    assert (means("--raw"), means("--ema")) == (raw, average)


def test_weights_are_found_with_the_run_directory_where_judges_count(finished: Finished) -> None:
    run = finished("full")
    assert Trained.find(run, None, None, None).run == run
    assert Trained.find(run, None, run / "checkpoints/step-000004", None).run == run
    assert Trained.find(None, run / "config.yaml", None, None).run is None


def test_given_weights_are_of_the_stage_of_their_checkpoint(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that lie in none are the end of the run: `eval --weights` reports transfer as the run itself does."""
    run = finished("full")
    found = Trained.find(run, None, None, None)
    assert found.after_rl == {"after RL"}
    warmed_up, newest = (found.weights[name].parent for name in ("warmed up", "after RL"))
    alone = shutil.copytree(newest / "weights", tmp_path / "weights")
    for given, by_rl in ((warmed_up, False), (newest, True), (newest / "ema", True), (alone, True)):
        for where in ((run, None), (None, run / "config.yaml")):
            assert Trained.find(*where, given, None).after_rl == ({"trained"} if by_rl else set())
    (tmp_path / "link").symlink_to(warmed_up / "weights")
    for place, given in (
        (warmed_up, "."),
        (warmed_up / "weights", "."),
        (warmed_up / "weights", ".."),
        (tmp_path, "link"),
    ):
        monkeypatch.chdir(place)
        assert Trained.find(run, None, Path(given), None).after_rl == set()
    for name in ("state.json", "complete.json"):  # of another program; a folder above the weights is no checkpoint
        (tmp_path / name).write_text("{}")
        inside = shutil.copytree(alone, tmp_path / name.partition(".")[0] / "weights")
        assert Trained.find(run, None, inside, None).after_rl == {"trained"}


def test_averaged_weights_that_a_checkpoint_has_not_are_no_others(finished: Finished, tmp_path: Path) -> None:
    newest = shutil.copytree(finished("full") / "checkpoints/step-000004", tmp_path / "step-000004")
    shutil.rmtree(newest / "ema")
    given = (None, finished("full") / "config.yaml", newest)
    assert list(Trained.find(*given, None).weights.values()) == [newest / "weights"]
    with pytest.raises(CheckpointError, match="has no EMA weights; leave --ema out"):
        Trained.find(*given, False)


def test_out_holds_a_grid_and_a_row_for_each_image(evaluated: tuple[dict[str, Any], Path]) -> None:
    result, out = evaluated
    assert sorted(path.name for path in out.iterdir()) == [
        "after-RL.jsonl",
        "base.jsonl",
        "grid.png",
        "warmed-up.jsonl",
    ]
    rows = [json.loads(line) for line in (out / "after-RL.jsonl").read_text().splitlines()]
    assert [(row["example"], row["index"]) for row in rows] == [(200, 0), (200, 1), (201, 0), (201, 1)]
    mean = sum(row["preservation"] for row in rows) / 4
    assert mean == pytest.approx(result["means"]["after RL"]["preservation"])
    grid = Image.open(out / "grid.png")
    assert grid.width > 4 * 192  # the input and three columns, enlarged


def test_the_table_shows_what_the_json_holds(
    evaluated: tuple[dict[str, Any], Path], finished: Finished, tmp_path: Path
) -> None:
    """And where the grid is; evaluation repeats to the last digit."""
    result, _ = evaluated
    outcome = retouch("eval", "--run", finished("full"), "--images", 2, "--out", tmp_path)
    assert outcome.code == 0
    assert outcome.out == f"{comparison_table(result)}\n{tmp_path}/grid.png\n"


def test_the_table_by_hand() -> None:
    result = {
        "examples": 1,
        "images": 2,
        "means": {"base": {"ned": 0.5}, "trained": {"ned": 0.75, "failed": 1.0}},
        "gains": {"trained - base": {"ned": [0.25, 0.15, 0.35]}},
        "against": "base",
    }
    assert comparison_table(result).splitlines() == [
        f"{'':28}{'base':>12}{'trained':>12}   trained - base [95 %]",
        f"{'ned':28}{0.5:12.4f}{0.75:12.4f}   +0.2500 [+0.1500, +0.3500]",
        f"{'failed':28}{'–':>12}{1.0:12.4f}",
        "2 images of 1 example, plain ODE, fixed seeds",
    ]


def test_gains_pair_the_images_that_both_evaluations_scored() -> None:
    """Differences .1, .3 (the third failed once): mean .2, standard deviation .141421, interval ± 12.706205 · .1."""
    before, after, alone = (
        Evaluation([{"example": i, "index": 0, **row} for i, row in enumerate(rows)], [])
        for rows in (
            [{"ned": 0.5, "ned.exact": 0}, {"ned": 0.2, "ned.exact": 0}, {"ned": None}],
            [{"ned": 0.6, "ned.exact": 0}, {"ned": 0.5, "ned.exact": 0}, {"ned": 0.9, "ned.exact": 1}],
            [{"ned": 0.5}],
        )
    )
    assert gains(after, before) == {"ned": pytest.approx([0.2, -1.0706205, 1.4706205]), "ned.exact": [0, 0, 0]}
    assert gains(alone, alone) == {}  # one image has no interval


def test_a_run_file_without_weights_evaluates_the_base(finished: Finished, signs: Path) -> None:
    outcome = retouch("eval", "--config", finished("full") / "config.yaml", "--data", signs / "prompts", "--json")
    result = json.loads(outcome.out)
    assert list(result["means"]) == ["base"] and result["gains"] == {}
    assert result["examples"] == 2  # evaluation.num_examples


@pytest.fixture(scope="module")
def both(finished: Finished, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """`retouch eval` of two runs, as JSON, and its --out folder."""
    out = tmp_path_factory.mktemp("both")
    outcome = retouch("eval", "--run", finished("full"), "--run", finished("lora"), "--json", "--out", out)
    assert outcome.code == 0, outcome.err
    return json.loads(outcome.out), out


def test_two_runs_are_compared_as_each_evaluates_alone(both: tuple[dict[str, Any], Path], finished: Finished) -> None:
    """On the same examples and seeds, and beside the base that both have."""
    result, _ = both
    assert list(result["means"]) == ["base", "full", "lora"]
    assert list(result["gains"]) == ["full - base", "lora - full"] and result["against"] == "full"
    for kind in ("full", "lora"):
        lines = (finished(kind) / "metrics.jsonl").read_text().splitlines()
        last = [record for record in map(json.loads, lines) if record["kind"] == "eval"][-1]
        for measure, value in result["means"][kind].items():
            assert last[measure] == pytest.approx(value, abs=1e-9), (kind, measure)
    mean, low, high = result["gains"]["lora - full"]["preservation"]
    assert low <= mean <= high
    assert mean == pytest.approx(result["means"]["lora"]["preservation"] - result["means"]["full"]["preservation"])


def test_the_page_of_two_runs_shows_what_was_sampled(both: tuple[dict[str, Any], Path]) -> None:
    result, out = both
    assert {path.name for path in out.iterdir()} == {
        "base.jsonl",
        "full.jsonl",
        "lora.jsonl",
        "grid.png",
        "compare.html",
    }
    page = (out / "compare.html").read_text()
    for words in ("<th>base</th><th>full</th><th>lora</th>", "lora − full [95 %]", "eval/preservation"):
        assert words in page
    assert f"<td>{result['means']['base']['glyph_correlation']:.4f}</td>" in page
    assert page.count("data:image/png;base64,") == 1


def test_runs_that_cannot_be_compared(finished: Finished, signs: Path, tmp_path: Path) -> None:
    """The message names both runs, before a network is loaded; --data gives both the same examples."""
    other = shutil.copytree(finished("lora"), tmp_path / "other")
    config = yaml.safe_load((other / "config.yaml").read_text())
    config["evaluation"]["data"]["path"] = str(signs / "targets")
    (other / "config.yaml").write_text(
        yaml.safe_dump({**config, "evaluation": {**config["evaluation"], "allow_overlap": True}})
    )
    runs = ("--run", finished("full"), "--run", other)
    assert refused(retouch("eval", *runs)) == (
        f"evaluation.data: full ({signs}/held_out, 4 examples) and other ({signs}/targets, 8 examples) evaluate on "
        "different examples; give both the same with --data"
    )
    outcome = retouch("eval", *runs, "--data", signs / "held_out", "--out", tmp_path / "out")
    pages = [str(tmp_path / "out" / name) for name in ("grid.png", "compare.html")]
    assert (outcome.code, outcome.out.split()[-2:]) == (0, pages)
    config["rewards"]["preservation"]["paste_back"] = True
    (other / "config.yaml").write_text(yaml.safe_dump(config))
    assert refused(retouch("eval", *runs, "--data", signs / "held_out")).startswith(
        "rewards.preservation: full and other define it differently (paste_back); rename the reward in"
    )
    assert refused(retouch("eval", *runs, "--weights", "x")).startswith("--run: given several times, which compares")


def test_the_table_of_several_gains_by_hand() -> None:
    gain = {"ned": [0.25, 0.15, 0.35]}
    result = {
        "examples": 2,
        "images": 2,
        "means": {"base": {"ned": 0.5}, "a": {"ned": 0.75}, "long-name-of-b": {"ned": 1.0}},
        "gains": {"a - base": gain, "long-name-of-b - a": gain},
        "against": "a",
    }
    head, line, _ = comparison_table(result).splitlines()
    assert head == f"{'':28}{'base':>16}{'a':>16}{'long-name-of-b':>16}   long-name-of-b - a [95 %]"
    assert line == f"{'ned':28}{0.5:16.4f}{0.75:16.4f}{1:16.4f}   +0.2500 [+0.1500, +0.3500]"


def test_examples_that_are_trained_on_are_warned_of(finished: Finished, signs: Path, tmp_path: Path) -> None:
    """Those of --data, and those of a run without evaluation.data, which evaluated on its training examples; where the
    training data is not here, that it cannot be found out."""
    run = shutil.copytree(finished("full"), tmp_path / "run")
    file = run / "config.yaml"

    def warnings(*data: object) -> str:
        outcome = retouch("eval", "--config", file, "--images", 1, *data)
        assert outcome.code == 0, outcome.err
        return " ".join(outcome.err.split())

    held_out = ("--data", signs / "held_out")
    assert "WARNING" not in warnings(*held_out)
    told = warnings("--data", signs / "targets")  # warmup_data
    assert "--data: full trained on 8 of 8 examples (the first: item 0)" in told
    config = yaml.safe_load(file.read_text())
    config["evaluation"]["data"] = None
    file.write_text(yaml.safe_dump(config))
    told = warnings()
    assert " data: full has no evaluation.data: its training examples are evaluated, which were not held out" in told
    own = tmp_path / "own.yaml"
    own.write_text(file.read_text().replace(str(signs / "prompts"), "${NO_SUCH_VARIABLE}/signs"))
    outcome = retouch("eval", "--config", own)
    assert outcome.code == 2 and "data.path, ${NO_SUCH_VARIABLE}/signs; give --data" in " ".join(outcome.err.split())
    file.write_text(file.read_text().replace(str(signs / "prompts"), str(tmp_path / "gone")))
    told = warnings(*held_out)
    assert "it is unknown whether full trained on these examples: data.path has no images on this machine" in told


@pytest.mark.parametrize("keep_base", [False, True])
def test_the_base_is_copied_only_to_come_back_to_it(finished: Finished, keep_base: bool) -> None:
    """Sampling needs no copy, and a comparison begins with the base: all of FLUX twice is 47 GB more."""
    run = finished("full")

    def held() -> int:
        gc.collect()
        return sum(t.nbytes for t in gc.get_objects() if type(t) is torch.Tensor)

    before = held()
    loaded = Loaded(load_run(run / "config.yaml"), keep_base=keep_base)
    copied = held() - before
    state = loaded.policy.state()
    base = next(iter(state.values())).clone()
    assert (copied >= sum(t.nbytes for t in state.values())) == keep_base
    loaded.load(None)
    loaded.load(run / "checkpoints/step-000004/weights")
    assert not torch.equal(next(iter(loaded.policy.state().values())), base)
    if keep_base:
        loaded.load(None)
        assert torch.equal(next(iter(loaded.policy.state().values())), base)
    else:
        with pytest.raises(RuntimeError, match="the base was replaced by other weights"):
            loaded.load(None)


# --- what cannot work ---


def refused(outcome: Outcome) -> str:
    assert (outcome.code, outcome.out) == (2, "")
    *begun, line = outcome.err.splitlines()
    assert len(begun) <= 1 and all(" loading torch" in one for one in begun)
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "give either --data, or --image with --mask (or --box) and --text (or --prompt)"),
        (
            ["--data", "{data}", "--image", "x.png"],
            "give either --data, or --image with --mask (or --box) and --text (or --prompt)",
        ),
        (["--image", "{data}/test200_source.png"], "--image needs --mask (or --box) and --text (or --prompt)"),
        (
            ["--image", "x.png", "--mask", "m.png", "--text", " "],
            "--text: given an empty text; give the text to write into the mask",
        ),
        (
            ["--image", "{data}/test200_source.png", "--box", "0,0,65,32", "--text", "A"],
            "--box: given 0,0,65,32; expected a box inside the image, which is 64 x 32; set RIGHT to 64 and BOTTOM",
        ),
        (["--image", "x.png", "--box", "1,2,3", "--text", "A"], "--box: given '1,2,3'; write LEFT,TOP,RIGHT,BOTTOM"),
        (
            ["--image", "x.png", "--mask", "m.png", "--box", "1,2,3,4", "--text", "A"],
            "--box: given beside --mask; leave one of them out",
        ),
        (
            ["--image", "x.png", "--box", "1,2,3,4", "--text", "A", "--prompt", "B"],
            "--text: given beside --prompt, which is the whole prompt; leave one of them out",
        ),
        (
            ["--data", "{data}", "--box", "1,2,3,4"],
            "--box: given with --data, whose items have their own masks and prompts; omit it",
        ),
        (["--data", "{data}", "--crop", "maks"], "--crop: given 'maks'; did you mean 'mask'?"),
        (["--image", "x.png", "--mask", "{data}/test200_mask.png", "--text", "A"], "x.png: no such file"),
        (
            ["--data", "nowhere.pdf"],
            (
                "nowhere.pdf: no such file or folder; expected a mapping_file.json, a self_bench.txt, a "
                "cross_bench.txt, votes of `retouch label`, a .txt of prompts, a manifest (.json, .jsonl, .csv, .tsv), "
                "an imagefolder (metadata.jsonl or metadata.csv)"
            ),
        ),
        (
            ["--data", "{data}", "--resolution", "axb"],
            "--resolution: given 'axb'; write a side like 512, or HEIGHTxWIDTH",
        ),
        (["--data", "{data}", "--weights", "nowhere"], "--weights: given nowhere; no such file or folder"),
        (["--data", "{data}", "--weights", "{data}"], "{data}: neither a checkpoint nor a folder of weights"),
        (
            ["--data", "{data}", "--out", "{data}/self_bench.txt"],
            "--out: given {data}/self_bench.txt, which is a file; give a folder",
        ),
    ],
)
def test_what_sample_cannot_do(
    finished: Finished, signs: Path, tmp_path: Path, arguments: list[str], problem: str
) -> None:
    data = str(signs / "held_out")
    given = [argument.replace("{data}", data) for argument in arguments]
    out = [] if "--out" in given else ["--out", tmp_path]
    assert refused(retouch("sample", "--run", finished("full"), *given, *out)).startswith(
        problem.replace("{data}", data)
    )


def test_what_eval_and_export_cannot_do(finished: Finished, tmp_path: Path) -> None:
    run = finished("full")
    (tmp_path / "note.txt").touch()
    assert refused(retouch("eval")) == "give either --run RUN_DIR or --config RUN.yaml"
    assert refused(retouch("eval", "--run", tmp_path)).startswith(f"--run: given {tmp_path}; expected a run directory")
    export = ("export", run / "checkpoints" / "step-000004", "--out", tmp_path / "x", "--to")
    assert refused(retouch(*export, "difusers")) == "--to: given 'difusers'; did you mean 'diffusers'?"
    assert retouch(*export, "comfyui").err == (  # before anything is loaded
        "error: --to: given 'comfyui', but the run trained full weights; use --to diffusers, safetensors, or train "
        "with model.train.kind=lora\n"
    )
    assert refused(retouch(*export[:3], tmp_path, "--to", "diffusers")) == (
        f"--out: given {tmp_path}; expected a new or empty folder; choose another"
    )


def test_an_export_has_the_weights_that_are_evaluated(finished: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    """EMA weights were exported whatever `evaluation.weights` says, and `eval` and `sample` showed others."""
    newest = finished("lora") / "checkpoints" / "step-000004"
    for kind, part in (("raw", "weights"), ("ema", "ema"), (None, "ema")):
        run = {"evaluation": {"weights": kind}}
        monkeypatch.setattr(exporting, "saved_run_file", lambda state, folder, run=run: run)
        evaluated_raw = exporting._evaluates_raw(newest)
        for chosen, found in ((None, part), (True, "weights"), (False, "ema")):
            assert chosen_weights(newest, chosen, evaluated_raw=evaluated_raw) == newest / found


def test_an_export_goes_to_the_run_unless_it_is_told_where(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never into a checkpoint: not even from inside one, or one that lies alone."""
    run = shutil.copytree(finished("lora"), tmp_path / "run")
    newest = run / "checkpoints" / "step-000004"
    files = sorted(newest.rglob("*"))
    for given, more, name in (
        (run, [], "step-000004-diffusers-lora"),
        (newest, ["--raw"], "step-000004-diffusers-lora-raw"),
        (run / "checkpoints" / "step-000002", [], "step-000002-diffusers-lora"),
    ):
        outcome = retouch("export", given, "--to", "diffusers-lora", *more)
        (file,) = (run / "exports" / name).iterdir()
        assert (outcome.code, outcome.out) == (0, f"{file}\n"), outcome.err
    assert refused(retouch("export", run, "--to", "diffusers-lora")) == (
        f"--out: given {run / 'exports' / 'step-000004-diffusers-lora'}; expected a new or empty folder; choose another"
    )
    alone = shutil.copytree(newest, tmp_path / "alone")
    monkeypatch.chdir(alone)
    assert retouch("export", ".", "--to", "safetensors").out == f"{tmp_path}/alone-safetensors/lora-alone.safetensors\n"
    monkeypatch.chdir(alone / "weights")
    for given, to, name in ((".", "comfyui", "comfyui-raw"), ("..", "diffusers-lora", "diffusers-lora")):
        assert retouch("export", given, "--to", to).out.startswith(f"{tmp_path}/alone-{name}/")
    assert [p.relative_to(alone) for p in sorted(alone.rglob("*"))] == [p.relative_to(newest) for p in files]
    assert sorted(newest.rglob("*")) == files
    shutil.rmtree(run / "checkpoints")
    assert refused(retouch("export", run, "--to", "safetensors")).endswith("/run has no complete checkpoint yet")


def test_a_format_of_style_adapters_for_a_lora_names_the_formats_of_loras(finished: Finished, tmp_path: Path) -> None:
    outcome = retouch("export", finished("lora"), "--to", "ip-adapter", "--out", tmp_path / "x")
    assert outcome.err.splitlines()[-1] == (
        "error: --to: given 'ip-adapter', but the run trained lora weights; use --to diffusers-lora, comfyui, "
        "diffusers, safetensors, or train with model.train.kind=ip_adapter"
    )


def test_a_lora_is_exported_to_comfyui(finished: Finished, tmp_path: Path) -> None:
    outcome = retouch("export", finished("lora"), "--to", "comfyui", "--out", tmp_path / "x")
    assert outcome.code == 0, outcome.err
    file = tmp_path / "x" / "lora-step-000004.safetensors"
    assert outcome.out.strip() == str(file)
    assert "transformer.transformer_blocks.0.attn.to_q.alpha" in load_file(file)
    with safe_open(file, "pt") as opened:
        about = opened.metadata()
    assert about["modelspec.title"] == "lora-step-000004" and about["ss_network_dim"] == "4"
    assert about["modelspec.trigger_phrase"] == "The text is '{text}'."
    base = Path(load_run(finished("lora") / "config.yaml").model.path).name
    assert about["modelspec.description"] == f"grpo with retouch, step-000004, on {base}"


def test_a_picture_of_no_numbers_is_not_written_as_a_black_one(
    finished: Callable[[str], Path], signs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = finished("lora")
    monkeypatch.setattr(FluxFill, "decode", lambda self, latents: torch.full((len(latents), 3, 32, 64), torch.nan))
    outcome = retouch("sample", "--run", run, "--data", signs / "held_out", "--out", tmp_path / "out")
    assert outcome.code == 1 and "its sample contains NaN or Inf; the weights are broken" in outcome.err
    assert not list((tmp_path / "out").glob("*.png"))


# --- damaged checkpoints ---

STATES = ["{}", "[]", '{"config": 3}', '{"progress": 3, "config": "a: 1"}', '{"config": "a: [1"}', "["]


@pytest.mark.parametrize("state", STATES)
def test_a_damaged_state_of_a_checkpoint_is_one_line(
    finished: Finished, signs: Path, tmp_path: Path, state: str
) -> None:
    run = Path(shutil.copytree(finished("lora"), tmp_path / "run"))
    folder = run / "checkpoints/step-000004"
    (folder / "state.json").write_text(state)
    for command in (
        ("export", run, "--to", "safetensors", "--out", tmp_path / "out"),
        ("sample", "--run", run, "--data", signs / "held_out", "--out", tmp_path / "images"),
        ("eval", "--run", run),
    ):
        outcome = retouch(*command)
        message = f"error: {folder}: damaged (state.json: its size differs from complete.json); copy it again, or "
        assert (outcome.code, outcome.err.splitlines()[-1]) == (2, f"{message}delete it to resume from the one before")


def test_a_flipped_bit_is_found_wherever_weights_of_a_checkpoint_are_named(
    finished: Finished, signs: Path, tmp_path: Path
) -> None:
    """By its run, its folder of weights, and as the adapter that another run starts from."""
    run = Path(shutil.copytree(finished("lora"), tmp_path / "run"))
    folder = run / "checkpoints/step-000004"
    file = folder / "ema/pytorch_lora_weights.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    sample = ("sample", "--config", run / "config.yaml", "--data", signs / "held_out", "--out", tmp_path / "images")
    begin = f"logging.dir={tmp_path}", "name=next", "resume=null"
    for command in (
        ("export", run, "--to", "safetensors"),
        ("export", folder / "ema", "--to", "safetensors"),
        (*sample, "--weights", folder),
        (*sample, "--weights", folder / "ema"),
        ("train", run / "config.yaml", *begin, f"model.train.initial_adapter={run}"),
        ("train", run / "config.yaml", *begin, f"model.train.initial_adapter={file}"),
    ):
        outcome = retouch(*command)
        assert outcome.code == 2, command
        message = f"damaged (ema/{file.name}: its SHA-256 differs from complete.json)"
        assert message in outcome.err.splitlines()[-1], outcome.err


# --- whole files or none ---


def test_an_export_appears_whole_or_not_at_all(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill, or an error, between two files leaves nothing that looks like an export."""

    def cut_off(model: Any, weights: Path, to: str, out: Path, about: Any) -> Path:
        out.mkdir(parents=True)
        (out / "model.safetensors").write_bytes(b"half")
        assert not (tmp_path / "out").exists()
        raise KeyboardInterrupt

    arguments = ("export", finished("lora"), "--to", "safetensors", "--out", tmp_path / "out")
    with monkeypatch.context() as patched:
        patched.setattr("retouch.adapters.export.export", cut_off)
        assert retouch(*arguments).code == 3
    assert not list(tmp_path.iterdir())
    (tmp_path / "out").mkdir()
    assert retouch(*arguments).code == 0
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "lora-step-000004.safetensors"]


def test_an_export_into_a_folder_with_a_long_name(finished: Finished, tmp_path: Path) -> None:
    """Of three bytes a character: the name of the folder beside it was over the limit of a file system."""
    out = tmp_path / ("\u5b57" * 80)
    assert retouch("export", finished("lora"), "--to", "safetensors", "--out", out).code == 0
    assert [path.name for path in out.iterdir()] == ["lora-step-000004.safetensors"]


def test_two_exports_into_one_folder(finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The later one reports the other."""

    def late(model: Any, weights: Path, to: str, out: Path, about: Any) -> Path:
        out.mkdir(parents=True)
        (out / "model.safetensors").write_bytes(b"later")
        (tmp_path / "out").mkdir()
        (tmp_path / "out/model.safetensors").write_bytes(b"earlier")
        return out / "model.safetensors"

    monkeypatch.setattr("retouch.adapters.export.export", late)
    outcome = retouch("export", finished("lora"), "--to", "safetensors", "--out", tmp_path / "out")
    assert outcome.code == 2
    assert "another process wrote there" in outcome.err
    assert (tmp_path / "out/model.safetensors").read_bytes() == b"earlier"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_export_into_a_folder_where_a_disk_is_mounted(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files cannot be renamed from the disk beside it."""
    out, rename = tmp_path / "out", Path.rename

    def on_one_disk(path: Path, target: Path) -> Path:
        if path.is_relative_to(out) != target.is_relative_to(out):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", on_one_disk)
    out.mkdir()
    outcome = retouch("export", finished("lora"), "--to", "safetensors", "--out", out)
    assert outcome.code == 0, outcome.err
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "lora-step-000004.safetensors"]


@pytest.mark.parametrize("links", [True, False])
def test_two_processes_that_sample_into_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    """Each image gets a name of its own, although both find the first one free."""

    def without_links(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    def next_free() -> Path:
        free = next(names)
        if free.name == "a.png":
            Image.new("RGB", (4, 4), "red").save(free)  # by the other process
        return free

    if not links:
        monkeypatch.setattr("os.link", without_links)
    names = iter([tmp_path / "a.png", tmp_path / "b.png"])
    written = write_new_png(Image.new("RGB", (4, 4), "blue"), next_free)
    assert written == tmp_path / "b.png"
    assert pixels(written)[0, 0].tolist() == [0, 0, 255]
    assert pixels(tmp_path / "a.png")[0, 0].tolist() == [255, 0, 0]
    assert not list(tmp_path.glob(".*"))


# --- a sample in the space of its file ---


def test_samples_keep_the_values_of_their_files(finished: Finished, tmp_path: Path) -> None:
    """Six kinds of files in one list, each read back by a reader that is not Pillow's."""
    cases = [case for case in CASES if case.name in _SAMPLED]
    assert len(cases) == len(_SAMPLED)
    entries: list[dict[str, str]] = []
    for case in cases:
        case.write(tmp_path / case.name)
        with Image.open(tmp_path / case.name) as image:
            size = ImageOps.exif_transpose(image).size
        mask = Image.new("L", size)
        mask.paste(255, (4, 4, 12, 10))
        mask.save(tmp_path / f"{case.name}-mask.png")
        entries.append({"image": case.name, "mask": f"{case.name}-mask.png", "prompt": "The text is 'MOON'."})
    (tmp_path / "list.json").write_text(json.dumps(entries))
    run = ("--run", finished("full"), "--data", tmp_path / "list.json", "--steps", 1)
    outcome = retouch("sample", *run, "--fit", "stretch", "--out", tmp_path / "out")
    assert outcome.code == 0, outcome.err
    for case, written in zip(cases, outcome.out.splitlines(), strict=True):
        values = png_values(Path(written))
        kept = np.asarray(to_rgb(open_image(tmp_path / case.name))) if case.values is None else case.values
        hole = inside(tmp_path / f"{case.name}-mask.png")
        assert values.dtype == kept.dtype and np.array_equal(values[~hole], kept[~hole])
        assert not np.array_equal(values[hole], kept[hole])
        with Image.open(written) as image:
            assert image.info.get("icc_profile") == case.profile
    assert "cmyk.tif: CMYK colours, which a PNG cannot hold" in " ".join(outcome.err.split())


_SAMPLED = ("rgb-alpha-16.png", "prophoto-16.png", "p3-alpha.png", "grey-16.tif", "orientation6.jpg", "cmyk.tif")
