"""Where references come from: files, the mask's box, half of it, other items; and the strip above the picture."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from retouch.config import parse_run
from retouch.config.needs import needed_pictures
from retouch.data.base import DataError, ItemError, ItemFiles
from retouch.data.dataset import load_dataset
from retouch.data.discover import data_at
from retouch.data.formats.calligrapher import CrossBenchData
from retouch.data.formats.manifest import ManifestData
from retouch.data.item import check_item
from retouch.errors import ImageProblem
from retouch.imaging.fitting import into_strip, stack_above
from retouch.imaging.masks import halves, mask_box
from tests.command_line import retouch

from .conftest import HOLE, SIZE, Bench, box_mask, picture, pixels

LEFT, RIGHT = (8, 4, 24, 20), (24, 4, 40, 20)
"""Halves of HOLE."""


# --- the mask's box ---


def test_the_mask_box_of_the_source_where_no_reference_is_given(bench: Bench) -> None:
    bench.add(1).add(2, ref=picture((5, 6), blue=9)).list(["1-A", "2-B"])
    first, second = load_dataset(bench.config(reference="mask_box"))
    assert pixels(first.reference) == pixels(picture(blue=1).crop(HOLE))
    assert pixels(second.reference) == pixels(picture((5, 6), blue=9))  # its own
    assert load_dataset(bench.config())[0].reference is None


def test_the_target_shows_the_text_where_the_source_does_not(bench: Bench, tmp_path: Path) -> None:
    bench.add(1)
    picture(blue=70).save(tmp_path / "target.png")
    entry = {
        "image_path": "test1_source.png",
        "mask_path": "test1_mask.png",
        "target_path": "target.png",
        "prompt": "p",
    }
    (tmp_path / "m.json").write_text(json.dumps([entry]), encoding="utf-8")
    config = ManifestData(path=str(tmp_path / "m.json"), resolution=(SIZE[1], SIZE[0]), reference="mask_box")
    assert pixels(load_dataset(config)[0].reference) == pixels(picture(blue=70).crop(HOLE))


def test_a_run_that_needs_references_takes_the_mask_box(bench: Bench) -> None:
    bench.add(1).list(["1-A"])
    needs = {"source", "mask", "reference"}
    assert len(load_dataset(bench.config(reference="mask_box"), needs=needs)) == 1
    (item,) = bench.config().items()
    assert isinstance(item, ItemFiles)
    assert str(check_item(item, bench.config(), needs)) == (
        "item 1: reference_path missing, which the run needs; data.reference=mask_box cuts the reference out of the "
        "image"
    )
    bare = ItemFiles(3, "p", source_path=item.source_path)  # there is no box without a mask
    assert "mask_path, reference_path missing" in str(check_item(bare, bench.config(reference="mask_box"), needs))


# --- half of it ---


@pytest.mark.parametrize(("number", "seen", "written"), [(2, LEFT, RIGHT), (1, RIGHT, LEFT)])
def test_half_of_the_box_is_the_reference_and_the_other_is_written(
    number: int, seen: tuple[int, int, int, int], written: tuple[int, int, int, int], bench: Bench
) -> None:
    bench.add(number, ref=picture((5, 6))).list([f"{number}-AB"])
    example = load_dataset(bench.config(reference="half_box"))[0]
    assert pixels(example.reference) == pixels(picture(blue=number).crop(seen))
    assert pixels(example.mask) == pixels(box_mask(box=written))
    assert pixels(example.target) == pixels(picture(blue=number))


def test_halves_are_cut_across_the_longer_side() -> None:
    assert halves((0, 0, 10, 4)) == ((0, 0, 5, 4), (5, 0, 10, 4))
    assert halves((2, 1, 5, 10)) == ((2, 1, 5, 5), (2, 5, 5, 10))
    with pytest.raises(ImageProblem, match="no halves"):
        halves((3, 3, 4, 4))


def test_the_other_half_may_have_holes_but_must_not_be_empty(bench: Bench) -> None:
    ring = box_mask()
    ring.paste(0, (12, 8, 36, 16))
    bench.add(2, mask=ring).list(["2-A"])
    example = load_dataset(bench.config(reference="half_box"))[0]
    expected = np.asarray(ring).copy()
    expected[:, :24] = 0
    assert np.array_equal(np.asarray(example.mask), expected)
    corner = Image.new("L", SIZE, 0)
    corner.paste(255, (0, 0, 20, 2))
    corner.putpixel((0, 10), 255)
    corner.putpixel((9, 20), 255)
    bench.add(4, mask=corner).list(["4-A"])
    tall = load_dataset(bench.config(reference="half_box"))
    assert mask_box(tall[0].mask) == (0, 10, 10, 21)  # type: ignore[arg-type]


# --- references of other items ---


def cross(bench: Bench, lines: list[str], **options: object) -> CrossBenchData:
    (bench.folder / "cross_bench.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    given: dict[str, object] = {"path": str(bench.folder), "resolution": (SIZE[1], SIZE[0]), **options}
    return CrossBenchData.model_validate(given)


def test_an_item_for_each_reference_of_a_line(bench: Bench) -> None:
    for number in (1, 2):
        bench.add(number, ref=picture(blue=number).crop(HOLE))
    bench.add(3, ref=picture(blue=33))  # a full-size one: its mask's box is the style
    found = load_dataset(cross(bench, ["1-2,3-well-known, yes", "", "3-1-B"]))
    assert [(e.id, e.prompt, dict(e.metadata)) for e in found] == [
        (0, "The text is 'well-known, yes'.", {"text": "well-known, yes", "item": 1, "reference_item": 2}),
        (1, "The text is 'well-known, yes'.", {"text": "well-known, yes", "item": 1, "reference_item": 3}),
        (2, "The text is 'B'.", {"text": "B", "item": 3, "reference_item": 1}),
    ]
    assert [pixels(e.source) for e in found] == [pixels(picture(blue=n)) for n in (1, 1, 3)]
    assert [pixels(e.reference) for e in found] == [pixels(picture(blue=n).crop(HOLE)) for n in (2, 33, 1)]
    assert [e.target for e in found] == [None] * 3


@pytest.mark.parametrize("line", ["1-A", "1-x-A", "1-2,-A", "x-2-A", "1"])
def test_a_malformed_cross_line_is_an_error_of_its_own(line: str, bench: Bench) -> None:
    listed = cross(bench, ["1-2-A", line]).items()
    assert str(listed[1]) == f"cross_bench.txt line 2: {line!r} is not {{number}}-{{reference[,reference]}}-{{text}}"
    assert isinstance(listed[0], ItemFiles)


def test_cross_lists_without_text_or_pictures(bench: Bench) -> None:
    assert str(cross(bench, ["12-3- "]).items()[0]) == (
        "cross_bench.txt line 1: the text of item 12 is empty; write the target text of the mask"
    )
    config = cross(bench.add(1), ["1-2-A"])
    (item,) = config.items()
    assert not isinstance(item, ItemError)
    assert str(check_item(item, config)) == f"item 0: {bench.folder}/test2_ref.png: no such file"
    with pytest.raises(DataError, match=r"has no other\.txt; each of its lines is"):
        config.model_copy(update={"list_file": "other.txt"}).items()


def test_the_commands_know_a_cross_benchmark(bench: Bench) -> None:
    bench.add(1).add(2, ref=picture((8, 8)))
    cross(bench, ["1-2-A"])
    assert data_at(bench.folder, (32, 48)).format == "cross_bench"
    outcome = retouch("data", "validate", bench.folder, "--resolution", "32x48")
    assert (outcome.code, "ok: source, mask, reference; mask in luminance" in outcome.out) == (0, True)
    bench.list(["1-A"])
    assert data_at(bench.folder, (32, 48)).format == "self_bench"


# --- the strip ---


def test_the_strip_holds_the_whole_reference(bench: Bench) -> None:
    red = Image.new("RGB", (10, 20), (255, 0, 0))
    strip = into_strip(red, 8, 48, "contain")
    assert strip.size == (48, 8)
    values = np.asarray(strip)
    assert (values[:, 22:26] == (255, 0, 0)).all()  # 4 x 8 in the middle
    assert (values[:, :22] == 255).all() and (values[:, 26:] == 255).all()
    assert into_strip(Image.new("RGB", (400, 10)), 8, 48, "contain").size == (48, 8)
    bench.add(1, ref=red).list(["1-A"])
    example = load_dataset(bench.config(reference_strip=8))[0]
    assert pixels(example.strip) == pixels(strip)
    assert pixels(example.source) == pixels(picture(blue=1))
    assert load_dataset(bench.config())[0].strip is None


@pytest.mark.parametrize(
    ("reference", "width", "height"),
    [
        ((568, 326), 512, 288),  # of Calligrapher's samples: 293.9 pixels
        ((460, 221), 512, 240),  # 245.9
        ((64, 25), 512, 192),  # 200: as far from 208, and the lower one is taken
        ((1000, 10), 512, 16),  # 5
        ((300, 600), 512, 320),  # 1024, which the strip cannot hold
    ],
)
def test_at_full_width_the_reference_stands_on_the_image_as_calligrapher_stacks_it(
    reference: tuple[int, int], width: int, height: int
) -> None:
    left, right = (255, 0, 0), (0, 0, 255)
    image = Image.new("RGB", reference, left)
    image.paste(right, (reference[0] // 2, 0, *reference))
    values = np.asarray(into_strip(image, 320, width, "full_width"))
    assert values.shape == (320, width, 3)
    assert (values[: 320 - height] == 255).all()
    assert (values[320 - height :, : width // 2 - 8] == left).all()
    assert (values[320 - height :, width // 2 + 8 :] == right).all()


def test_a_data_set_stacks_at_full_width_if_asked(bench: Bench) -> None:
    red = Image.new("RGB", (30, 10), (255, 0, 0))
    bench.add(1, ref=red).list(["1-A"])
    strip = load_dataset(bench.config(reference_strip=24, reference_strip_fit="full_width"))[0].strip
    values = np.asarray(strip)
    assert values.shape == (24, 48, 3)
    assert (values[:8] == 255).all() and (values[8:] == (255, 0, 0)).all()


def test_stacking_keeps_the_strip_and_repaints_below() -> None:
    strip = Image.new("RGB", (SIZE[0], 8), (1, 2, 3))
    page, mask = stack_above(strip, picture()), stack_above(strip, box_mask())
    assert page.size == mask.size == (48, 40)
    assert pixels(page.crop((0, 8, 48, 40))) == pixels(picture())
    assert pixels(page.crop((0, 0, 48, 8))) == pixels(strip)
    assert mask_box(mask) == (8, 12, 40, 28)
    assert stack_above(None, page) is page


def test_a_strip_needs_an_image_to_stand_above(tmp_path: Path) -> None:
    """From nothing (text to image) the model would be trained without the reference that the run file asks for."""
    picture().save(tmp_path / "r.png")
    entry = {"prompt": "a sign", "reference_path": "r.png"}
    (tmp_path / "list.json").write_text(json.dumps([entry]), encoding="utf-8")
    data = {"format": "manifest", "path": str(tmp_path / "list.json"), "resolution": 64, "reference_strip": 16}
    model = {"family": "flux_dev", "path": "tiny"}
    run = parse_run({"name": "a", "model": model, "data": data, "algorithm": {"name": "grpo"}, "rewards": {"ocr": {}}})
    with pytest.raises(DataError, match="image_path missing, which the run needs"):
        load_dataset(run.data, "data", needed_pictures(run, training=True))
