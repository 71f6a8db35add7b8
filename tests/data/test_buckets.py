"""Images in their own shape: the shapes, the one of an image, its crop, and the shape of an epoch and of a step."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pydantic import ValidationError

from retouch.config import ConfigError, RunConfig, derive, parse_run
from retouch.config.cost import pixels_of
from retouch.data.buckets import Buckets, Shapes, batches_of_one_shape, by_shape
from retouch.data.dataset import DataError, Dataset, load_dataset, shapes_of
from retouch.data.formats.manifest import ManifestData
from retouch.data.rules import require_groups, shape_warnings
from retouch.data.sampler import batch_examples, curriculum_examples, easiest, epoch_examples, shuffled
from retouch.doctor.data import _checked, _enough
from retouch.imaging.fitting import MOST_SQUEEZED, fit_size
from retouch.imaging.reading import image_size, open_image
from tests.conftest import small_run
from tests.shapes import OWN_SHAPE, SHAPES, write_shapes

SIDES = st.integers(1, 5000)

BUCKETS = st.builds(
    lambda multiple, cells, aspect: Buckets(pixels=multiple**2 * cells, multiple=multiple, max_aspect=aspect),
    st.integers(1, 64),
    st.integers(1, 3000),
    st.floats(1.0, 8.0),
)

# --- the shapes ---


@given(BUCKETS)
def test_shapes_have_about_one_area_sides_of_the_multiple_and_at_most_the_aspect(buckets: Buckets) -> None:
    assert len({*buckets.shapes}) == len(buckets.shapes)
    assert {*buckets.shapes} == {shape[::-1] for shape in buckets.shapes}
    for height, width in buckets.shapes:
        short, long, half = min(height, width), max(height, width), buckets.multiple / 2
        assert short % buckets.multiple == 0 == long % buckets.multiple
        assert long <= buckets.max_aspect * short or long == short
        side = math.sqrt(buckets.pixels)
        assert abs(short * long - buckets.pixels) <= (short * half if short < long else half * (2 * side + half)) + 1e-6
    assert buckets.largest[0] * buckets.largest[1] == max(map(math.prod, buckets.shapes))


@given(BUCKETS)
def test_a_wide_shape_is_the_short_side_and_the_multiple_nearest_to_the_rest_of_the_area(buckets: Buckets) -> None:
    m, wide = buckets.multiple, [shape for shape in buckets.shapes if shape[0] < shape[1]]
    shorts = range(buckets.shapes[0][0] - m, 0, -m)
    expected = [(short, m * math.floor(buckets.pixels / (short * m) + 0.5)) for short in shorts]
    assert wide == [*itertools.takewhile(lambda shape: shape[1] <= buckets.max_aspect * shape[0], expected)]


@given(BUCKETS, SIDES, SIDES, st.integers(1, 9))
def test_an_image_gets_the_shape_of_the_nearest_ratio(buckets: Buckets, width: int, height: int, times: int) -> None:
    found = buckets.nearest(width, height)
    off = {shape: abs(math.log(shape[1] / shape[0] * height / width)) for shape in buckets.shapes}
    assert off[found] <= min(off.values()) + 1e-9
    assert buckets.nearest(height, width) == found[::-1]  # turned with the image
    assert buckets.nearest(times * width, times * height) == found
    assert buckets.nearest(found[1], found[0]) == found


@given(BUCKETS, st.lists(st.tuples(SIDES, SIDES), min_size=2, max_size=8))
def test_a_wider_image_gets_no_narrower_shape(buckets: Buckets, sizes: list[tuple[int, int]]) -> None:
    ordered = sorted(sizes, key=lambda size: size[0] / size[1])
    ratios = [shape[1] / shape[0] for shape in (buckets.nearest(*size) for size in ordered)]
    assert ratios == sorted(ratios)


def test_the_shapes_of_half_a_megapixel_are_these() -> None:
    assert Buckets(pixels=2048, max_aspect=8).shapes == ((48, 48), (32, 64), (64, 32), (16, 128), (128, 16))
    shapes = Buckets().shapes
    assert len(shapes) == 23 and shapes[0] == (512, 512) and shapes[-2:] == ((336, 784), (784, 336))
    assert Buckets().largest == (448, 592)
    shaped = ManifestData(path="x", resolution=Buckets(), reference_strip=288)
    assert pixels_of(shaped) == (336 + 288, 784) and pixels_of(ManifestData(path="x", resolution=64)) == (64, 64)


# --- the option ---


@pytest.mark.parametrize(
    ("given_value", "message"),
    [
        ({"pixel": 3}, "pixel: unknown key; did you mean 'pixels'?"),
        ({"pixels": 100}, "pixels: given 100, less than one square of multiple 16; set pixels to at least 256"),
        ({"max_aspect": 0.5}, "max_aspect: given 0.5; input should be greater than or equal to 1"),
        ("wide", "given 'wide'; write the side of a square in pixels, like 512, or [height, width]"),
    ],
)
def test_a_wrong_resolution_is_refused_with_its_key(given_value: object, message: str) -> None:
    with pytest.raises(ValidationError) as error:
        ManifestData(path="x", resolution=given_value)  # type: ignore[arg-type]
    assert message in str(error.value)


def test_the_resolution_must_fit_the_family_and_the_data(run_file: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(ConfigError, match=r"resolution.multiple: given 20; flux_fill needs multiples of 8; set 40"):
        parse_run(run_file(data__resolution={"multiple": 20}))
    prompts = {"format": "prompts", "path": "x", "resolution": {}}
    with pytest.raises(ConfigError, match=r"data.resolution: given shapes for images, but format 'prompts' has none"):
        parse_run(run_file(data=prompts, model={"family": "qwen_image", "path": "x"}))
    compiled = parse_run(run_file(data__resolution=OWN_SHAPE, training__compile=True))
    [warning] = compiled.data.resolution.warnings(compiled)  # type: ignore[union-attr]
    assert "compiled anew" in warning


# --- examples ---


def in_shapes(manifest: Path, **options: Any) -> ManifestData:
    return ManifestData(path=str(manifest), resolution=Buckets(**OWN_SHAPE), **options)


def test_an_example_has_the_shape_that_its_file_tells_before_it_is_read(tmp_path: Path) -> None:
    data = load_dataset(in_shapes(write_shapes(tmp_path)))
    assert Counter(data.shapes) == dict.fromkeys(SHAPES, 4)
    assert [example.shape for example in data] == data.shapes == [example.size for example in data]
    assert data.shapes == Dataset(data.config, data.items).shapes
    for example in data:
        assert example.mask is not None and example.target is not None and example.source is not None
        assert example.mask.size == example.source.size == example.target.size
    whole = load_dataset(ManifestData(path=data.config.path, resolution=(32, 64), fit="stretch"))
    assert whole.shapes == [(32, 64)] * 16


def test_processes_share_the_files_and_agree_on_the_shapes(tmp_path: Path) -> None:
    data = load_dataset(in_shapes(write_shapes(tmp_path)))

    class Two:
        world_size = 2
        read: list[Any] = []  # noqa: RUF012

        def __init__(self, rank: int) -> None:
            self.rank = rank

        def gather_list(self, values: Any) -> list[Any]:
            Two.read += values
            return Two.read

    with pytest.raises(ValueError, match="zip"):  # the first has half of them
        dict(zip(data.shapes, shapes_of(data.items, data.config, Two(0)), strict=True))
    assert shapes_of(data.items, data.config, Two(1)) == data.shapes
    data.items[0].source_path.unlink()  # type: ignore[union-attr]
    with pytest.raises(DataError, match="no such file"):
        shapes_of(data.items, data.config)


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".tif", ".webp"])
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_the_head_of_a_file_tells_the_size_that_is_read(suffix: str, orientation: int, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x112] = orientation
    path = tmp_path / f"image{suffix}"
    Image.new("RGB", (30, 20)).save(path, exif=exif)
    assert image_size(path) == open_image(path).size


@given(st.integers(20, 400), st.integers(20, 400), st.data())
def test_no_mask_is_cut_off_inside_the_aspect(width: int, height: int, draw: st.DataObject) -> None:
    """Where a mask is as wide as its image, its side is squeezed by what the shape differs from the image."""
    buckets = Buckets(pixels=65536, multiple=16)
    shape = buckets.nearest(width, height)
    target = shape[1], shape[0]
    left, upper = draw.draw(st.integers(0, width - 1)), draw.draw(st.integers(0, height - 1))
    keep = left, upper, draw.draw(st.integers(left + 1, width)), draw.draw(st.integers(upper + 1, height))
    scaled, window = fit_size((width, height), target, "crop", keep, squeezes=True)
    assert (window[2] - window[0], window[3] - window[1]) == target
    assert scaled[0] >= window[2] and scaled[1] >= window[3] and window[0] >= 0 and window[1] >= 0
    ratio = max(scaled[0] * height, scaled[1] * width) / min(scaled[0] * height, scaled[1] * width)
    assert ratio <= MOST_SQUEEZED * 1.02  # sides are whole pixels
    if max(width, height) <= 2.3 * min(width, height):
        for side in (0, 1):
            scale = scaled[side] / (width, height)[side]
            assert keep[side] * scale >= window[side] - 1 and keep[side + 2] * scale <= window[side + 2] + 1


def test_only_images_in_their_own_shape_are_squeezed() -> None:
    whole = (0, 0, 104, 100)
    assert fit_size((104, 100), (96, 96), "crop", whole) == ((100, 96), (2, 0, 98, 96))
    assert fit_size((104, 100), (96, 96), "crop", whole, squeezes=True) == ((96, 96), (0, 0, 96, 96))
    assert fit_size((104, 100), (96, 96), "crop", None, squeezes=True) == ((100, 96), (2, 0, 98, 96))
    far = (0, 0, 200, 100)
    assert fit_size((200, 100), (96, 96), "crop", far, squeezes=True) == fit_size((200, 100), (96, 96), "crop", far)


# --- the shape of an epoch, and of a supervised step ---

SHAPED = st.lists(st.sampled_from("abcd"), min_size=1, max_size=40)


@given(SHAPED, st.integers(1, 12), st.integers(0, 3))
def test_a_pass_has_whole_epochs_of_every_shape(shapes: list[str], groups: int, seed: int) -> None:
    counts = Counter(shapes)
    epochs = sum(count // groups for count in counts.values())
    if not epochs:
        with pytest.raises(DataError, match=f"but the data set has {max(counts.values())} examples"):
            epoch_examples(len(shapes), groups, seed, 0, shapes)
        return
    for number in range(2):
        chosen = [epoch_examples(len(shapes), groups, seed, number * epochs + part, shapes) for part in range(epochs)]
        assert all(len({*one}) == groups and len({shapes[i] for i in one}) == 1 for one in chosen)
        everything = [i for one in chosen for i in one]
        assert len({*everything}) == len(everything)
        assert Counter(shapes[one[0]] for one in chosen) == +Counter({s: n // groups for s, n in counts.items()})
        if len(counts) == 1:
            assert everything == list(shuffled(len(shapes), seed, number)[: epochs * groups])


@given(SHAPED, st.integers(1, 12), st.integers(0, 3))
def test_steps_go_through_the_stream_of_each_shape_in_order(shapes: list[str], rows: int, seed: int) -> None:
    """The closed form of a step is what a walk through the endless stream finds."""
    waiting: dict[str, list[int]] = {}
    walked: list[list[int]] = []
    for number in range(6):
        for i in shuffled(len(shapes), seed, number):
            queue = waiting.setdefault(shapes[i], [])
            queue.append(i)
            if len(queue) == rows:
                walked.append(waiting.pop(shapes[i]))
    assert [batch_examples(len(shapes), rows, seed, step, shapes) for step in range(len(walked))] == walked
    known = Shapes(shapes)
    assert [batch_examples(len(shapes), rows, seed, step, known) for step in range(len(walked))] == walked


class Looked(list[str]):
    """Counts how often a shape is looked at."""

    looks = 0

    def __getitem__(self, key: Any) -> Any:
        self.looks += 1
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[str]:
        self.looks += len(self)
        return super().__iter__()


@pytest.mark.parametrize("some", ["a", "ab"])
def test_the_shapes_are_looked_at_once_a_pass_and_not_once_a_step(some: str) -> None:
    looked = Looked(some * (200 // len(some)))
    known = Shapes(looked)
    for step in range(3 * 200 // 5):
        batch_examples(200, 5, 9, step, known)
    assert looked.looks <= 200 + 5 * 3 * 200


@given(st.integers(1, 30), st.integers(1, 9), st.integers(0, 20))
def test_with_one_shape_epochs_and_steps_are_those_without_shapes(size: int, rows: int, step: int) -> None:
    one = [(512, 512)] * size
    assert batch_examples(size, rows, 3, step, one) == batch_examples(size, rows, 3, step)
    if rows <= size:
        assert epoch_examples(size, rows, 3, step, one) == epoch_examples(size, rows, 3, step)


def test_a_curriculum_draws_epochs_of_one_shape_from_its_stage() -> None:
    shapes, difficulties = ["a", "b"] * 8, list(map(float, range(16)))
    for epoch in range(8):
        chosen = curriculum_examples(difficulties, 3, 1, epoch, 8, 2, shapes)
        assert len({shapes[i] for i in chosen}) == 1
        assert {*chosen} <= {*easiest(difficulties, 1 if epoch < 4 else 2, 2)}


@given(SHAPED, st.integers(1, 6))
def test_batches_are_of_one_shape_and_hold_everything_once(shapes: list[str], size: int) -> None:
    batches = batches_of_one_shape(shapes, size)
    assert all(len({shapes[i] for i in rows}) == 1 and len(rows) <= size for rows in batches)
    assert [i for rows in batches for i in rows] == [i for rows in by_shape(shapes) for i in rows]
    assert sorted(i for rows in batches for i in rows) == [*range(len(shapes))]


def test_examples_of_shapes_that_no_epoch_fills_are_refused_or_told(tmp_path: Path, signs: Path) -> None:
    data = load_dataset(in_shapes(write_shapes(tmp_path)))

    def asked(**overrides: Any) -> RunConfig:
        return parse_run(small_run(signs, tmp_path, **overrides))

    two = derive(asked())
    assert require_groups(asked(), two, data) is None
    assert shape_warnings(asked(algorithm__sft_steps=2), two, data, data) == []
    height, width = data.shapes[0]
    del data.items[0], data.shapes[0]  # three are left of that shape
    told = require_groups(asked(), two, data)
    assert told and told.startswith("data.resolution: some shapes are trained on less often, because an epoch takes 2")
    assert f"sits out the pass ({height} x {width}: 1 of 3); lower rollout.global_groups" in told
    large = asked(algorithm__sft_steps=2, optimizer__gradient_accumulation=2)
    [told] = shape_warnings(large, derive(large), data, data)
    assert told.startswith("warmup_data.resolution: a step takes 4 examples of one shape, and repeats")
    assert f"with fewer ({height} x {width}: 3);" in told
    [line] = _checked("examples", partial(_enough, large, 1, data, data), "warning")
    assert line.status == "warning" and "less often" in line.says and told in line.says
    four = asked(rollout__global_groups_per_batch=4)
    told = require_groups(four, derive(four), data)
    assert told and "3 of 15 examples are never trained on, because an epoch takes 4 of one shape" in told
    data.config = in_shapes(tmp_path / "manifest.jsonl", max_bad_items=2)
    with pytest.raises(ConfigError, match=r"set rollout.global_groups_per_batch=3 .* or data.max_bad_items=3"):
        require_groups(four, derive(four), data)
    five = asked(rollout__global_groups_per_batch=5)
    with pytest.raises(ConfigError, match=r"15 of 15 .*, which makes fewer shapes$"):
        require_groups(five, derive(five), data)


def test_labels_that_a_shape_lacks_are_told(tmp_path: Path, signs: Path) -> None:
    """KTO compares good with bad images inside a step, and a step has one shape."""
    manifest = write_shapes(tmp_path)
    data = load_dataset(in_shapes(manifest))
    kto = parse_run(small_run(signs, tmp_path, algorithm={"name": "kto"}, rollout={}, rewards={},
                              data={"format": "manifest", "path": str(manifest), "resolution": OWN_SHAPE}))  # fmt: skip
    assert shape_warnings(kto, derive(kto), data, data) == []
    first = data.shapes[0]
    good = [i for i, item in enumerate(data.items) if data.shapes[i] != first or item.metadata["label"] == "good"]
    data.items, data.shapes = [data.items[i] for i in good], [data.shapes[i] for i in good]
    [told] = shape_warnings(kto, derive(kto), data, data)
    assert told.startswith(f"data.resolution: of the shape {first[0]} x {first[1]}, whose steps have no others, data: ")
    assert "label good" in told
