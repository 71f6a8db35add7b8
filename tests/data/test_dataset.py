"""Loading: sizes, what is skipped, what stops; and `retouch data validate`."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image, ImageOps

from retouch.config import ConfigError
from retouch.data.base import DataError, ItemFiles
from retouch.data.dataset import load_dataset
from retouch.data.formats.calligrapher import SelfBenchData
from retouch.data.formats.manifest import ManifestData
from retouch.data.item import read_item
from retouch.data.validate import Finding, validate, validation_table
from retouch.errors import ImageProblem
from retouch.imaging.masks import Box, mask_box
from tests.command_line import retouch

from .conftest import HOLE, Bench, box_mask, picture, pixels


def one(bench: Bench, size: tuple[int, int], hole: Box, **options: object) -> SelfBenchData:
    """A folder with one picture of `size` (width, height) and a hole."""
    bench.add(1, picture(size, blue=1), box_mask(size, hole), picture(size, blue=2)).list(["1-A"])
    return bench.config(**options)


# --- sizes ---


@pytest.mark.parametrize(
    ("hole", "window"),
    [
        ((45, 10, 55, 20), (25, 0, 75, 50)),
        ((0, 0, 20, 50), (0, 0, 50, 50)),
        ((70, 5, 98, 9), (50, 0, 100, 50)),
        ((20, 5, 70, 45), (20, 0, 70, 50)),  # as wide as the crop
    ],
)
def test_a_crop_is_cut_around_the_mask_from_every_picture(hole: Box, window: Box, bench: Bench) -> None:
    (example,) = load_dataset(one(bench, (100, 50), hole, resolution=50))
    assert pixels(example.source) == pixels(picture((100, 50), blue=1).crop(window))
    assert pixels(example.target) == pixels(picture((100, 50), blue=2).crop(window))
    assert pixels(example.mask) == pixels(box_mask((100, 50), hole).crop(window))
    assert pixels(example.reference) == pixels(picture((100, 50), blue=2).crop(hole))


def test_a_crop_that_scales_down_keeps_the_hole_where_it_was(bench: Bench) -> None:
    # 200 x 100 -> 100 x 50, centre of the hole at 75 -> window from 50
    (example,) = load_dataset(one(bench, (200, 100), (140, 20, 160, 60), resolution=50))
    assert example.source is not None and example.source.size == (50, 50)
    assert mask_box(example.mask) == (20, 10, 30, 30)  # type: ignore[arg-type]
    red = np.asarray(example.source)[25, :, 0]
    assert red[10] == pytest.approx(2 * (50 + 10) + 0.5, abs=1)  # x of the source


def test_stretching_ignores_the_aspect_ratio(bench: Bench) -> None:
    (example,) = load_dataset(one(bench, (100, 50), (0, 10, 100, 20), fit="stretch", resolution=[25, 50]))
    assert example.source is not None and example.source.size == (50, 25)
    assert mask_box(example.mask) == (0, 5, 50, 10)  # type: ignore[arg-type]
    (example,) = load_dataset(one(bench, (100, 50), (0, 10, 100, 20), fit="stretch", resolution=50))
    assert mask_box(example.mask) == (0, 10, 50, 20)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size", "hole", "resolution", "problem"),
    [
        (
            (100, 50),
            (0, 10, 100, 20),
            50,
            "cropping to 50 x 50 cuts off 50% of the masked area; set data.fit=stretch or another data.resolution",
        ),
        (
            (100, 50),
            (20, 0, 75, 20),  # 55 wide
            50,
            "cropping to 50 x 50 cuts off 9% of the masked area; set data.fit=stretch or another data.resolution",
        ),
        ((100, 50), (10, 0, 60, 50), 50, "the mask covers all of the 50 x 50 crop; set data.fit=stretch"),
        ((100, 100), (10, 10, 11, 12), 10, "the masked area vanishes at 10 x 10; raise data.resolution"),
    ],
)
def test_a_size_that_spoils_the_mask(
    size: tuple[int, int], hole: Box, resolution: int, problem: str, bench: Bench
) -> None:
    with pytest.raises(DataError) as caught:
        load_dataset(one(bench, size, hole, resolution=resolution, max_bad_items=0))
    assert f"; the first: item 1: {bench.folder}/test1_mask.png: {problem}. `retouch data validate`" in str(
        caught.value
    )


@pytest.mark.parametrize("key", ["data", "warmup_data", "evaluation.data"])
def test_a_remedy_names_the_section_that_it_is_for(key: str, bench: Bench) -> None:
    """It named `data` whichever section the items were of."""
    with pytest.raises(DataError) as caught:
        load_dataset(one(bench, (100, 50), (0, 10, 100, 20), resolution=50, max_bad_items=0), key)
    assert f"; set {key}.fit=stretch or another {key}.resolution. `retouch" in str(caught.value)


def test_rounding_may_cost_a_row_of_the_mask(bench: Bench) -> None:
    (example,) = load_dataset(one(bench, (200, 100), (20, 0, 121, 50), resolution=100))  # 101 wide
    assert mask_box(example.mask) == (0, 0, 100, 50)  # type: ignore[arg-type]


def test_inverted_masks(bench: Bench) -> None:
    config = one(bench, (48, 32), HOLE)
    box_mask().point(lambda v: 255 - v).save(bench.folder / "test1_mask.png")
    (example,) = load_dataset(config.model_copy(update={"invert_mask": True}))
    assert pixels(example.mask) == pixels(box_mask())


@pytest.mark.parametrize("invert", [False, True])
def test_masks_that_are_made_from_lines_are_not_inverted(tmp_path: Path, invert: bool) -> None:
    """Beside a mask of a file, which is: both examples repaint the same box."""
    left, top, right, bottom = HOLE
    picture().save(tmp_path / "a.png")
    box_mask().point(lambda v: 255 - v if invert else v).save(tmp_path / "m.png")
    by_lines = {
        "prompt": "p",
        "image_path": "a.png",
        "lines": [{"text": "A", "box": [left, top, right - 1, bottom - 1]}],
    }
    (tmp_path / "list.json").write_text(
        json.dumps([{"prompt": "p", "image_path": "a.png", "mask_path": "m.png"}, by_lines])
    )
    config = ManifestData(path=str(tmp_path / "list.json"), resolution=(32, 48), invert_mask=invert, max_bad_items=0)
    by_file, made = load_dataset(config)
    assert pixels(by_file.mask) == pixels(made.mask) == pixels(box_mask())


def test_the_mask_of_a_reference_is_inverted_as_the_others_are(tmp_path: Path) -> None:
    """The mask that cuts a reference of its size to its text is a file of the data set, too."""
    picture().save(tmp_path / "a.png")
    box_mask().point(lambda v: 255 - v).save(tmp_path / "m.png")
    image, mask = tmp_path / "a.png", tmp_path / "m.png"
    item = ItemFiles(1, "p", image, mask, reference_path=image, reference_mask_path=mask)
    example, _ = read_item(item, ManifestData(path="", resolution=(32, 48), invert_mask=True))
    assert pixels(example.reference) == pixels(picture().crop(HOLE))


# --- lists ---


def six(bench: Bench) -> Bench:
    """Six items: 2 has an empty mask, line 4 is malformed, 5 has no source."""
    for number in (1, 2, 3, 5, 6):
        bench.add(number)
    Image.new("L", (48, 32)).save(bench.folder / "test2_mask.png")
    (bench.folder / "test5_source.png").unlink()
    return bench.list(["1-A", "2-B", "3-C", "four", "5-E", "6-F"])


def test_broken_items_are_skipped_and_counted(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "retouch"):
        data = load_dataset(six(bench).config(max_bad_items=3), "warmup_data")
    assert [example.id for example in data] == [1, 3, 6]
    assert data.prompts == ["The text is 'A'.", "The text is 'C'.", "The text is 'F'."]
    first, second, third, count = (record.getMessage() for record in caplog.records)
    assert first.startswith(f"warmup_data: skipped item 2: {bench.folder}/test2_mask.png: the mask (luminance channel")
    assert second == "warmup_data: skipped self_bench.txt line 4: 'four' is not {number}-{text}"
    assert third == f"warmup_data: skipped item 5: {bench.folder}/test5_source.png: no such file"
    assert count == "warmup_data: skipped 3 of 6 items (max_bad_items 3)"


def test_one_more_is_an_error(bench: Bench) -> None:
    with pytest.raises(DataError) as caught:
        load_dataset(six(bench).config(max_bad_items=2))
    message = str(caught.value)
    assert message.startswith("data: 3 of 6 items are broken, more than max_bad_items 2; the first: item 2: ")
    assert message.endswith(". `retouch data validate` lists them all")


def test_the_limit_counts_what_is_listed(bench: Bench) -> None:
    assert [example.id for example in load_dataset(six(bench).config(limit=3))] == [1, 3]
    assert [example.id for example in load_dataset(bench.config(limit=1, max_bad_items=0))] == [1]


def test_two_items_with_one_id(bench: Bench) -> None:
    bench.add(1).add(2).list(["1-A", "2-B", "01-C"])
    with pytest.raises(DataError) as caught:
        load_dataset(bench.config())
    assert str(caught.value) == f"data: item id 1 appears more than once in {bench.folder}; ids must differ"


def test_nothing_to_use(bench: Bench) -> None:
    with pytest.raises(DataError) as caught:
        load_dataset(bench.list([]).config())
    assert str(caught.value) == f"data: {bench.folder} holds no usable item"
    with pytest.raises(DataError) as caught:
        load_dataset(bench.list(["A"]).config())
    assert str(caught.value) == (
        f"data: {bench.folder} holds no usable item; self_bench.txt line 1: 'A' is not {{number}}-{{text}}"
    )


def test_a_data_set_is_a_sequence(bench: Bench) -> None:
    for number in range(4):
        bench.add(number)
    data = load_dataset(bench.list(f"{n}-{'AABB'[n]}" for n in range(4)).config())
    assert len(data) == 4
    assert data[-1].id == 3
    assert [example.id for example in data[1:3]] == [1, 2]
    assert [example.id for example in data[::-2]] == [3, 1]
    assert data.prompts == ["The text is 'A'.", "The text is 'B'."]
    with pytest.raises(IndexError):
        data[4]


def test_files_are_opened_on_access(bench: Bench) -> None:
    data = load_dataset(bench.add(1).list(["1-A"]).config())
    (bench.folder / "test1_source.png").unlink()
    with pytest.raises(ImageProblem, match="no such file"):
        data[0]


# --- retouch data validate ---


def test_findings_name_every_item(bench: Bench) -> None:
    findings = validate(six(bench).folder, (32, 48))
    assert [(f.item, f.problem is None) for f in findings] == [
        ("item 1", True),
        ("item 2", False),
        ("item 3", True),
        ("self_bench.txt line 4", False),
        ("item 5", False),
        ("item 6", True),
    ]
    assert {f.section for f in findings} == {"data"}
    assert findings[0].note == "source, mask, target; mask in luminance"


def test_a_mask_with_an_erased_region_is_named(bench: Bench) -> None:
    bench.add(1).list(["1-A"])
    file = bench.folder / "test1_mask.png"
    mask = Image.open(file).convert("L")
    erased = Image.new("RGB", mask.size)
    erased.putalpha(ImageOps.invert(mask))
    erased.save(file)
    [finding] = validate(bench.folder, (32, 48))
    assert "mask in alpha; opaque pixels are repainted, but the border of this mask is opaque" in finding.note
    assert finding.note.endswith("set data.invert_mask=true")


def test_the_table_of_problems(bench: Bench) -> None:
    outcome = retouch("data", "validate", six(bench).folder, "--resolution", "32x48")
    assert (outcome.code, outcome.err) == (2, "")
    lines = outcome.out.splitlines()
    assert len(lines) == 4
    assert lines[1] == f"{'data':16} {'self_bench.txt line 4':24} 'four' is not {{number}}-{{text}}"
    assert lines[2] == f"{'data':16} {'item 5':24} {bench.folder}/test5_source.png: no such file"
    assert lines[3] == "3 items can be used; 3 problems"


def test_the_table_of_good_items() -> None:
    findings = [Finding("data", f"item {n}", None, "source, mask; mask in alpha") for n in range(7)]
    lines = validation_table(findings).splitlines()
    assert lines[0] == f"{'data':16} {'item 0':24} ok: source, mask; mask in alpha"
    assert lines[5:] == ["... and 2 more", "7 items can be used"]
    assert validation_table(findings[:5]).splitlines()[-2:] == [
        f"{'data':16} {'item 4':24} ok: source, mask; mask in alpha",
        "5 items can be used",
    ]


def test_a_good_folder(bench: Bench) -> None:
    outcome = retouch("data", "validate", bench.add(1, ref=picture(blue=3)).list(["1-A"]).folder, "--resolution", "32")
    assert outcome.code == 0
    line = f"{'data':16} {'item 1':24} ok: source, mask, target, reference; mask in luminance; text 'A'"
    assert outcome.out.splitlines() == [line, "1 item can be used"]


def test_what_loading_would_refuse_is_found(bench: Bench) -> None:
    outcome = retouch("data", "validate", bench.add(1).list(["1-A", "1-B"]).folder, "--resolution", "32")
    assert outcome.code == 2
    assert outcome.out.splitlines() == [
        f"{'data':16} {'item 1':24} the id appears more than once; ids must differ",
        "0 items can be used; 1 problem",
    ]
    outcome = retouch("data", "validate", bench.list([]).folder)
    assert outcome.code == 2
    assert "lists no items" in outcome.out


def test_a_manifest(bench: Bench) -> None:
    entry = {"image_path": "test1_source.png", "mask_path": "test1_mask.png", "prompt": "x"}
    path = bench.add(1).folder / "data.json"
    path.write_text(json.dumps([entry, {**entry, "mask_path": "nowhere.png"}]))
    outcome = retouch("data", "validate", path, "--resolution", "32x48")
    assert outcome.code == 2
    assert outcome.out.splitlines() == [
        f"{'data':16} {'item 1':24} {bench.folder}/nowhere.png: no such file",
        "1 item can be used; 1 problem",
    ]


def test_all_sections_of_a_run(bench: Bench, tmp_path: Path) -> None:
    section = {"format": "self_bench", "path": str(six(bench).folder), "resolution": [32, 48]}
    run = {
        "name": "r",
        "model": {"family": "flux_fill", "path": "tiny"},
        "data": {**section, "limit": 1},
        "warmup_data": {**section, "limit": 2},
        "evaluation": {"data": section},
        "algorithm": {"name": "sft"},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(run), encoding="utf-8")
    assert [(f.section, f.item) for f in validate(path, (1, 1)) if f.problem] == [
        ("warmup_data", "item 2"),
        ("evaluation.data", "item 2"),
        ("evaluation.data", "self_bench.txt line 4"),
        ("evaluation.data", "item 5"),
    ]


def offline_run(bench: Bench, tmp_path: Path) -> Path:
    """Pairs: item 0 is whole, 1 has no mask, 2 has no rejected picture, 3 a target beside its mask."""
    whole = {"image_path": "test1_source.png", "mask_path": "test1_mask.png", "prompt": "x"}
    pair = {"win_path": "test1_source.png", "lose_path": "test1_source.png"}
    entries = [
        {**whole, **pair},
        {**whole, **pair, "mask_path": None},
        {**whole, "win_path": "test1_source.png"},
        {**whole, "target_path": "test1_source.png"},
    ]
    (bench.add(1).folder / "data.json").write_text(json.dumps(entries))
    section = {"format": "manifest", "path": str(bench.folder / "data.json"), "resolution": [32, 48]}
    run = {
        "name": "r",
        "model": {"family": "flux_fill", "path": "tiny"},
        "data": section,
        "warmup_data": section,
        "algorithm": {"name": "dpo", "pairs": "offline"},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(run), encoding="utf-8")
    return path


def test_pairs_are_asked_of_the_data_of_offline_dpo_and_masks_of_every_section(bench: Bench, tmp_path: Path) -> None:
    findings = validate(offline_run(bench, tmp_path), (1, 1))
    assert [(f.section, f.item, f.problem) for f in findings if f.problem] == [
        ("data", "item 1", "mask_path missing, which the run needs"),
        ("data", "item 2", "lose_path missing, which the run needs"),
        ("data", "item 3", "lose_path, win_path missing, which the run needs"),
        ("warmup_data", "item 1", "mask_path missing, which the run needs"),
    ]
    assert [f.note for f in findings if not f.problem] == [
        "source, mask, win, lose; mask in luminance",
        "source, mask, win, lose; mask in luminance",
        "source, mask, win; mask in luminance",
        "source, mask, target; mask in luminance",
    ]


def test_a_manifest_alone_asks_for_nothing_it_does_not_name(bench: Bench) -> None:
    path = bench.add(1).folder / "data.json"
    path.write_text(json.dumps([{"image_path": "test1_source.png", "prompt": "x"}]))
    outcome = retouch("data", "validate", path, "--resolution", "32x48")
    assert outcome.code == 0
    assert outcome.out.splitlines()[1] == "1 item can be used"


def test_an_item_without_a_mask_has_no_channel(bench: Bench) -> None:
    path = bench.add(1).folder / "data.json"
    path.write_text(json.dumps([{"image_path": "test1_source.png", "prompt": "x"}]))
    assert [f.note for f in validate(path, (32, 48))] == ["source"]


def test_a_path_that_is_no_data(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        validate(tmp_path / "data.xlsx", (32, 32))
    assert str(caught.value) == (
        f"{tmp_path}/data.xlsx: no such file or folder; expected a mapping_file.json, a self_bench.txt, a "
        "cross_bench.txt, votes of `retouch label`, a .txt of prompts, a manifest (.json, .jsonl, .csv, .tsv), an "
        "imagefolder (metadata.jsonl or metadata.csv), or a run file"
    )
    with pytest.raises(ConfigError, match="no such run file"):
        validate(tmp_path / "run.yaml", (32, 32))
    outcome = retouch("data", "validate", tmp_path)
    assert outcome.code == 2
    assert outcome.err.startswith(f"error: {tmp_path}: expected a mapping_file.json, a self_bench.txt")


def test_a_size_beside_a_run_file(tmp_path: Path) -> None:
    """Its sections have their own; the option was passed over."""
    outcome = retouch("data", "validate", tmp_path / "RUN.YAML", "--resolution=32")
    assert outcome.code == 2 and outcome.err.splitlines()[-1].startswith("error: --resolution: given with ")


@pytest.mark.parametrize("size", ["0", "32x", "axb", "1x2x3", "-5", "3.5"])
def test_a_size_that_is_none(size: str, tmp_path: Path) -> None:
    outcome = retouch("data", "validate", tmp_path, f"--resolution={size}")
    message = (
        f"error: --resolution: given {size!r}; write a side like 512, or HEIGHTxWIDTH like 32x64, of at most 8192\n"
    )
    assert (outcome.code, outcome.err) == (2, message)
